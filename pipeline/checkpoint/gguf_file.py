"""Reader of a GGUF file's header: metadata and the place of each tensor; the data stays on disk.

Layout (ggml/docs/gguf.md): magic, version, counts, key-value pairs, tensor infos, then data from the next multiple of
general.alignment. Shapes are stored innermost first; here they are as everywhere else, [out, in].
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ingot.errors import CheckpointError, shown
from ingot.pipeline.checkpoint.formats.gguf_blocks import BLOCK_TYPES
from ingot.sizes import round_up

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
PLAIN_TYPES = {0: ("F32", 4), 1: ("F16", 2), 30: ("BF16", 2)}
# Types of ggml that are not read, by their names in ggml.h.
OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's place: `offset` counts bytes from the beginning of the file. `type_id` is ggml's number."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """An opened file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read and check the header.

    CheckpointError when the file is not GGUF, is truncated or contradicts itself, or has a tensor of an unknown type.
    """
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    reader = _Reader(path, content, size)
    num_tensors, num_pairs = _counts(reader)
    metadata = _pairs(reader, num_pairs)
    infos = [_info(reader) for _ in range(num_tensors)]
    alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise CheckpointError(f"{path}: {ALIGNMENT_KEY} is {shown(alignment)}; it must be a number from 1")
    begin = round_up(reader.at, alignment)
    tensors = [_tensor(path, begin, *info) for info in infos]
    _check_data(path, tensors, reader.size)
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in tensors})


class _Reader:
    """A cursor over the header's bytes that never reads past the end."""

    def __init__(self, path: Path, content: bytes | mmap.mmap, size: int) -> None:
        self.path, self.size, self.at = path, size, 0
        self._content = content

    def take(self, count: int) -> bytes:
        if count > self.size - self.at:
            raise CheckpointError(
                f"{self.path}: is truncated or damaged: {count} bytes are announced at byte {self.at} of {self.size}; "
                "download or copy it again"
            )
        self.at += count
        return self._content[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            element, count = self.number("I"), self.number("Q")
            if element in SCALARS:
                code = f"<{count}{SCALARS[element]}"
                return list(struct.unpack(code, self.take(count * struct.calcsize(f"<{SCALARS[element]}"))))
            if element == ARRAY:
                raise CheckpointError(f"{self.path}: holds an array of arrays, which GGUF does not use; it is damaged")
            return [self.value(element) for _ in range(count)]
        if kind not in SCALARS:
            raise CheckpointError(f"{self.path}: holds a value of the unknown type {kind}; the file is damaged")
        return self.number(SCALARS[kind])


def _counts(reader: _Reader) -> tuple[int, int]:
    if reader.size < len(MAGIC) or reader.take(len(MAGIC)) != MAGIC:
        raise CheckpointError(f"{reader.path}: does not begin with GGUF, so it is not a GGUF file")
    version = reader.number("I")
    if version not in VERSIONS:
        raise CheckpointError(f"{reader.path}: is GGUF version {version}; versions 2 and 3 are read")
    return reader.number("Q"), reader.number("Q")


def _pairs(reader: _Reader, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = reader.string()
        if key in metadata:
            raise CheckpointError(f"{reader.path}: has the key {shown(key)} twice; the file is damaged")
        metadata[key] = reader.value(reader.number("I"))
    return metadata


def _info(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = reader.string(), reader.number("I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise CheckpointError(
            f"{reader.path}: {shown(name)} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed"
        )
    shape = tuple(reversed([reader.number("Q") for _ in range(dimensions)]))
    return name, shape, reader.number("I"), reader.number("Q")


def _tensor(path: Path, begin: int, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GgufTensor:
    if type_id in PLAIN_TYPES:
        return GgufTensor(name, type_id, shape, begin + offset, prod(shape) * PLAIN_TYPES[type_id][1])
    if type_id not in BLOCK_TYPES:
        known = ", ".join([*(name for name, _ in PLAIN_TYPES.values()), *(kind.name for kind in BLOCK_TYPES.values())])
        other = OTHER_TYPES.get(type_id, f"the type {type_id}")
        raise CheckpointError(
            f"{path}: {shown(name)} is of {other}, which Ingot does not read; it reads {known}: "
            "quantize the model again to one of these, or build from the model that was quantized"
        )
    kind = BLOCK_TYPES[type_id]
    if shape[-1] % kind.values:
        raise CheckpointError(
            f"{path}: {shown(name)} has rows of {shape[-1]}, not a multiple of {kind.name}'s {kind.values}"
        )
    return GgufTensor(name, type_id, shape, begin + offset, prod(shape) // kind.values * kind.num_bytes)


def _check_data(path: Path, tensors: list[GgufTensor], size: int) -> None:
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise CheckpointError(f"{path}: names a tensor twice; the file is damaged")
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise CheckpointError(f"{path}: {shown(tensor.name)} overlaps the tensor before it; the file is damaged")
        end = tensor.offset + tensor.num_bytes
        if end > size:
            raise CheckpointError(
                f"{path}: is truncated: {shown(tensor.name)} ends at byte {end}, the file has {size}; download it again"
            )
