"""Read safetensors files: check the header, and map tensors without a copy.

Layout (https://github.com/huggingface/safetensors#format): 8 bytes little-endian header length, a JSON object
name -> {dtype, shape, data_offsets}, then the tensors' bytes without gaps.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ingot.artifact.json_text import parse_json
from ingot.errors import ArtifactError, CheckpointError, IngotError, naming_file, near_or_all, shown

MAX_HEADER_BYTES = 100_000_000
MAX_AXES = 64  # numpy's limit
LENGTH_BYTES = 8  # the header's length, at the start of the file

# The format's names of types -> numpy's; bfloat16 as its bits, float8 as bytes.
_NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "F8_E4M3": "|u1",
    "F8_E5M2": "|u1",
    "F8_E8M0": "|u1",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "|u1",
    "BOOL": "|b1",
}
DTYPE_BYTES = {name: np.dtype(type_).itemsize for name, type_ in _NUMPY.items()}
# The name of an array's type: for the types that several names have, that of the last.
DTYPE_NAMES = {type_: name for name, type_ in _NUMPY.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. `dtype` is the format's name, such as BF16; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int

    def read(self, dtype: DTypeLike, begin: int = 0, num_bytes: int | None = None) -> NDArray[Any]:
        """Read its bytes, or so many of them from a place on, into a new array [n].

        OSError with the file's name; CheckpointError for a file that ends before, which has changed since its header
        was read.
        """
        size = self.num_bytes if num_bytes is None else num_bytes
        count = size // np.dtype(dtype).itemsize
        with naming_file(self.file):
            found = np.fromfile(self.file, dtype, count, offset=self.offset + begin)
        if len(found) != count:
            raise self.ends_early()
        return found

    def array(self) -> NDArray[Any]:
        """Read the tensor into an array: bfloat16 as float32, float8 as bytes. Errors as of `read`."""
        found = self.read(_NUMPY[self.dtype]).reshape(self.shape)
        return from_bfloat16(found) if self.dtype == "BF16" else found

    def ends_early(self) -> CheckpointError:
        """The error for a file that ends inside of the tensor."""
        return CheckpointError(f"{self.file}: ends inside {shown(self.name)}; the file changed while it was read")


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the upper half of a float32's bits as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    with np.errstate(over="ignore"):
        upper = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), upper)


def read_header(
    file: Path, error: type[IngotError] = CheckpointError, remedy: str = "download or copy it again"
) -> dict[str, StoredTensor]:
    """Read and check the header of `file`; return its tensors in the order of their bytes.

    Raises `error` for a missing or truncated file and for a header that contradicts itself or the data; the message for
    an incomplete file ends with `remedy`.
    """
    return _HeaderReader(file, error, remedy).read()


class MappedTensors:
    """An artifact's tensors by name, in file order. The file stays mapped until the last view is released.

    map_file   returns the bytes of the whole file

    Raises ArtifactError for an invalid file.
    """

    def __init__(self, file: Path, map_file: Callable[[Path], memoryview] | None = None) -> None:
        self.file = file
        self.tensors = read_header(file, ArtifactError, "build the artifact again")
        self._map = (map_file or map_whole)(file)

    def view(self, name: str, begin: int = 0, size: int | None = None) -> NDArray[np.uint8]:
        """Return a tensor's bytes, or `size` of them from `begin`; ArtifactError for an unknown name."""
        if name not in self.tensors:
            raise ArtifactError(f"{self.file}: holds no tensor {shown(name)}; build the artifact again")
        stored = self.tensors[name]
        return np.frombuffer(
            self._map, np.uint8, stored.num_bytes - begin if size is None else size, stored.offset + begin
        )


def map_whole(file: Path) -> memoryview:
    """Map a file into memory. OSError where the system refuses."""
    with file.open("rb") as stream:
        return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))


