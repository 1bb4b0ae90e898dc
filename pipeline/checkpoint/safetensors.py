"""The header of one safetensors file, read and checked; the data stays on disk.

Layout (https://github.com/huggingface/safetensors#format): 8 bytes little-endian header length, a JSON object
name -> {dtype, shape, data_offsets}, then the tensors' bytes, without holes.

Finding NaN and Inf in a stored tensor by its bits, one chunk at a time, without making floats of it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import CheckpointError, did_you_mean, one_of

MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_COPY_AGAIN = "the file is damaged or its copy incomplete; download or copy it again"

DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `offset` counts bytes from the beginning of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read and check the header of `file`; the tensors come in the order of their bytes.

    Raises CheckpointError for a file that is missing, truncated, or whose header contradicts itself or the data.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = _header_length(file, size, stream.read(_LENGTH_BYTES))
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}; check that it exists") from error
    entries = _parse(file, raw)
    begin = _LENGTH_BYTES + length
    tensors = [_stored(file, name, entry, begin) for name, entry in entries.items() if name != "__metadata__"]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    _check_layout(file, tensors, begin, size)
    return {tensor.name: tensor for tensor in tensors}


def _header_length(file: Path, size: int, prefix: bytes) -> int:
    if len(prefix) < _LENGTH_BYTES:
        raise CheckpointError(f"{file}: has {size} bytes, less than the 8 of a header length; {_COPY_AGAIN}")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file}: its header length is {length} bytes, at most {MAX_HEADER_BYTES} are allowed; "
            "the file is damaged or no safetensors file"
        )
    if _LENGTH_BYTES + length > size:
        raise CheckpointError(
            f"{file}: is truncated: the header needs {_LENGTH_BYTES + length} bytes, the file has {size}; {_COPY_AGAIN}"
        )
    return length


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"{file}: its header is not JSON ({error}); the file is damaged") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: its header is a JSON {type(header).__name__}, it must be an object")
    return header


def _stored(file: Path, name: str, entry: Any, begin: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(first), int(last)]}:
            pass
        case _:
            raise CheckpointError(
                f"{file}: the header entry of {name!r} is {entry!r}; it must hold dtype, shape and two data_offsets"
            )
    if dtype not in DTYPE_BYTES:
        raise CheckpointError(
            f"{file}: {name!r} has the unknown dtype {dtype!r}; known are {one_of(DTYPE_BYTES)}."
            + did_you_mean(dtype, DTYPE_BYTES)
        )
    if not all(type(dim) is int and dim >= 0 for dim in shape):
        raise CheckpointError(f"{file}: {name!r} has the shape {shape!r}; it must hold whole numbers from 0")
    if prod(shape) * DTYPE_BYTES[dtype] != last - first:
        raise CheckpointError(
            f"{file}: {name!r} is {dtype} of shape {shape}, which takes {prod(shape) * DTYPE_BYTES[dtype]} bytes, "
            f"but its data_offsets [{first}, {last}] hold {last - first}; the file is damaged"
        )
    return StoredTensor(name, dtype, tuple(shape), file, begin + first, last - first)


def _check_layout(file: Path, tensors: list[StoredTensor], begin: int, size: int) -> None:
    """Refuse overlaps, holes and data that ends before or after the file does."""
    end = begin
    for tensor in tensors:
        if tensor.offset != end:
            problem = "overlaps the tensor before it" if tensor.offset < end else "leaves a hole before it"
            raise CheckpointError(
                f"{file}: {tensor.name!r} begins at data offset {tensor.offset - begin}, expected {end - begin}: "
                f"it {problem}; the file is damaged"
            )
        end += tensor.num_bytes
    if end > size:
        last = next(tensor for tensor in tensors if tensor.offset + tensor.num_bytes > size)
        raise CheckpointError(
            f"{file}: is truncated: {last.name!r} ends at byte {last.offset + last.num_bytes}, the file has {size} "
            f"of {end} bytes; {_COPY_AGAIN}"
        )
    if end < size:
        raise CheckpointError(f"{file}: has {size - end} bytes after its last tensor; the file is damaged")


CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class _Format:
    """A float format: the bits' type, and where exponent and mantissa stand. All exponent bits set: NaN or Inf."""

    bits: np.dtype[np.unsignedinteger]
    exponent: int
    magnitude: int


_FORMATS = {
    "F32": _Format(np.dtype("<u4"), 0x7F80_0000, 0x7FFF_FFFF),
    "F16": _Format(np.dtype("<u2"), 0x7C00, 0x7FFF),
    "BF16": _Format(np.dtype("<u2"), 0x7F80, 0x7FFF),
}


@dataclass(frozen=True)
class NonFinite:
    """How many elements of a tensor are NaN and how many are plus or minus infinity."""

    nan: int = 0
    inf: int = 0


def count_non_finite(stored: StoredTensor) -> NonFinite:
    """Count NaN and Inf; other formats than F32, F16 and BF16 count as finite. Holds CHUNK_BYTES at a time."""
    kind = _FORMATS.get(stored.dtype)
    if kind is None:
        return NonFinite()
    nan = inf = 0
    for bits in _chunks(stored, kind.bits):
        np.bitwise_and(bits, kind.bits.type(kind.magnitude), out=bits)
        if bits.max() >= kind.exponent:
            nan += int(np.count_nonzero(bits > kind.exponent))
            inf += int(np.count_nonzero(bits == kind.exponent))
    return NonFinite(nan, inf)


def _chunks(
    stored: StoredTensor, bits: np.dtype[np.unsignedinteger]
) -> Iterator[np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]]:
    """The tensor's elements, one chunk after the other in the same buffer: fresh memory would cost most of the time."""
    buffer = np.empty(CHUNK_BYTES // bits.itemsize, bits)
    with stored.file.open("rb", buffering=0) as stream:
        stream.seek(stored.offset)
        for begin in range(0, stored.num_bytes, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, stored.num_bytes - begin) // bits.itemsize]
            if stream.readinto(chunk.data) != chunk.nbytes:
                raise CheckpointError(f"{stored.file}: ends inside {stored.name!r}; the file changed while it was read")
            yield chunk
