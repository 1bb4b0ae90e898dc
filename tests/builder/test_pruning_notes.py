"""evidence/pruning.json: what the pruning passes did, kept in the artifact; its facts and its config.json agree."""

import json
from pathlib import Path

import pytest

from ingot.artifact import Artifact
from ingot.builder import build
from ingot.builder.pruning_notes import write_pruning
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
    found = json.loads(pruned.file("evidence/pruning.json").read_text())
    assert len(found["structure"]["influence"]) == 6
    assert {site["kind"] for site in found["structure"]["sites"]} == {"ffn", "kv_groups"}
    assert len(found["weights"]) == 16
    assert all(row["sparsity"] >= 0.5 and row["pattern"] == "2:4" for row in found["weights"])


def test_it_generates(pruned: Artifact) -> None:
    with Engine.load(pruned, kv_blocks=8) as engine:
        (output,) = engine.generate(["def f1(x):"], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(output.token_ids) == 8


def test_nothing_is_written_where_nothing_was_pruned(tmp_path: Path) -> None:
    write_pruning({"ingot.model": "{}"}, tmp_path / "evidence")
    assert not (tmp_path / "evidence").exists()