@dataclass(frozen=True)
class _HeaderReader:
    file: Path
    error: type[IngotError]
    remedy: str

    def read(self) -> dict[str, StoredTensor]:
        try:
            size = self.file.stat().st_size
            with self.file.open("rb") as stream:
                length = self._header_length(size, stream.read(LENGTH_BYTES))
                raw = stream.read(length)
        except OSError as error:
            raise self._refusal(f"cannot be read: {error.strerror}; check that it exists") from error
        begin = LENGTH_BYTES + length
        entries = self._parse(raw)
        tensors = [self._stored(name, entry, begin) for name, entry in entries.items() if name != "__metadata__"]
        tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
        self._check_layout(tensors, begin, size)
        return {tensor.name: tensor for tensor in tensors}

    def _refusal(self, problem: str) -> IngotError:
        return self.error(f"{self.file}: {problem}")

    def _incomplete(self, problem: str) -> IngotError:
        return self._refusal(f"{problem}; the file is damaged or its copy incomplete; {self.remedy}")

    def _header_length(self, size: int, prefix: bytes) -> int:
        if len(prefix) < LENGTH_BYTES:
            raise self._incomplete(f"has {size} bytes, less than the 8 of a header length")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise self._refusal(
                f"its header length is {length} bytes, at most {MAX_HEADER_BYTES} are allowed; "
                "the file is damaged or not a safetensors file"
            )
        if LENGTH_BYTES + length > size:
            raise self._incomplete(f"is truncated: the header needs {LENGTH_BYTES + length} bytes, the file has {size}")
        return length

    def _parse(self, raw: bytes) -> dict[str, Any]:
        try:
            header = parse_json(raw)
        except ValueError as error:
            raise self._refusal(f"its header is not JSON ({error}); the file is damaged") from error
        if not isinstance(header, dict):
            raise self._refusal(f"its header is a JSON {type(header).__name__}, it must be an object")
        return header

    def _stored(self, name: str, entry: Any, begin: int) -> StoredTensor:
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(first), int(last)]}:
                pass
            case _:
                raise self._refusal(
                    f"the header entry of {shown(name)} is {shown(entry)}; it must hold dtype, shape, two data_offsets"
                )
        if dtype not in DTYPE_BYTES:
            raise self._refusal(f"{shown(name)} has the unknown dtype {shown(dtype)}{near_or_all(dtype, DTYPE_BYTES)}")
        if len(shape) > MAX_AXES or not all(map(_is_size, shape)):
            raise self._refusal(
                f"{shown(name)} has the shape {shown(shape)}; it must hold at most {MAX_AXES} whole numbers from 0"
            )
        if not (_is_size(first) and _is_size(last)):
            raise self._refusal(
                f"{shown(name)} has the data_offsets {shown([first, last])}; they must be whole numbers from 0"
            )
        needed = prod(shape) * DTYPE_BYTES[dtype]
        if needed != last - first:
            raise self._refusal(
                f"{shown(name)} is {dtype} of shape {shape}, which takes {needed} bytes, "
                f"but its data_offsets [{first}, {last}] hold {last - first}; the file is damaged"
            )
        return StoredTensor(name, dtype, tuple(shape), self.file, begin + first, last - first)

    def _check_layout(self, tensors: list[StoredTensor], begin: int, size: int) -> None:
        """Refuse overlaps, gaps, and data that ends before or after the end of the file."""
        gaps = list(_gaps(tensors, begin, size))
        if not gaps:
            return
        end = max((tensor.offset + tensor.num_bytes for tensor in tensors), default=begin)
        if len(gaps) == 1 and gaps[0].tensor is None and end < size:
            raise self._refusal(f"has {size - end} bytes after its last tensor; the file is damaged")
        if len(gaps) == 1 and gaps[0].tensor is None:
            last = next(tensor for tensor in tensors if tensor.offset + tensor.num_bytes > size)
            raise self._incomplete(
                f"is truncated: {shown(last.name)} ends at byte {last.offset + last.num_bytes}, the file has {size} "
                f"of {end} bytes"
            )
        raise self._misplaced(tensors, gaps[0], begin, size)

    def _misplaced(self, tensors: list[StoredTensor], gap: "_Gap", begin: int, size: int) -> IngotError:
        """The error for tensors that do not follow one another: names the one that alone is in a wrong place."""
        assert gap.tensor is not None
        before = "the header" if gap.before is None else shown(gap.before.name)
        for tensor in dict.fromkeys([gap.tensor, tensors[-1], gap.before or gap.tensor]):
            others = list(_gaps([other for other in tensors if other is not tensor], begin, size))
            if len(others) == 1 and others[0].end - others[0].begin == tensor.num_bytes:
                at = tensor.offset - begin
                return self._refusal(
                    f"{shown(tensor.name)} has the data_offsets [{at}, {at + tensor.num_bytes}], but the place that no "
                    f"other tensor takes is [{others[0].begin - begin}, {others[0].end - begin}]; the file is damaged"
                )
        distance = gap.end - gap.begin
        how = f"leaves a hole of {distance} bytes after" if distance > 0 else f"overlaps {-distance} bytes of"
        return self._refusal(
            f"{shown(gap.tensor.name)} begins at data offset {gap.tensor.offset - begin} and {how} {before}, which "
            f"ends at {gap.begin - begin}; the file is damaged"
        )


@dataclass(frozen=True)
class _Gap:
    """Bytes from `begin` to `end` that no tensor takes, or that two take where `end` is less.

    It is between `before`, or the header, and `tensor`, or the end of the file.
    """

    begin: int
    end: int
    before: StoredTensor | None
    tensor: StoredTensor | None


def _gaps(tensors: Sequence[StoredTensor], begin: int, size: int) -> Iterator[_Gap]:
    """Yield where tensors, sorted by offset, do not follow one another from `begin` to `size`."""
    end, before = begin, None
    for tensor in tensors:
        if tensor.offset != end:
            yield _Gap(end, tensor.offset, before, tensor)
        end, before = max(end, tensor.offset + tensor.num_bytes), tensor
    if end != size:
        yield _Gap(min(end, size), max(end, size), before, None)


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0
