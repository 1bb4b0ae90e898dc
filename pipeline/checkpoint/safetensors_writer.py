"""Writing weights.safetensors one tensor at a time, so that ONNX files can point into it and anybody can read it.

Every tensor starts on a multiple of ALIGNMENT bytes of the file. The format allows no holes, so tensors whose size is a
multiple come first, in the order given, and after each of the others comes an entry padding.<number> of zeros.
(Format: https://huggingface.co/docs/safetensors, header length as u64, JSON header, data.)

Writing a safetensors file whose tensors are made one at a time, shapes unknown until they are.

Room for the header is left first, as much as the longest shapes and places can take, and filled when all is known.
Every tensor begins on a multiple of ALIGNMENT bytes; entries padding.N fill the gaps, as the format allows no holes.
"""

import errno
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.launch_program import STORED_TYPES
from ingot.errors import BuildError
from ingot.passes.weights import apply_to_array
from ingot.progress import Progress, silent
from ingot.sizes import round_up

ALIGNMENT = 64
_CHUNK_BYTES = 1 << 24
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DTYPES = {
    ir.DataType.DOUBLE: "F64",
    ir.DataType.FLOAT: "F32",
    ir.DataType.FLOAT16: "F16",
    ir.DataType.BFLOAT16: "BF16",
    ir.DataType.FLOAT8E4M3FN: "F8_E4M3",
    ir.DataType.FLOAT8E5M2: "F8_E5M2",
    ir.DataType.INT64: "I64",
    ir.DataType.UINT64: "U64",
    ir.DataType.INT32: "I32",
    ir.DataType.UINT32: "U32",
    ir.DataType.INT16: "I16",
    ir.DataType.UINT16: "U16",
    ir.DataType.INT8: "I8",
    ir.DataType.UINT8: "U8",
    ir.DataType.BOOL: "BOOL",
}


@dataclass(frozen=True)
class Span:
    """Where a tensor's bytes stand in the file."""

    offset: int
    length: int


@dataclass(frozen=True)
class _Entry:
    """One tensor of the file; `tensor` is None for padding. `begin` counts from the end of the header."""

    name: str
    tensor: ir.TensorProtocol | None
    begin: int
    length: int

    def header(self) -> dict[str, object]:
        """The entry in the file's header. Types that the format does not know (4 bits) are bytes."""
        dtype = _DTYPES.get(self.tensor.dtype) if self.tensor is not None else None
        shape = list(self.tensor.shape.numpy()) if self.tensor is not None and dtype else [self.length]
        return {"dtype": dtype or "U8", "shape": shape, "data_offsets": [self.begin, self.begin + self.length]}


def write_weights(
    path: Path, tensors: Sequence[tuple[str, ir.TensorProtocol]], progress: Progress = silent, padded: bool = True
) -> dict[str, Span]:
    """Write named tensors to a new file; return where each one's bytes are.

    padded    align every tensor; without it the file holds the named tensors alone and in their order, as other tools
              want it

    Holds one tensor in memory, two while a lazy one is made. The same tensors give the same bytes. BuildError when the
    disk is full says how many bytes were needed.
    """
    entries = list(_layout(tensors, padded))
    header = _header(entries, {} if padded else {"__metadata__": {"format": "pt"}})
    total = len(header) + sum(entry.length for entry in entries)
    with needing_room(path, "the weights", total), path.open("wb", buffering=0) as stream:
        _write(stream, header)
        for entry in entries:
            _write_entry(stream, entry)
            progress("writing weights", len(header) + entry.begin + entry.length, total)
    return {entry.name: Span(len(header) + entry.begin, entry.length) for entry in entries if entry.tensor is not None}


