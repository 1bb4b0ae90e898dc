"""Headers of safetensors files: valid ones are read, and each kind of damage is refused by name; mapped tensors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ingot.artifact.safetensors import MAX_HEADER_BYTES, MappedTensors, from_bfloat16, read_header
from ingot.errors import ArtifactError, CheckpointError
from tests.pipeline.tiny_checkpoint import entry, write_raw

TWO = {"a": entry("F32", [2], 0, 8), "b": entry("F16", [2, 2], 8, 16)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def refusal(file: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert str(file) in str(caught.value)
    return str(caught.value)


def test_tensors_are_where_the_safetensors_library_puts_them(file: Path) -> None:
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


def test_a_file_that_ends_in_a_tensor_since_its_header_was_read_is_named(file: Path) -> None:
    save_file({"w": np.arange(8, dtype=np.int32)}, file)
    stored = read_header(file)["w"]
    assert stored.read(np.int32, 4, 12).tolist() == [1, 2, 3]
    with file.open("r+b") as stream:
        stream.truncate(stored.offset + 20)
    with pytest.raises(CheckpointError, match=rf"{file}: ends inside 'w'; the file changed while it was read"):
        stored.read(np.int32)


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


def test_a_header_that_is_not_json_is_refused(file: Path) -> None:
    write_raw(file, b"{not json")
    assert "header is not JSON" in refusal(file)


def test_a_header_that_is_not_text_is_refused(file: Path) -> None:
    write_raw(file, b"\xff\xfe\xfd{")
    assert "header is not JSON" in refusal(file)


def test_a_header_that_is_not_an_object_is_refused(file: Path) -> None:
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
    assert "'b' begins at data offset 4 and overlaps 4 bytes of 'a', which ends at 8" in refusal(file)


def test_a_hole_between_tensors_is_refused(file: Path) -> None:
    write_raw(file, {"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 12, 20)}, bytes(20))
    assert "'b' begins at data offset 12 and leaves a hole of 4 bytes after 'a', which ends at 8" in refusal(file)


@pytest.mark.parametrize("offset", [0, 4, 12, 24, 60, 4000])
def test_the_one_tensor_in_a_wrong_place_is_named_and_not_its_neighbour(file: Path, offset: int) -> None:
    tensors = {name: entry("F32", [2], 8 * at, 8 * at + 8) for at, name in enumerate("abcd")}
    tensors["b"] = entry("F32", [2], offset, offset + 8)
    write_raw(file, tensors, bytes(32))
    found = refusal(file)
    assert "but the place that no other tensor takes is [8, 16]" in found
    if offset not in (0, 24):  # two tensors in one place: either may be wrong
        assert f"'b' has the data_offsets [{offset}, {offset + 8}]" in found


@pytest.mark.parametrize("offsets", [[-8, 0], [True, 9], [0.0, 8.0], ["0", "8"], [0], [0, 8, 16], None])
def test_offsets_that_are_not_two_whole_numbers_are_refused(file: Path, offsets: object) -> None:
    write_raw(file, {"a": {"dtype": "F32", "shape": [2], "data_offsets": offsets}}, bytes(8))
    assert "'a'" in refusal(file)
    assert "data_offsets" in refusal(file)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b'{"a": 1, "a": 2}', "has the key 'a' twice"),
        (b'{"a": NaN}', "holds NaN"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not JSON"),
        (b"\xff\xfe{", "is not JSON"),
        (json.dumps({"a": entry("F32", [1] * 65, 0, 4)}).encode(), "at most 64 whole numbers"),
    ],
    ids=["arrays", "objects", "key twice", "NaN", "5,000 digits", "not UTF-8", "65 axes"],
)
def test_a_header_that_costs_a_stack_or_a_choice_is_refused(file: Path, header: bytes, problem: str) -> None:
    write_raw(file, header, bytes(4))
    assert problem in refusal(file)


def test_a_long_name_is_not_echoed_whole(file: Path) -> None:
    write_raw(file, {"n" * 5000: entry("F99", [1], 0, 4)}, bytes(4))
    assert len(refusal(file)) < 500


def test_truncated_data_names_the_first_tensor_that_is_cut(file: Path) -> None:
    write_raw(file, TWO, bytes(11))
    assert "truncated: 'b' ends at byte" in refusal(file)


def test_offsets_far_beyond_the_file_are_refused(file: Path) -> None:
    write_raw(file, {"a": entry("F32", [1 << 40], 0, 4 << 40)}, bytes(8))
    assert "truncated: 'a'" in refusal(file)


def test_bytes_after_the_last_tensor_are_refused(file: Path) -> None:
    write_raw(file, TWO, bytes(17))
    assert "has 1 bytes after its last tensor" in refusal(file)


def test_mapped_tensors_are_viewed_without_a_copy(file: Path) -> None:
    save_file({"w": np.arange(8, dtype=np.uint8)}, file)
    mapped = MappedTensors(file)
    assert mapped.view("w").tolist() == list(range(8))
    assert mapped.view("w", 2, 3).tolist() == [2, 3, 4]
    assert not mapped.view("w").flags.writeable
    with pytest.raises(ArtifactError, match="holds no tensor 'v'; build the artifact again"):
        mapped.view("v")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "has 0 bytes, less than the 8 of a header length; .*; build the artifact again"),
        (b"\x02\0\0\0\0\0\0\0[]", "its header is a JSON list, it must be an object"),
        (b"\xff" * 20, "the file is damaged or not a safetensors file"),
        (b'\x02\0\0\0\0\0\0\0{"', "its header is not JSON"),
    ],
)
def test_an_artifacts_file_that_is_not_safetensors_is_refused(file: Path, content: bytes, problem: str) -> None:
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match=problem):
        MappedTensors(file)


def test_an_artifacts_tensor_beyond_its_file_is_refused(file: Path) -> None:
    save_file({"w": np.zeros(8)}, file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=r"is truncated: 'w' ends at byte .*; build the artifact again"):
        MappedTensors(file)


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"])
def test_an_array_has_type_and_values_of_the_tensor(tmp_path: Path, dtype: str) -> None:
    written = np.arange(6).reshape(2, 3).astype(dtype)
    save_file({"w": written, "scalar": np.asarray(written[0, 1])}, tmp_path / "w.safetensors")
    stored = read_header(tmp_path / "w.safetensors")
    assert stored["w"].array().dtype == written.dtype
    np.testing.assert_array_equal(stored["w"].array(), written)
    assert stored["scalar"].array().shape == ()


def test_bfloat16_is_the_upper_half_of_a_float32() -> None:
    assert from_bfloat16(np.array([0x3F80, 0xC000], np.uint16)).tolist() == [1, -2]
