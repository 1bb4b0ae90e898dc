"""Weights whose shapes are known when they are made: a file that others read, aligned, the same each time."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from ingot.errors import BuildError
from ingot.pipeline.streamed_weights import Maker, stream_weights
from ingot.pipeline.weights_file import ALIGNMENT

FLOATS = np.linspace(-3, 3, 15, dtype=np.float32).reshape(3, 5)
TENSORS: dict[str, tuple[str, Maker]] = {
    "wide": ("fp32", lambda: FLOATS),
    "half": ("fp16", lambda: FLOATS),
    "brain": ("bf16", lambda: FLOATS),
    "codes": ("u8", lambda: np.arange(130)),
}


def test_every_tensor_is_there_in_its_type(tmp_path: Path) -> None:
    stream_weights(tmp_path / "w.safetensors", TENSORS)
    with safe_open(tmp_path / "w.safetensors", "np") as file:
        found = {name: file.get_slice(name).get_dtype() for name in TENSORS}
    assert found == {"wide": "F32", "half": "F16", "brain": "BF16", "codes": "U8"}
    loaded = load_file(tmp_path / "w.safetensors")
    np.testing.assert_array_equal(loaded["wide"], FLOATS)
    np.testing.assert_array_equal(loaded["half"], FLOATS.astype(np.float16))
    np.testing.assert_array_equal(loaded["brain"].view(np.uint16), FLOATS.astype(ml_dtypes.bfloat16).view(np.uint16))
    np.testing.assert_array_equal(loaded["codes"], np.arange(130, dtype=np.uint8))


def test_every_tensor_begins_aligned_and_two_files_are_equal(tmp_path: Path) -> None:
    for name in "ab":
        stream_weights(tmp_path / name, TENSORS)
    content = (tmp_path / "a").read_bytes()
    assert content == (tmp_path / "b").read_bytes()
    place = content.index(FLOATS.tobytes())
    assert place % ALIGNMENT == 0
    assert content.index(FLOATS.astype(np.float16).tobytes()) % ALIGNMENT == 0


def test_a_full_disk_names_the_weight() -> None:
    with pytest.raises(BuildError, match="no room for the weight wide"):
        stream_weights(Path("/dev/full"), {"wide": ("fp32", lambda: np.zeros(1 << 20, np.float32))})
