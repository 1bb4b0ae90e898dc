"""GGUF files that are truncated, damaged or unsupported are refused."""

import struct
from pathlib import Path

import numpy as np
import pytest

from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.gguf_file import read_gguf
from ingot.pipeline.model.importer import import_checkpoint
from tests.pipeline.checkpoint.formats.tiny_model import exported

LAYER = "model.layers.1.mlp.up_proj"


def gguf(folder: Path) -> Path:
    return exported(folder, "gguf", symmetric=True) / "out.gguf"


def test_a_truncated_gguf_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    file = gguf(tmp_path)
    content = file.read_bytes()
    for length in (0, 3, 20, 200, len(content) // 2, len(content) - 64):
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            import_checkpoint(Checkpoint.open(file))


def test_a_gguf_block_whose_scale_is_not_finite_is_refused(tmp_path: Path) -> None:
    file = gguf(tmp_path)
    tensor = read_gguf(file).tensors["blk.1.ffn_up.weight"]
    content = bytearray(file.read_bytes())
    content[tensor.offset : tensor.offset + 2] = np.float16(np.inf).tobytes()
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"'{LAYER}.weight': 1 of its 192 scales are NaN or infinite"):
        import_checkpoint(Checkpoint.open(file))


@pytest.mark.parametrize(
    ("offset", "count", "message"),
    [
        (4, 1, "GGUF version"),
        (8, 10**12, "dimensions|truncated"),
        (8, 3, "is missing"),
        (16, 10**9, "truncated|damaged"),
    ],
)
def test_a_wrong_gguf_header_is_refused(tmp_path: Path, offset: int, count: int, message: str) -> None:
    file = gguf(tmp_path)
    content = bytearray(file.read_bytes())
    struct.pack_into("<I" if offset == 4 else "<Q", content, offset, count)
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(Checkpoint.open(file))


def test_of_two_gguf_files_one_must_be_named(tmp_path: Path) -> None:
    file = gguf(tmp_path)
    assert Checkpoint.open(file.parent).path == file
    (file.parent / "other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files and no config\.json; name one of the files"):
        Checkpoint.open(file.parent)


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    file = gguf(tmp_path)
    content = file.read_bytes().replace(b"llama.attention.key_length", b"llama.attention.head_count")
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"has the key 'llama.attention.head_count' twice; the file is damaged"):
        read_gguf(file)
