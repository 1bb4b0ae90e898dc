"""The quantization table of real builds: KL of single weights, stored bytes, and reasons where there is no KL.

evidence/passes.json: what passes decided, kept in the artifact; a pruned model's facts and config.json agree.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.builder import build
from ingot.builder.quantization_evidence import write_pass_facts
from ingot.passes.weights import weight_sites
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.runtime import Engine, SamplingParams
from ingot.validation.evidence import sealed_quantization
from ingot.validation.quantization import Quantization
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


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("pruned")
    text = folder / "text.txt"
    text.write_text("\n".join(f"def f{i}(x):\n    return x + {i * i}\n" for i in range(200)))
    calibration = {**RECIPE["calibration"], "text": str(text)}  # type: ignore[dict-item]
    (folder / "recipe.yaml").write_text(json.dumps({**RECIPE, "calibration": calibration}))
    return build(str(folder / "recipe.yaml"), UNMEASURED, folder / "out").artifact


def test_the_artifact_holds_the_smaller_shapes(pruned: Artifact) -> None:
    assert pruned.manifest.model.num_layers == 4
    assert (pruned.manifest.kv.num_layers, pruned.manifest.kv.num_kv_heads) == (4, 2)
    config = json.loads(pruned.file("tokenizer/config.json").read_text())
    keys = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    assert [config[key] for key in keys] == [4, 4, 2, 32, 384]


def test_the_statistics_are_kept(pruned: Artifact) -> None:
    found = json.loads(pruned.file("evidence/passes.json").read_text())
    structure, weights = found["prune-structure"], found["prune-weights"]["weights"]
    assert len(structure["influence"]) == 6
    assert {site["kind"] for site in structure["sites"]} == {"ffn", "kv_groups"}
    assert len(weights) == 16
    assert all(row["sparsity"] >= 0.5 and row["pattern"] == "2:4" for row in weights)


def test_it_generates(pruned: Artifact) -> None:
    with Engine.load(pruned, kv_blocks=8) as engine:
        (output,) = engine.generate(["def f1(x):"], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(output.token_ids) == 8


def test_nothing_is_written_where_no_pass_left_facts(tmp_path: Path) -> None:
    write_pass_facts({}, tmp_path / "evidence")
    assert not (tmp_path / "evidence").exists()


TEXT = DEMO_MODEL / "heldout.txt"
EVALUATED = "evaluation={text: checkpoint:heldout.txt, tokens: 512, window_tokens: 128, layer_kl_tokens: 256}"


@pytest.fixture(scope="module")
def evaluated(build_unmeasured: BuildArtifact, two_layers: Path, memory_of_this_process: None) -> Artifact:
    """Two layers of the demo model in 4 bits, head and table in 8."""
    return build_unmeasured("int4-cpu", two_layers, EVALUATED, "generate=null")


@pytest.fixture(scope="module")
def found(evaluated: Artifact) -> Quantization:
    return sealed_quantization(evaluated)


def test_every_weight_has_its_kl_and_its_figures(found: Quantization) -> None:
    assert len(found.weights) == 1 + 2 * 4  # the tied table, and four packed layers of each of two
    for weight in found.weights:
        assert weight.kl is not None
        assert weight.kl > 0
        assert weight.relative_error is not None
        assert weight.scale_min is not None
        assert weight.scale_max is not None
        assert weight.scale_min <= weight.scale_max
    assert found.kl is not None
    assert (found.kl.tokens, found.kl.window_tokens) == (256, 128)


def test_eight_bits_cost_less_than_four(found: Quantization) -> None:
    by_name = {weight.name: weight.kl or 0.0 for weight in found.weights}
    assert by_name.pop("embed_tokens") < np.median(list(by_name.values()))


def test_stored_bytes_are_those_of_the_weights_file(found: Quantization, evaluated: Artifact) -> None:
    stored = sum(weight.stored_bytes or 0 for weight in found.weights)
    file = evaluated.file("program/weights.safetensors").stat().st_size
    assert 0.8 * file < stored < file


def test_an_artifact_without_evaluation_keeps_its_statistics(build_unmeasured: BuildArtifact) -> None:
    sealed = sealed_quantization(build_unmeasured("int4-cpu"))
    assert sealed.kl_absent == "the recipe has no evaluation text"
    assert all(weight.kl is None and weight.end_share is not None for weight in sealed.weights)


def test_a_build_without_quantization_keeps_no_table(build_unmeasured: BuildArtifact) -> None:
    artifact = build_unmeasured("fp32-cpu")
    assert sealed_quantization(artifact) == Quantization()
    assert artifact.manifest.evidence is None


def test_weights_that_are_scaled_after_a_rounding_have_no_kl(
    build_unmeasured: BuildArtifact, two_layers: Path, memory_of_this_process: None
) -> None:
    passes = (
        "passes=[{quantize-weights: {lm_head: none, overrides: {'*.mlp.*': none}}}, "
        "{awq: {steps: 2}}, {quantize-weights: {lm_head: none}}]"
    )
    calibration = ("calibration.text=checkpoint:heldout.txt", "calibration.sequences=2")
    artifact = build_unmeasured("fp32-cpu", two_layers, passes, EVALUATED, *calibration, "generate=null")
    assert sealed_quantization(artifact).kl_absent == "awq changed weights when others were quantized already"


def _mean_kl(artifact: Artifact) -> float:
    accuracy = json.loads(artifact.file("evidence/accuracy.json").read_bytes())
    return float(sum(item["kl"] for item in accuracy["items"])) / int(accuracy["predicted_tokens"])


def test_single_weights_add_up_to_about_the_whole(found: Quantization, evaluated: Artifact, two_layers: Path) -> None:
    total = sum(weight.kl or 0.0 for weight in found.weights)
    assert 0.5 < total / _mean_kl(evaluated) < 2
    names = {site.node.name for site in weight_sites(import_checkpoint(Checkpoint.open(two_layers)))}
    assert {weight.name for weight in found.weights if "self_attn.o" in weight.name} <= names
