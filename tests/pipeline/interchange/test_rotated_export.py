"""Exports of rotated recipes: norm weights of ones, a head that was tied and is not, and the same logits again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.passes.manager import PassManager
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.interchange.export import export_checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.recipe.schema import Recipe
from tests.parity import CHECKPOINTS, LOGITS, compare, load_logits
from tests.pipeline.checkpoint.formats.tiny_model import recipe
from tests.reference_runner import ReferenceRunner
from tests.tolerances import within

RTN = {"quantize-weights": {"block_size": "channel", "lm_head": "none", "embedding": "none"}}
TIED = ("llama-tied-biases", "granite-tied-biases", "smollm3")


def logits(name: str, model: ir.Model) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    tokens, _ = load_logits(CHECKPOINTS / name / LOGITS)
    return ReferenceRunner(model).run_ragged(tokens)


def compiled(made: Recipe) -> ir.Model:
    model = import_checkpoint(Checkpoint.open(made.require_checkpoint()))
    PassManager(made.make_passes()).run(model)
    return model


@pytest.mark.parametrize("name", [*TIED, "qwen2", "phi3", "gemma2"])
def test_a_rotated_checkpoint_computes_what_the_first_one_does(name: str, tmp_path: Path) -> None:
    folder = export_checkpoint(recipe(tmp_path, CHECKPOINTS / name, "rotate"), tmp_path / "out", "safetensors")
    first, again = (import_checkpoint(Checkpoint.open(place)) for place in (CHECKPOINTS / name, folder))
    assert within("parity.float32", compare(logits(name, again), logits(name, first)).worst, name)


@pytest.mark.parametrize("name", TIED)
def test_a_tied_head_is_written_apart_and_the_config_says_so(name: str, tmp_path: Path) -> None:
    made = recipe(tmp_path, CHECKPOINTS / name, "rotate", RTN)
    folder = export_checkpoint(made, tmp_path / "out", "compressed-tensors")
    written = Checkpoint.open(folder)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert written.shapes["lm_head.weight"] == written.shapes["model.embed_tokens.weight"]
    assert np.all(np.asarray(written.external("model.norm.weight").numpy()) == 1)
    expected, found = logits(name, compiled(made)), logits(name, import_checkpoint(written))
    assert within("parity.float32", compare(found, expected).worst, name)
