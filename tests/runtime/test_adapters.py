"""Adapters for one artifact: where their matrices belong, what their digest covers, and which are refused by name."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.artifact.peft import CONFIG, WEIGHTS
from ingot.artifact.programs.projections import Projection
from ingot.errors import AdapterError
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.passes.weights import float32_values, weight_sites
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.targets.cpu.lowering import lower_to_operations
from ingot.runtime.adapters import read_adapter
from tests.data_paths import ROOT

FOLDER = ROOT / "tests" / "fixtures" / "adapters"
PASSES = ("fold-constants", "pack-projections", "fuse-gated-activation", "clean-up")
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


def projections_of(passes: Sequence[str], checkpoint: Path = FOLDER / "checkpoint") -> tuple[Projection, ...]:
    """What the program of a checkpoint says of its layers, after these passes."""
    model = import_checkpoint(Checkpoint.open(checkpoint))
    PassManager([make_pass(name) for name in passes]).run(model)
    return lower_to_operations(model).program.projections


@pytest.fixture(scope="module")
def projections() -> tuple[Projection, ...]:
    return projections_of(PASSES)


@pytest.mark.parametrize("passes", [PASSES, ("fold-constants", "clean-up")], ids=["packed", "apart"])
@pytest.mark.parametrize("kind", ["attention", "patterns"])
def test_each_layer_plus_its_matrices_is_peft_s_merge(kind: str, passes: Sequence[str]) -> None:
    """Rows of the packed weights plus B A equal what PEFT merges, layer by layer, under the program's own names."""
    expected = load_file(FOLDER / kind / "merged.safetensors")
    model = import_checkpoint(Checkpoint.open(FOLDER / "checkpoint"))
    PassManager([make_pass(name) for name in passes]).run(model)
    program = lower_to_operations(model).program
    base = {site.node.name: float32_values(site.operand) for site in weight_sites(model)}
    adapter = read_adapter(kind, FOLDER / kind, program.projections)
    checked = set()
    for projection in program.projections:
        rows = slice(projection.first_row, projection.first_row + projection.rows)
        weight = base[projection.node][rows]
        if not len(weight):  # gate and up projection became one operation in the lowering alone
            weight = base[projection.module.removeprefix("model.")]
        for low in adapter.changes.get(projection.node, ()):
            if low.module == projection.module:
                assert low.first_row == projection.first_row
                weight = weight + low.b @ low.a
        merged = expected.get(f"{projection.module}.weight")
        if merged is not None:
            np.testing.assert_allclose(weight, merged, rtol=0, atol=2e-6)
            checked.add(f"{projection.module}.weight")
    assert checked == expected.keys()


def test_a_digest_covers_what_is_computed_and_nothing_else(tmp_path: Path, projections: Sequence[Projection]) -> None:
    first = read_adapter("first", FOLDER / "attention", projections)
    renamed = read_adapter("second", copied(tmp_path / "a", base_model_name_or_path="elsewhere"), projections)
    assert renamed.digest == first.digest

    def nudge(tensors: dict[str, Any]) -> None:
        tensors[f"{Q_PROJ}.lora_B.weight"][3, 1] += 1e-3

    others = [
        read_adapter("a", copied(tmp_path / "b", nudge), projections),
        read_adapter("a", copied(tmp_path / "c", lora_alpha=13), projections),
        read_adapter("a", copied(tmp_path / "d", use_rslora=True), projections),
        read_adapter("a", FOLDER / "patterns", projections),
    ]
    assert len({first.digest, *(each.digest for each in others)}) == 5
    assert (first.rank, others[3].rank) == (4, 6)


def copied(folder: Path, change: Callable[[dict[str, Any]], object] = lambda tensors: None, **config: object) -> Path:
    """A copy of the adapter `attention` with other tensors and other keys of its configuration."""
    shutil.copytree(FOLDER / "attention", folder)
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({**json.loads((folder / CONFIG).read_text()), **config}))
    return folder


def _moved(tensors: dict[str, Any]) -> None:
    for part in ("lora_A", "lora_B"):
        tensors[f"{Q_PROJ.replace('layers.0', 'layers.7')}.{part}.weight"] = tensors[f"{Q_PROJ}.{part}.weight"]


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], dict[str, Any], str]] = {
    "other-model": (_moved, {}, r"'model.layers.7.self_attn.q_proj', for which .* it has .*q_proj.* Did you mean"),
    "embedding": (
        lambda tensors: tensors.update(
            {"base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((4, 48), np.float32)}
        ),
        {},
        "changes an embedding .*merge it with PEFT",
    ),
    "shape": (
        lambda tensors: tensors.update({f"{Q_PROJ}.lora_A.weight": np.zeros((4, 16), np.float32)}),
        {},
        r"has the shape \[4, 16\], .* require \[4, 32\]",
    ),
    "nan": (
        lambda tensors: tensors[f"{Q_PROJ}.lora_A.weight"].__setitem__((1, 2), np.nan),
        {},
        "lora_A.weight' has NaN or Inf",
    ),
    "kind": (lambda tensors: None, {"peft_type": "IA3"}, "peft_type is 'IA3'; Ingot reads LORA"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case: str, tmp_path: Path, projections: Sequence[Projection]) -> None:
    change, config, message = REFUSED[case]
    folder = copied(tmp_path / "adapter", change, **config)
    with pytest.raises(AdapterError, match=f"the adapter 'mine' cannot be loaded: .*{message}"):
        read_adapter("mine", folder, projections)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("magnitudes", "use_dora is true, .* merge it at build time"), ("replaced", "'lm_head.weight', .* merge it at")],
)
def test_what_a_batch_would_share_is_to_be_merged_at_build_time(
    kind: str, message: str, projections: Sequence[Projection]
) -> None:
    with pytest.raises(AdapterError, match=message):
        read_adapter(kind, FOLDER / kind, projections)


def test_layers_whose_inputs_a_pass_changes_have_no_projections() -> None:
    assert not projections_of(("fold-constants", "rotate"))
    with pytest.raises(AdapterError, match="build it again, and without passes that rotate"):
        read_adapter("mine", FOLDER / "attention", ())


def test_a_tied_head_and_transposed_weights_have_projections_too() -> None:
    found = {each.module for each in projections_of((), ROOT / "tests" / "fixtures" / "checkpoints" / "gpt2")}
    assert "lm_head" in found
    assert any(name.endswith("attn.c_attn") for name in found)
