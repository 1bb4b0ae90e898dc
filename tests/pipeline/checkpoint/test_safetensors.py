"""Headers of safetensors files: right ones are read, each kind of damage is refused by name.

NaN and Inf are found by their bits in every float format.
"""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint import safetensors as finite
from ingot.pipeline.checkpoint.safetensors import (
    MAX_HEADER_BYTES,
    NonFinite,
    StoredTensor,
    count_non_finite,
    read_header,
)
from tests.pipeline.tiny_checkpoint import entry, write_raw

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


def stored(folder: Path, dtype: str, array: np.ndarray[Any, Any], offset: int = 3) -> StoredTensor:
    """The array in a file, behind some other bytes so that it is not aligned."""
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
    monkeypatch.setattr(finite, "CHUNK_BYTES", 16)
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


TWO = {"a": entry("F32", [2], 0, 8), "b": entry("F16", [2, 2], 8, 16)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def refusal(file: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert str(file) in str(caught.value)
    return str(caught.value)


def test_tensors_lie_where_the_safetensors_library_puts_them(file: Path) -> None:
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(4, dtype=np.float16),
    }
    save_file(arrays, file, metadata={"format": "pt"})
    tensors = read_header(file)
    raw = file.read_bytes()
    assert set(tensors) == {"a", "b"}
    for name, array in arrays.items():
        stored = tensors[name]
        assert stored.shape == array.shape
        assert raw[stored.offset : stored.offset + stored.num_bytes] == array.tobytes()


def test_an_empty_tensor_and_a_scalar_are_fine(file: Path) -> None:
    write_raw(file, {"none": entry("F32", [0, 4], 0, 0), "one": entry("F32", [], 0, 4)}, bytes(4))
    assert [tensor.shape for tensor in read_header(file).values()] == [(0, 4), ()]


def test_a_missing_file_is_refused(file: Path) -> None:
    assert "cannot be read" in refusal(file)


def test_a_file_shorter_than_a_header_length_is_refused(file: Path) -> None:
    file.write_bytes(b"\x01\x02")
    assert "has 2 bytes" in refusal(file)


def test_an_oversized_header_length_is_refused_without_reading_it(file: Path) -> None:
    write_raw(file, TWO, bytes(16), length=MAX_HEADER_BYTES + 1)
    assert "header length is 100000001 bytes, at most 100000000" in refusal(file)


def test_a_header_that_the_file_does_not_hold_is_refused(file: Path) -> None:
    write_raw(file, TWO, length=5000)
    assert "truncated: the header needs 5008 bytes" in refusal(file)


def test_a_header_that_is_no_json_is_refused(file: Path) -> None:
    write_raw(file, b"{not json")
    assert "header is not JSON" in refusal(file)


def test_a_header_that_is_no_text_is_refused(file: Path) -> None:
    write_raw(file, b"\xff\xfe\xfd{")
    assert "header is not JSON" in refusal(file)


def test_a_header_that_is_no_object_is_refused(file: Path) -> None:
    write_raw(file, [1, 2])
    assert "JSON list, it must be an object" in refusal(file)


def test_an_entry_without_offsets_is_refused(file: Path) -> None:
    write_raw(file, {"a": {"dtype": "F32", "shape": [2]}}, bytes(8))
    assert "entry of 'a'" in refusal(file)


def test_a_negative_dimension_is_refused(file: Path) -> None:
    write_raw(file, {"a": entry("F32", [-2, -1], 0, 8)}, bytes(8))
    assert "shape [-2, -1]" in refusal(file)


def test_an_unknown_dtype_is_refused_with_the_nearest(file: Path) -> None:
    write_raw(file, {"a": entry("BF17", [4], 0, 8)}, bytes(8))
    assert "unknown dtype 'BF17'" in refusal(file)
    assert "Did you mean 'BF16'?" in refusal(file)


def test_shape_and_bytes_that_contradict_are_refused(file: Path) -> None:
    write_raw(file, {"a": entry("F32", [3], 0, 8)}, bytes(8))
    assert "takes 12 bytes, but its data_offsets [0, 8] hold 8" in refusal(file)


def test_overlapping_tensors_are_refused(file: Path) -> None:
    write_raw(file, {"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, bytes(12))
    assert "'b' begins at data offset 4, expected 8: it overlaps" in refusal(file)


def test_negative_offsets_are_refused(file: Path) -> None:
    write_raw(file, {"a": entry("F32", [2], -8, 0)}, bytes(8))
    assert "'a' begins at data offset -8" in refusal(file)


def test_a_hole_between_tensors_is_refused(file: Path) -> None:
    write_raw(file, {"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 12, 20)}, bytes(20))
    assert "it leaves a hole" in refusal(file)


def test_truncated_data_names_the_first_tensor_that_is_cut(file: Path) -> None:
    write_raw(file, TWO, bytes(11))
    assert "truncated: 'b' ends at byte" in refusal(file)


def test_offsets_far_beyond_the_file_are_refused(file: Path) -> None:
    write_raw(file, {"a": entry("F32", [1 << 40], 0, 4 << 40)}, bytes(8))
    assert "truncated: 'a'" in refusal(file)


def test_bytes_after_the_last_tensor_are_refused(file: Path) -> None:
    write_raw(file, TWO, bytes(17))
    assert "has 1 bytes after its last tensor" in refusal(file)
