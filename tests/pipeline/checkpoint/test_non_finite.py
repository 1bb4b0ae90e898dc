"""NaN and Inf are found by their bits in every float format."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ingot.artifact.safetensors import StoredTensor
from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint import non_finite
from ingot.pipeline.checkpoint.non_finite import NonFinite, count_non_finite

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


def stored(folder: Path, dtype: str, array: np.ndarray[Any, Any], offset: int = 3) -> StoredTensor:
    """The array in a file, after three other bytes so that it is not aligned."""
    file = folder / "tensor.bin"
    file.write_bytes(bytes([255]) * offset + array.tobytes() + bytes([255]) * 8)
    return StoredTensor("w", dtype, array.shape, file, offset, array.nbytes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_both_infinities_are_counted(tmp_path: Path, dtype: str) -> None:
    array = np.array([1, np.nan, -np.nan, np.inf, -np.inf, np.inf, 0], np.float32).astype(DTYPES[dtype])
    assert count_non_finite(stored(tmp_path, dtype, array)) == NonFinite(nan=2, inf=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_finite_and_the_smallest_subnormal_are_finite(tmp_path: Path, dtype: str) -> None:
    finfo: Any = ml_dtypes.finfo  # Any: not annotated
    limits = finfo(DTYPES[dtype])
    array = np.array([limits.max, limits.min, limits.smallest_subnormal, -0.0]).astype(DTYPES[dtype])
    assert count_non_finite(stored(tmp_path, dtype, array)) == NonFinite()


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_are_added_up(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(non_finite, "CHUNK_BYTES", 16)
    array = np.ones(100, np.float32)
    array[[0, 7, 8, 50, 99]] = [np.nan, np.inf, np.nan, np.inf, np.nan]
    assert count_non_finite(stored(tmp_path, dtype, array.astype(DTYPES[dtype]))) == NonFinite(nan=3, inf=2)


def test_an_empty_tensor_is_finite(tmp_path: Path) -> None:
    assert count_non_finite(stored(tmp_path, "F32", np.zeros((0, 4), np.float32))) == NonFinite()


def test_integers_are_finite(tmp_path: Path) -> None:
    assert count_non_finite(stored(tmp_path, "I32", np.full(4, -1, np.int32))) == NonFinite()


def test_a_file_that_shrank_since_it_was_opened_is_refused(tmp_path: Path) -> None:
    tensor = stored(tmp_path, "F32", np.ones(100, np.float32))
    tensor.file.write_bytes(tensor.file.read_bytes()[:50])
    with pytest.raises(CheckpointError, match="ends inside 'w'; the file changed while it was read"):
        count_non_finite(tensor)
