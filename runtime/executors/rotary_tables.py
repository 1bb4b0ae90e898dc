"""The program's tables of the rotary embedding, mapped from its weights file once for all layers."""

import json
from math import prod
from pathlib import Path

import numpy as np

from ingot.artifact import Artifact, RotaryTables
from ingot.errors import EngineError
from ingot.runtime.batch import FloatArray
from ingot.runtime.native.operands import Rotation


class Rotations:
    """Rotations of one artifact, by what a step says of its tables.

    Raises EngineError for tables that are missing, of another width, or too short for the context.
    """

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._made: dict[RotaryTables, Rotation] = {}

    def __getitem__(self, tables: RotaryTables) -> Rotation:
        if tables not in self._made:
            file = self._artifact.file(tables.file)
            shape = (self._artifact.manifest.model.context_tokens, tables.rotary_dim // 2)
            cos, sin = (_table(file, name, shape) for name in (tables.cos, tables.sin))
            self._made[tables] = Rotation(cos, sin)
        return self._made[tables]


def _table(file: Path, name: str, shape: tuple[int, int]) -> FloatArray:
    """The tensor `name` of the file, which has at least shape[0] rows and shape[1] columns."""
    begin, header = _header(file)
    entry = header.get(name)
    if not isinstance(entry, dict):
        raise EngineError(f"{file}: holds no tensor {name!r}; build the artifact again")
    found, (first, last) = tuple(entry["shape"]), entry["data_offsets"]
    if entry["dtype"] != "F32" or len(found) != 2 or found[0] < shape[0] or found[1] != shape[1]:
        raise EngineError(
            f"{file}: {name!r} is {entry['dtype']} {list(found)}; the rotary embedding needs F32 with at least "
            f"{shape[0]} rows of {shape[1]}; build the artifact again"
        )
    if last - first != 4 * prod(found) or begin + last > file.stat().st_size:
        raise EngineError(f"{file}: {name!r} reaches beyond its bytes; build the artifact again")
    return np.asarray(np.memmap(file, np.float32, "r", begin + first, found))


def _header(file: Path) -> tuple[int, dict[str, object]]:
    """Where the file's data begins, and its JSON header (format: github.com/huggingface/safetensors)."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header: dict[str, object] = json.loads(stream.read(length))
    return 8 + length, header
