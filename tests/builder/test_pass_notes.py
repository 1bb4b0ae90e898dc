"""evidence/passes.json: what passes decided, kept in the artifact; a pruned model's facts and config.json agree."""

import json
from pathlib import Path

import pytest

from ingot.artifact import Artifact
from ingot.builder import build
from ingot.builder.pass_notes import pass_facts, write_pass_facts
from ingot.runtime import Engine, SamplingParams
from tests.conftest import UNMEASURED
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


def test_facts_of_every_pass_are_kept_under_its_name() -> None:
    facts = {"ingot.awq": "[1]", "ingot.distill": '{"steps": 3}', "ingot.mixed-precision": "{}", "ingot.model": "{}"}
    assert pass_facts(facts) == {"awq": [1], "distill": {"steps": 3}, "mixed-precision": {}}


def test_it_generates(pruned: Artifact) -> None:
    with Engine.load(pruned, kv_blocks=8) as engine:
        (output,) = engine.generate(["def f1(x):"], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(output.token_ids) == 8


def test_nothing_is_written_where_no_pass_left_facts(tmp_path: Path) -> None:
    write_pass_facts({"ingot.model": "{}"}, tmp_path / "evidence")
    assert not (tmp_path / "evidence").exists()