@contextmanager
def needing_room(path: Path, what: str, num_bytes: int) -> Iterator[None]:
    """Turn a full disk within the block into a BuildError that says how much was needed."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        free = shutil.disk_usage(path.parent).free
        raise BuildError(
            f"{path}: no room for {what} ({error.strerror}): {num_bytes:,} bytes are needed, {free:,} are free; "
            "free some, or name another output folder"
        ) from error


def _layout(tensors: Sequence[tuple[str, ir.TensorProtocol]], padded: bool) -> Iterator[_Entry]:
    """Place the tensors one behind the other, when padded aligned ones first."""
    begin = paddings = 0
    for name, tensor in sorted(tensors, key=lambda named: padded and named[1].nbytes % ALIGNMENT != 0):
        yield _Entry(name, tensor, begin, tensor.nbytes)
        begin += tensor.nbytes
        if padded and (missing := -begin % ALIGNMENT):
            yield _Entry(f"padding.{paddings}", None, begin, missing)
            begin, paddings = begin + missing, paddings + 1


def _header(entries: Sequence[_Entry], first: Mapping[str, object]) -> bytes:
    """Length and JSON, filled with spaces so that the data starts aligned."""
    named = {**first, **{entry.name: entry.header() for entry in entries}}
    text = json.dumps(named, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_entry(stream: BinaryIO, entry: _Entry) -> None:
    if entry.tensor is None:
        _write(stream, bytes(entry.length))
    elif entry.tensor.dtype.bitwidth < 8:
        _write(stream, entry.tensor.tobytes())
    else:
        apply_to_array(entry.tensor, lambda values: _write(stream, _bytes_of(values, entry)))


def _bytes_of(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], entry: _Entry) -> memoryview:
    content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    if content.size != entry.length:
        raise BuildError(f"tensor {entry.name!r} has {content.size:,} bytes where {entry.length:,} were announced")
    return content.data


def _write(stream: BinaryIO, content: bytes | memoryview) -> None:
    """All of it: a raw stream may take less than it is given, and says so."""
    view = memoryview(content)
    while len(view):
        view = view[stream.write(view[:_CHUNK_BYTES]) :]


_LONGEST_ENTRY = 160  # bytes of an entry's JSON beside its name: a dtype, a shape of four, two places of 16 digits
_PADDING_NAME = len("padding.") + 10

# Triton's names of types -> numpy's.
_TYPES: Mapping[str, Any] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "i8": np.int8,
    "u8": np.uint8,
    "i32": np.int32,
    "i64": np.int64,
}

Maker = Callable[[], NDArray[Any]]


def stream_weights(file: Path, tensors: Mapping[str, tuple[str, Maker]], progress: Progress = silent) -> None:
    """Write name -> (type, how it is made) to a new file, converted to the type. One tensor is in memory at a time.

    The same tensors give the same bytes. BuildError when the disk is full.
    """
    room = round_up(64 + sum(len(name) + _PADDING_NAME + 2 * _LONGEST_ENTRY for name in tensors), ALIGNMENT)
    header: dict[str, object] = {}
    with file.open("wb") as stream:
        stream.seek(room)
        for number, (name, (type_, make)) in enumerate(tensors.items()):
            begin = stream.tell() - room
            values = np.ascontiguousarray(make(), _TYPES[type_])
            with needing_room(file, f"the weight {name}", values.nbytes):
                stream.write(values.reshape(-1).view(np.uint8).data)
                end = begin + values.nbytes
                word, shape = STORED_TYPES[type_], list(values.shape)
                header[name] = {"dtype": word, "shape": shape, "data_offsets": [begin, end]}
                if missing := -end % ALIGNMENT:
                    stream.write(bytes(missing))
                    place = [end, end + missing]
                    header[f"padding.{number}"] = {"dtype": "U8", "shape": [missing], "data_offsets": place}
            progress("writing weights", number + 1, len(tensors))
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= room - 8, "the header outgrew the room that was left for it"
        stream.seek(0)
        stream.write((room - 8).to_bytes(8, "little") + text + b" " * (room - 8 - len(text)))
