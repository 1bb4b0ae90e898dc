"""weights.safetensors: readable by others, aligned, deterministic, honest about a full disk.

Weights whose shapes are known when they are made: a file that others read, aligned, the same each time.
"""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save

from ingot.artifact.safetensors import read_header
from ingot.errors import BuildError, CheckpointError
from ingot.pipeline.checkpoint.safetensors_writer import (
    ALIGNMENT,
    FileSpan,
    Maker,
    SafetensorsWriter,
    Write,
    arrays_as_safetensors,
    stream_weights,
    write_weights,
)
from ingot.progress import progress_to

FLOATS = np.linspace(-3, 3, 15, dtype=np.float32).reshape(3, 5)
FIRST, SECOND = np.arange(5, dtype=np.uint8), np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
HEADER_BYTES = 512
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
    with pytest.raises(BuildError, match="no disk space for the weight wide"):
        stream_weights(Path("/dev/full"), {"wide": ("fp32", lambda: np.zeros(1 << 20, np.float32))})


def tensors() -> list[tuple[str, ir.TensorProtocol]]:
    random = np.random.default_rng(0)
    odd = random.standard_normal((3, 7)).astype(np.float32)
    even = random.integers(0, 255, (4, 64)).astype(np.uint8)
    nibbles = ir.Tensor(random.integers(0, 15, (5, 5)).astype(ml_dtypes.uint4))
    lazy = ir.LazyTensor(lambda: ir.Tensor(even * 2), ir.DataType.UINT8, ir.Shape(even.shape))
    return [
        ("odd", ir.Tensor(odd)),
        ("even", ir.Tensor(even)),
        ("half", ir.Tensor(odd.astype(np.float16))),
        ("nibbles", nibbles),
        ("lazy", lazy),
    ]


def test_safetensors_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    spans = write_weights(path, tensors())
    loaded = load_file(path)
    assert {name for name in loaded if not name.startswith("padding.")} == spans.keys()
    for name, tensor in tensors():
        if name != "nibbles":
            np.testing.assert_array_equal(loaded[name], tensor.numpy())
    assert loaded["nibbles"].tobytes() == dict(tensors())["nibbles"].tobytes()


def test_every_tensor_starts_aligned_and_the_spans_are_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    spans = write_weights(path, tensors())
    content = path.read_bytes()
    for name, tensor in tensors():
        span = spans[name]
        assert span.offset % ALIGNMENT == 0
        assert content[span.offset : span.offset + span.length] == tensor.tobytes()


def test_two_writes_are_equal_byte_for_byte(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        write_weights(path, tensors())
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_external_tensors_are_copied_and_their_memory_map_given_back(tmp_path: Path) -> None:
    source = tmp_path / "source.bin"
    source.write_bytes(bytes(range(256)))
    external = ir.ExternalTensor(
        "source.bin", 64, 128, ir.DataType.UINT8, shape=ir.Shape([2, 64]), name="w", base_dir=tmp_path
    )
    spans = write_weights(tmp_path / "weights.safetensors", [("w", external)])
    content = (tmp_path / "weights.safetensors").read_bytes()
    assert content[spans["w"].offset :] == bytes(range(64, 192))
    assert external.raw is None


def test_progress_ends_at_the_size_of_the_file(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = tmp_path / "weights.safetensors"
    with progress_to(lambda name, done, total: seen.append((done, total))):
        write_weights(path, tensors())
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)


def test_a_lazy_tensor_of_another_size_than_announced_is_refused(tmp_path: Path) -> None:
    lying = ir.LazyTensor(lambda: ir.Tensor(np.zeros(3, np.uint8)), ir.DataType.UINT8, ir.Shape([4]))
    with pytest.raises(BuildError, match="'lying' has 3 bytes where 4 were announced"):
        write_weights(tmp_path / "weights.safetensors", [("lying", lying)])


def test_a_full_disk_is_an_error_that_says_how_much_was_needed(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    path = tmp_path / "weights.safetensors"
    path.symlink_to(full)
    with pytest.raises(
        BuildError, match=r"no disk space for the weights \(No space left on device\): [\d,]+ bytes are needed"
    ):
        write_weights(path, tensors())


def test_small_arrays_are_written_as_the_safetensors_library_writes_them(tmp_path: Path) -> None:
    arrays = {f"kernel-{name}": np.arange(size, dtype=np.uint8) for name, size in (("b", 5), ("a", 0), ("c", 64))}
    assert arrays_as_safetensors(arrays) == save(arrays)
    (tmp_path / "w.safetensors").write_bytes(arrays_as_safetensors({"f": FLOATS.T, "n": np.arange(3)}))
    found = {name: stored.array() for name, stored in read_header(tmp_path / "w.safetensors").items()}
    np.testing.assert_array_equal(found["f"], FLOATS.T)
    np.testing.assert_array_equal(found["n"], np.arange(3))


def _in_two_pieces(write: Write) -> None:
    raw = SECOND.tobytes()
    write(raw[:7])
    write(raw[7:])


def write_two(file: Path) -> FileSpan:
    """Write both arrays, the second one aligned and in two pieces; return its span."""
    with SafetensorsWriter(file, HEADER_BYTES, {"__metadata__": {"format": "pt"}}) as writer:
        writer.add("first", "U8", FIRST.shape, lambda write: write(FIRST.tobytes()))
        assert writer.align("padding.0")
        return writer.add("second", "F32", SECOND.shape, _in_two_pieces)


def test_the_safetensors_library_reads_the_tensors_and_the_padding(tmp_path: Path) -> None:
    write_two(tmp_path / "w.safetensors")
    found = load_file(tmp_path / "w.safetensors")
    assert np.array_equal(found["first"], FIRST)
    assert np.array_equal(found["second"], SECOND)
    assert found["padding.0"].tolist() == [0] * (ALIGNMENT - len(FIRST))


def test_a_span_is_the_place_of_the_bytes_in_the_file(tmp_path: Path) -> None:
    span = write_two(tmp_path / "w.safetensors")
    assert span.offset == HEADER_BYTES + ALIGNMENT
    content = (tmp_path / "w.safetensors").read_bytes()
    assert content[span.offset : span.offset + span.length] == SECOND.tobytes()
    stored = read_header(tmp_path / "w.safetensors")["second"]
    assert (stored.offset, stored.num_bytes) == (span.offset, span.length)


def test_aligned_data_gets_no_padding(tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path / "w.safetensors", HEADER_BYTES) as writer:
        writer.add("w", "U8", [ALIGNMENT], lambda write: write(bytes(ALIGNMENT)))
        assert not writer.align("padding.0")
    assert list(load_file(tmp_path / "w.safetensors")) == ["w"]


def test_after_an_error_the_file_has_no_header(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    with pytest.raises(ZeroDivisionError), SafetensorsWriter(file, HEADER_BYTES) as writer:
        writer.add("w", "U8", [4], lambda write: write(b"data"))
        raise ZeroDivisionError
    with pytest.raises(CheckpointError, match="its header is not JSON"):
        read_header(file)
