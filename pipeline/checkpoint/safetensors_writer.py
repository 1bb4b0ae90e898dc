"""Weights to a safetensors file: tensors of the IR, or arrays whose shapes are unknown until they are made.

Every tensor begins on a multiple of ALIGNMENT bytes, so that ONNX files and kernels can point into the file. Both
functions hold one tensor in memory, two while a lazy one is made, and write the same bytes for the same tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.launch_program import STORED_TYPES
from ingot.artifact.safetensors import LENGTH_BYTES
from ingot.artifact.safetensors_writer import (
    ALIGNMENT,
    SafetensorsWriter,
    Span,
    Write,
    header_entry,
    header_text,
)
from ingot.artifact.writer import explain_full_disk
from ingot.errors import BuildError, shown
from ingot.passes.weights import apply_to_array
from ingot.progress import report_progress
from ingot.sizes import round_up

DTYPE_NAMES = {
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


def write_weights(path: Path, tensors: Sequence[tuple[str, ir.TensorProtocol]], padded: bool = True) -> dict[str, Span]:
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
    names = sum(len(name) + _PADDING_NAME + 2 * _LONGEST_ENTRY for name in tensors)
    with SafetensorsWriter(file, round_up(ALIGNMENT + names, ALIGNMENT)) as writer:
        for number, (name, (type_, make)) in enumerate(tensors.items()):
            values = np.ascontiguousarray(make(), _TYPES[type_])
            with explain_full_disk(file, f"the weight {name}", values.nbytes):
                writer.add(name, STORED_TYPES[type_], values.shape, partial(_write_array, values))
                writer.align(f"padding.{number}")
            report_progress("writing weights", number + 1, len(tensors))


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
        return "U8" if self.tensor is None else DTYPE_NAMES.get(self.tensor.dtype, "U8")

    @property
    def shape(self) -> list[int]:
        """[length] where the file holds bytes instead of the tensor's type."""
        return list(self.tensor.shape.numpy()) if self.tensor and self.tensor.dtype in DTYPE_NAMES else [self.length]

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
