"""Writes safetensors files: tensors of the IR, or arrays whose shapes are unknown until they are made.

Tensors are written one after another, then the header into the space reserved for it. A weight begins on a multiple of
ALIGNMENT bytes, so that ONNX files and kernels can point into the file. `write_weights` and `stream_weights` hold one
tensor in memory, two while a lazy one is made, and write the same bytes for the same tensors.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.programs.launch_program import STORED_TYPES
from ingot.artifact.safetensors import DTYPE_NAMES, LENGTH_BYTES
from ingot.artifact.writer import explain_full_disk
from ingot.errors import BuildError, shown
from ingot.passes.weights import apply_to_array
from ingot.progress import report_progress
from ingot.sizes import round_up

ALIGNMENT = 64
_CHUNK_BYTES = 1 << 24
_LIBRARY_ALIGNMENT = 8
"""Files that the safetensors library writes have their data at a multiple of it."""

IR_DTYPES = {
    ir.DataType.DOUBLE: "F64",
    ir.DataType.FLOAT: "F32",
    ir.DataType.FLOAT16: "F16",
    ir.DataType.BFLOAT16: "BF16",
    ir.DataType.FLOAT8E4M3FN: "F8_E4M3",
    ir.DataType.FLOAT8E5M2: "F8_E5M2",
    ir.DataType.FLOAT8E8M0: "F8_E8M0",
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
_LONGEST_ENTRY = 160  # bytes of an entry's JSON without its name: a dtype, a shape of four, two offsets of 16 digits
_PADDING_NAME = len("padding.") + 10

Maker = Callable[[], NDArray[Any]]
Write = Callable[[bytes | memoryview], None]


@dataclass(frozen=True)
class FileSpan:
    """Offset and length of a tensor in the file, in bytes."""

    offset: int
    length: int


class SafetensorsWriter:
    """Writes a new file; leaving the block without an exception completes it.

        with SafetensorsWriter(file, header_bytes) as writer:
            span = writer.add("w", "F32", (2, 3), lambda write: write(content))
            writer.align("padding.0")

    header_bytes    bytes reserved for the header, its length field included; spaces fill the rest
    metadata        header entries before those of the tensors

    The format allows no gaps, so `align` adds a named tensor of zeros.
    """

    def __init__(self, file: Path, header_bytes: int, metadata: Mapping[str, object] | None = None) -> None:
        self.header_bytes = header_bytes
        self._header: dict[str, object] = dict(metadata or {})
        self._end = header_bytes
        self._stream = file.open("wb", buffering=0)
        self._stream.seek(header_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stream:
            if kind is None:
                self._write_header()

    def add(self, name: str, dtype: str, shape: Iterable[int], produce: Callable[[Write], None]) -> FileSpan:
        """Append a tensor of the format's `dtype`, such as BF16; `produce` writes its bytes in one or more calls."""
        begin = self._end
        produce(self._write)
        self._header[name] = header_entry(dtype, shape, begin - self.header_bytes, self._end - self.header_bytes)
        return FileSpan(begin, self._end - begin)

    def align(self, name: str) -> bool:
        """Pad to the next multiple of ALIGNMENT with a tensor of zeros; return whether padding was needed."""
        gap = -self._end % ALIGNMENT
        if gap:
            self.add(name, "U8", [gap], lambda write: write(bytes(gap)))
        return gap > 0

    def _write_header(self) -> None:
        text = header_text(self._header)
        space = self.header_bytes - LENGTH_BYTES
        assert len(text) <= space, "the header is larger than the space reserved for it"
        self._stream.seek(0)
        self._write(space.to_bytes(LENGTH_BYTES, "little") + text + b" " * (space - len(text)))

    def _write(self, content: bytes | memoryview) -> None:
        """Write all bytes; a raw stream may write fewer than it is given."""
        view = memoryview(content)
        self._end += len(view)
        while len(view):
            view = view[self._stream.write(view[:_CHUNK_BYTES]) :]


