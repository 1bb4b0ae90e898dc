"""A build and a transcoding refuse and report the values of quantized weights that a lint finds."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.interchange.export import export_checkpoint
from ingot.pipeline.interchange.transcode import transcode
from ingot.pipeline.model.importer import import_checkpoint
from ingot.progress import NOTES
from tests.each_case import each_case
from tests.pipeline.checkpoint.formats.tiny_model import edit_quantization, exported, recipe
from tests.pipeline.tiny_checkpoint import edit_tensors

READERS: dict[str, Callable[[Path, Path], object]] = {
    "build": lambda folder, out: import_checkpoint(Checkpoint.open(folder)),
    "transcode": lambda folder, out: transcode(folder, out, "safetensors"),
    "export": lambda folder, out: export_checkpoint(recipe(out.parent, folder), out, "safetensors"),
}


@each_case("reader", READERS)
def test_zero_points_of_the_other_version_are_refused(reader: str, tmp_path: Path) -> None:
    folder = exported(tmp_path, "gptq", symmetric=True)
    edit_quantization(folder, {"checkpoint_format": "gptq_v2"})
    with pytest.raises(CheckpointError, match="its zero points are 7, but sym means 8"):
        READERS[reader](folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@each_case("reader", READERS)
def test_scales_of_zero_are_noted_once(reader: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = exported(tmp_path, "awq")
    names = ["model.layers.0.mlp.up_proj.scales", "model.layers.1.mlp.up_proj.scales"]
    scales = {name: load_file(folder / "model.safetensors")[name] for name in names}
    for values in scales.values():
        values[0, 0] = 0
    edit_tensors(folder, scales)
    with caplog.at_level(logging.INFO, logger=NOTES):
        READERS[reader](folder, tmp_path / "new")
    notes = [record.getMessage() for record in caplog.records if "are 0" in record.getMessage()]
    lost = "the checkpoint's 'model.layers.0.mlp.up_proj.weight': 1 of 192 scales are 0: their weights are lost"
    assert notes == [f"{lost} (and 1 more of the kind: ingot lint-checkpoint lists them)"]


def test_guessed_zero_points_are_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = transcode(exported(tmp_path, "gptq"), tmp_path / "v1", "gptq-v1").folder
    edit_quantization(folder, {"checkpoint_format": "gptq_v2"})
    with caplog.at_level(logging.INFO, logger=NOTES):
        import_checkpoint(Checkpoint.open(folder))
    (text,) = [record.getMessage() for record in caplog.records if "on average" in record.getMessage()]
    assert "as if these were stored as gptq stores them" in text
    assert text.endswith("(and 13 more of the kind: ingot lint-checkpoint lists them)")
