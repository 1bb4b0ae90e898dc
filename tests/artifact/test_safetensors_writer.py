"""Files of SafetensorsWriter: readable, aligned by named padding, incomplete after an error."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ingot.artifact.safetensors import read_header
from ingot.artifact.safetensors_writer import ALIGNMENT, SafetensorsWriter, Span, Write
from ingot.errors import CheckpointError

FIRST, SECOND = np.arange(5, dtype=np.uint8), np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
HEADER_BYTES = 512


def _in_two_pieces(write: Write) -> None:
    raw = SECOND.tobytes()
    write(raw[:7])
    write(raw[7:])


def write_two(file: Path) -> Span:
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
