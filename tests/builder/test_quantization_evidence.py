"""Real builds seal statistics of their quantized weights, and the facts that passes recorded."""

import json
from pathlib import Path

import pytest

from ingot.artifact import Artifact
from ingot.builder import build
from ingot.builder.quantization_evidence import write_pass_facts
from ingot.runtime import Engine, SamplingParams
from ingot.validation.evidence import sealed_quantization
from ingot.validation.quantization import Quantization
from tests.builder.test_layer_kl import EVALUATED
from tests.conftest import UNMEASURED, BuildArtifact
from tests.data_paths import DEMO_MODEL

RECIPE = {
    "checkpoint": str(DEMO_MODEL),
    "calibration": {"sequences": 4, "sequence_tokens": 64},
    "passes": [
        "fold-constants",
        "pack-projections",
        {"prune-structure": {"ffn": 0.5, "kv_groups": 2, "layers": 4, "tokens": 256}},
        {"prune-weights": {"method": "wanda", "sparsity": "2:4"}},
        {"quantize-weights": {"bits": 4, "block_size": 32, "symmetric": True}},
    ],
}


def write_text(folder: Path) -> Path:
    """A calibration text that is not the evaluation text."""
    text = folder / "text.txt"
    text.write_text("\n".join(f"def f{i}(x):\n    return x + {i * i}\n" for i in range(200)))
    return text


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("pruned")
    text = write_text(folder)
    calibration = {**RECIPE["calibration"], "text": str(text)}  # type: ignore[dict-item]
    (folder / "recipe.yaml").write_text(json.dumps({**RECIPE, "calibration": calibration}))
    return build(str(folder / "recipe.yaml"), UNMEASURED, folder / "out").artifact


def test_manifest_and_config_of_a_pruned_model_have_its_smaller_shapes(pruned: Artifact) -> None:
    assert pruned.manifest.model.num_layers == 4
    assert (pruned.manifest.kv.num_layers, pruned.manifest.kv.num_kv_heads) == (4, 2)
    config = json.loads(pruned.file("tokenizer/config.json").read_text())
    keys = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    assert [config[key] for key in keys] == [4, 4, 2, 32, 384]


def test_facts_of_pruning_are_sealed(pruned: Artifact) -> None:
    found = json.loads(pruned.file("evidence/passes.json").read_text())
    structure, weights = found["prune-structure"], found["prune-weights"]["weights"]
    assert len(structure["influence"]) == 6
    assert {site["kind"] for site in structure["sites"]} == {"ffn", "kv_groups"}
    assert len(weights) == 16
    assert all(row["sparsity"] >= 0.5 and row["pattern"] == "2:4" for row in weights)


def test_a_pruned_model_generates(pruned: Artifact) -> None:
    with Engine.load(pruned, kv_blocks=8) as engine:
        (output,) = engine.generate(["def f1(x):"], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(output.token_ids) == 8


def test_without_facts_no_file_is_written(tmp_path: Path) -> None:
    write_pass_facts({}, tmp_path / "evidence")
    assert not (tmp_path / "evidence").exists()


def test_stored_bytes_are_those_of_the_weights_file(build_unmeasured: BuildArtifact) -> None:
    evaluated = build_unmeasured("int4-cpu")
    found = sealed_quantization(evaluated)
    stored = sum(weight.stored_bytes or 0 for weight in found.weights)
    file = evaluated.file("program/weights.safetensors").stat().st_size
    assert 0.8 * file < stored < file


def test_a_recipe_without_evaluation_seals_statistics_without_kl(build_unmeasured: BuildArtifact) -> None:
    sealed = sealed_quantization(build_unmeasured("int4-cpu"))
    assert sealed.kl_absent == "the recipe has no evaluation text"
    assert all(weight.kl is None and weight.end_share is not None for weight in sealed.weights)


def test_a_build_without_quantization_seals_no_statistics(build_unmeasured: BuildArtifact) -> None:
    artifact = build_unmeasured("fp32-cpu")
    assert sealed_quantization(artifact) == Quantization()
    assert not [name for name in artifact.manifest.files if name.startswith("evidence/quantization")]


def test_weights_scaled_after_others_were_rounded_have_no_kl(
    build_unmeasured: BuildArtifact, two_layers: Path, tmp_path: Path, memory_of_this_process: None
) -> None:
    passes = (
        "passes=[{quantize-weights: {lm_head: none, overrides: {'*.mlp.*': none}}}, "
        "{awq: {steps: 2}}, {quantize-weights: {lm_head: none}}]"
    )
    calibration = (f"calibration.text={write_text(tmp_path)}", "calibration.sequences=2")
    artifact = build_unmeasured("fp32-cpu", two_layers, passes, EVALUATED, *calibration, "generate=null")
    assert sealed_quantization(artifact).kl_absent == "awq changed weights when others were quantized already"
