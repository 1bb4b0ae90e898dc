"""Structured pruning on every family: the IR runs, and its export, read back by its config.json, computes the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError, UsageError
from ingot.passes.calibration import calibrate_with
from ingot.passes.manager import PassManager
from ingot.passes.model_facts import KV, MODEL
from ingot.passes.pruned_facts import STRUCTURE_FACTS
from ingot.pipeline.calibrate import CalibrationEngine
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.checkpoint.sealed import as_pruned
from ingot.pipeline.interchange.export import export_checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe
from tests.each_case import each_case
from tests.oracle.cases import CASES
from tests.oracle.dense_cases import DENSE_CASES
from tests.parity import CHECKPOINTS, LOGITS, compare, load_logits
from tests.passes.calibration_data import calibration_data
from tests.pipeline.tiny_checkpoint import copy_fixture, edit_json, edit_tensors
from tests.reference_runner import ReferenceRunner
from tests.tolerances import within

SINKS = next(case for case in DENSE_CASES if case.name == "granite_swa")
CASES_BY_NAME = {case.name: case for case in (*CASES, SINKS) if case.context_tokens is None}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> CalibrationEngine:
    """Calibration sequences in place of a recipe's text: the fixtures have no tokenizer."""
    engine = CalibrationEngine(calibration_data(sequences=4, tokens=24, vocab=64))
    monkeypatch.setattr("ingot.pipeline.interchange.export.calibration_engine", lambda *_: engine)
    return engine


def recipe(folder: Path, checkpoint: Path, *passes: str | dict[str, Any]) -> Recipe:
    """A recipe with these passes and a text for calibration."""
    file = folder / "recipe.yaml"
    (folder / "text.txt").write_text("text")
    content = {"checkpoint": str(checkpoint), "passes": list(passes), "calibration": {"text": str(folder / "text.txt")}}
    file.write_text(json.dumps(content))
    return load_recipe(str(file))


def options(name: str) -> dict[str, Any]:
    """Half of the neurons, one KV head where they can go, one layer less."""
    config = read_config(Checkpoint.open(CHECKPOINTS / name))
    heads: dict[str, Any] = {} if config.family.qk_norm == "row" or config.num_kv_heads == 1 else {"kv_groups": 1}
    return {"ffn": 0.5, "multiple": 4, "layers": len(config.layers) - 1, **heads}


def compiled(made: Recipe, service: CalibrationEngine) -> ir.Model:
    model = import_checkpoint(Checkpoint.open(made.require_checkpoint()))
    with calibrate_with(service):
        PassManager(made.make_passes()).run(model)
    return model


def logits(name: str, model: ir.Model) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    tokens, _ = load_logits(CHECKPOINTS / name / LOGITS)
    return ReferenceRunner(model).run_ragged(tokens)


@each_case("name", CASES_BY_NAME)
def test_an_export_read_back_computes_what_the_pruned_program_does(
    name: str, tmp_path: Path, service: CalibrationEngine
) -> None:
    fusions = ["fold-constants", "pack-projections", "fuse-gated-activation"]
    made = recipe(tmp_path, CHECKPOINTS / name, *fusions, {"prune-structure": options(name)})
    model = compiled(made, service)
    folder = export_checkpoint(made, tmp_path / "out", "safetensors")
    again = import_checkpoint(Checkpoint.open(folder))
    assert KV.of(again) == KV.of(model)
    ours, theirs = (MODEL.of(found) for found in (model, again))
    assert ours == theirs
    print(name, STRUCTURE_FACTS.of(model).layers, ours.num_parameters)
    parity = compare(logits(name, again), logits(name, model))
    assert within("parity.float32", parity.worst, name, max(1.0, parity.largest / 4))


def test_the_kv_geometry_shrinks(tmp_path: Path, service: CalibrationEngine) -> None:
    made = recipe(tmp_path, CHECKPOINTS / "llama", {"prune-structure": options("llama")})
    before = KV.of(import_checkpoint(Checkpoint.open(CHECKPOINTS / "llama")))
    after = KV.of(compiled(made, service))
    assert after.num_layers == before.num_layers - 1
    assert [layer.num_kv_heads for layer in after.layers] == [1] * after.num_layers
    assert all(layer.num_kv_heads > 1 for layer in before.layers)


def test_norms_over_all_heads_forbid_kv_groups_by_name(tmp_path: Path, service: CalibrationEngine) -> None:
    made = recipe(tmp_path, CHECKPOINTS / "olmo2", {"prune-structure": {"kv_groups": 1}})
    with pytest.raises(PassError, match=r"layers\.0\.self_attn\.q_norm.* \(RMSNormalization\) mixes channels"):
        compiled(made, service)


def test_heads_with_which_transformers_loads_no_model_are_refused_at_export(
    tmp_path: Path, service: CalibrationEngine
) -> None:
    folder = copy_fixture(tmp_path / "model")
    before = read_config(Checkpoint.open(folder))
    width, head = before.hidden_size, before.head_dim
    assert (width, before.num_heads, before.num_kv_heads) == (32, 4, 2)
    # As if one of four groups of two heads had been pruned.
    edit_json(folder / "config.json", {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": head})
    shapes = {"q_proj": (6 * head, width), "k_proj": (3 * head, width), "v_proj": (3 * head, width)}
    shapes["o_proj"] = width, 6 * head
    rng = np.random.default_rng(0)
    names = [name for name in Checkpoint.open(folder).tensors if "self_attn" in name]
    edit_tensors(folder, {name: rng.normal(0, 0.1, shapes[name.split(".")[-2]]).astype(np.float32) for name in names})
    message = (
        "transformers loads a llama model only if num_attention_heads divides hidden_size, and 6 does not divide 32; "
        "give prune-structure kv_groups of one of 1, 2, or export to gguf or onnx"
    )
    with pytest.raises(UsageError, match=message):
        export_checkpoint(recipe(tmp_path, folder), tmp_path / "out", "safetensors")
    assert not (tmp_path / "out").exists()
    made = recipe(tmp_path, folder, {"prune-structure": {"kv_groups": 2}})
    assert export_checkpoint(made, tmp_path / "out", "safetensors").is_dir()


def test_feed_forwards_of_several_sizes_have_no_config(tmp_path: Path, service: CalibrationEngine) -> None:
    made = recipe(tmp_path, CHECKPOINTS / "llama", {"prune-structure": {"ffn": 8}})
    model = compiled(made, service)
    STRUCTURE_FACTS.record(model, replace(STRUCTURE_FACTS.of(model), intermediate_sizes=(8, 16)))
    with pytest.raises(UsageError, match=r"pruned to 8, 16 neurons, and config\.json has one intermediate_size"):
        as_pruned(Checkpoint.open(CHECKPOINTS / "llama"), model)
