"""GGUF: types of tensors, and refusals."""

from pathlib import Path
from typing import Any

import pytest

from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.interchange.transcode import transcode
from tests.pipeline.checkpoint.formats.tiny_model import (
    assert_export_refused,
    exported,
    tiny_checkpoint,
)


def test_sixteen_bit_floats_survive_gguf(tmp_path: Path) -> None:
    source = transcode(tiny_checkpoint(tmp_path / "m"), tmp_path / "b", "safetensors", dtype="bfloat16", lossy=True)
    there = transcode(source.folder, tmp_path / "there", "gguf")
    back = transcode(there.folder, tmp_path / "back", "safetensors")
    assert back.proof.written_digest == source.proof.written_digest
    matrices = [tensor for tensor in Checkpoint.open(back.folder).tensors.values() if len(tensor.shape) == 2]
    assert {tensor.dtype for tensor in matrices} == {"BF16"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 8}, "gguf holds 4 and 8 bits symmetric .* set block_size: 32 and symmetric: true"),
        ({"block_size": 16}, "4 bits asymmetric in blocks of 16; set block_size: 32"),
        ({}, "Q4_1 stores -zero_point \\* scale as float16.*symmetric: true"),
    ],
)
def test_a_scheme_that_no_type_holds_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert_export_refused(tmp_path, "gguf", message, **options)


def test_four_and_eight_symmetric_bits_are_q4_0_and_q8_0(tmp_path: Path) -> None:
    folder = exported(tmp_path, "gguf", symmetric=True, lm_head=8)
    encoded = Checkpoint.open(folder).encoded
    assert {name: tensor.storage for name, tensor in encoded.items() if "layers.0.mlp" in name or "head" in name} == {
        "lm_head.weight": "Q8_0",
        **{f"model.layers.0.mlp.{part}_proj.weight": "Q4_0" for part in ("gate", "up", "down")},
    }