def header_entry(dtype: str, shape: Iterable[int], begin: int, end: int) -> dict[str, object]:
    """Return a tensor's header entry; offsets count from the end of the header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def header_text(header: Mapping[str, object]) -> bytes:
    """Encode the header as compact JSON."""
    return json.dumps(header, separators=(",", ":")).encode()


def write_weights(
    path: Path, tensors: Sequence[tuple[str, ir.TensorProtocol]], padded: bool = True
) -> dict[str, FileSpan]:
    """Write named tensors to a new file; return the place of each one's bytes.

    padded    align every tensor: those whose size is a multiple of ALIGNMENT come first, in the order given, then the
              others, each with an entry padding.N after it. Without it the file holds the named tensors alone and in
              their order, as other tools expect

    BuildError when the disk is full says how many bytes were needed.
    """
    entries = list(_layout(tensors, padded))
    metadata: dict[str, object] = {} if padded else {"__metadata__": {"format": "pt"}}
    header = header_text({**metadata, **{entry.name: entry.header() for entry in entries}})
    header_bytes = round_up(LENGTH_BYTES + len(header), ALIGNMENT)
    total, spans = header_bytes + sum(entry.length for entry in entries), {}
    with explain_full_disk(path, "the weights", total), SafetensorsWriter(path, header_bytes, metadata) as writer:
        for entry in entries:
            spans[entry.name] = writer.add(entry.name, entry.dtype, entry.shape, entry.produce)
            report_progress("writing weights", spans[entry.name].offset + entry.length, total)
    return {entry.name: spans[entry.name] for entry in entries if entry.tensor is not None}


def stream_weights(file: Path, tensors: Mapping[str, tuple[str, Maker]]) -> None:
    """Write name -> (type, how it is made) to a new file, converted to the type, with entries padding.N between.

    The header gets as much room as the longest shapes and offsets can take. BuildError when the disk is full.
    """
    with SafetensorsWriter(file, _reserved_bytes(tensors)) as writer:
        for number, (name, (type_, make)) in enumerate(tensors.items()):
            values = as_stored(make(), type_)
            with explain_full_disk(file, f"the weight {name}", values.nbytes):
                writer.add(name, STORED_TYPES[type_], values.shape, partial(_write_array, values))
                writer.align(f"padding.{number}")
            report_progress("writing weights", number + 1, len(tensors))


def as_stored(values: NDArray[Any], type_: str) -> NDArray[Any]:
    """Return values in the type of this name of Triton's, contiguous."""
    return np.ascontiguousarray(values, _TYPES[type_])


def streamed_bytes(sizes: Mapping[str, int]) -> int:
    """Bytes of the file that `stream_weights` writes of tensors of these sizes."""
    return _reserved_bytes(sizes) + sum(round_up(size, ALIGNMENT) for size in sizes.values())


def weights_file_bytes(tensors: Sequence[tuple[str, ir.TensorProtocol]]) -> int:
    """Bytes of the file that `write_weights` writes, padded."""
    entries = list(_layout(tensors, padded=True))
    header = header_text({entry.name: entry.header() for entry in entries})
    return round_up(LENGTH_BYTES + len(header), ALIGNMENT) + sum(entry.length for entry in entries)


def _reserved_bytes(names: Iterable[str]) -> int:
    """Room for a header of these tensors with the longest shapes and offsets."""
    return round_up(ALIGNMENT + sum(len(name) + _PADDING_NAME + 2 * _LONGEST_ENTRY for name in names), ALIGNMENT)


def arrays_as_safetensors(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return the content of a file of small arrays, by name: for arrays of bytes that of the safetensors library."""
    header, end, pieces = {}, 0, []
    for name, array in sorted(arrays.items()):
        begin, end = end, end + array.nbytes
        header[name] = header_entry(DTYPE_NAMES[array.dtype.str], array.shape, begin, end)
        pieces.append(array.tobytes())
    text = header_text(header)
    space = round_up(len(text), _LIBRARY_ALIGNMENT)
    return b"".join([space.to_bytes(LENGTH_BYTES, "little"), text.ljust(space), *pieces])


@dataclass(frozen=True)
class _Entry:
    """One tensor of the file; `tensor` is None for padding. `begin` counts from the end of the header."""

    name: str
    tensor: ir.TensorProtocol | None
    begin: int
    length: int

    @property
    def dtype(self) -> str:
        """The format's word; types that it does not have (4 bits) are bytes."""
        return "U8" if self.tensor is None else IR_DTYPES.get(self.tensor.dtype, "U8")

    @property
    def shape(self) -> list[int]:
        """[length] where the file holds bytes instead of the tensor's type."""
        return list(self.tensor.shape.numpy()) if self.tensor and self.tensor.dtype in IR_DTYPES else [self.length]

    def header(self) -> dict[str, object]:
        """The entry in the file's header."""
        return header_entry(self.dtype, self.shape, self.begin, self.begin + self.length)

    def produce(self, write: Write) -> None:
        """Write the tensor's bytes; its memory map is released afterwards."""
        if self.tensor is None:
            write(bytes(self.length))
        elif self.tensor.dtype.bitwidth < 8:
            write(self.tensor.tobytes())
        else:
            apply_to_array(self.tensor, lambda values: write(self._checked(_bytes_of(np.ascontiguousarray(values)))))

    def _checked(self, content: memoryview) -> memoryview:
        if len(content) != self.length:
            raise BuildError(
                f"tensor {shown(self.name)} has {len(content):,} bytes where {self.length:,} were announced"
            )
        return content


def _layout(tensors: Sequence[tuple[str, ir.TensorProtocol]], padded: bool) -> Iterator[_Entry]:
    """Place the tensors one after the other, when padded aligned ones first."""
    begin = paddings = 0
    for name, tensor in sorted(tensors, key=lambda named: padded and named[1].nbytes % ALIGNMENT != 0):
        yield _Entry(name, tensor, begin, tensor.nbytes)
        begin += tensor.nbytes
        if padded and (missing := -begin % ALIGNMENT):
            yield _Entry(f"padding.{paddings}", None, begin, missing)
            begin, paddings = begin + missing, paddings + 1


def _write_array(values: NDArray[Any], write: Write) -> None:
    write(_bytes_of(values))


def _bytes_of(values: NDArray[Any]) -> memoryview:
    return values.reshape(-1).view(np.uint8).data
