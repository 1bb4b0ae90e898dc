"""Plain safetensors: the type of floats, and a refusal to round."""

import json
from pathlib import Path

import pytest

from ingot.errors import UsageError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.interchange.transcode import transcode
from tests.pipeline.checkpoint.formats.tiny_model import tiny_checkpoint


def test_floats_are_written_in_the_chosen_type(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    with pytest.raises(UsageError, match=r"model\.embed_tokens\.weight \(float\) holds numbers that bfloat16 rounds"):
        transcode(source, tmp_path / "out", "safetensors", dtype="bfloat16")
    rounded = transcode(source, tmp_path / "rounded", "safetensors", dtype="bfloat16", lossy=True)
    assert 0 < rounded.proof.largest_difference < 2**-8
    assert {tensor.dtype for tensor in Checkpoint.open(rounded.folder).tensors.values()} == {"BF16"}
    again = transcode(rounded.folder, tmp_path / "again", "safetensors", dtype="float32")
    assert again.proof.equal
    assert json.loads((again.folder / "config.json").read_text())["dtype"] == "float32"
    kept = transcode(rounded.folder, tmp_path / "kept", "safetensors")
    assert (kept.folder / "model.safetensors").stat().st_size == (rounded.folder / "model.safetensors").stat().st_size
