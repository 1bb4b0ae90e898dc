"""Where an attention's operands lie in the program's buffers, and what this executor asks of them.

The program's tables of the rotary embedding, mapped from its weights file once for all layers.

What attention is bound to: its operands, and the tables of its rotary embedding.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ingot.artifact import Artifact, AttentionStep, KVGeometry, Program, RotaryTables
from ingot.errors import EngineError
from ingot.runtime.batch import FloatArray, Int64Array
from ingot.runtime.cpu.buffers import ValueBuffers


class Operands(NamedTuple):
    """query [rows, heads * dim], key and value [rows, kv heads * dim], float32.

    Columns lie side by side; rows may be further apart, so that all three may be parts of one matrix.
    """

    query: FloatArray
    key: FloatArray
    value: FloatArray


@dataclass(frozen=True)
class Rotation:
    """cos and sin [positions, rotary_dim / 2], float32, C-contiguous."""

    cos: FloatArray
    sin: FloatArray

    def __post_init__(self) -> None:
        assert self.cos.shape == self.sin.shape
        assert all(table.flags.c_contiguous and table.dtype == np.float32 for table in (self.cos, self.sin))

    @property
    def rotary_dim(self) -> int:
        """Leading elements of a head that are turned."""
        return 2 * int(self.cos.shape[1])

    def turn(self, heads: FloatArray, positions: Int64Array) -> FloatArray:
        """Turn heads [n, ..., dim] of the tokens at `positions` [n]: elements d and d + rotary_dim / 2 are a pair."""
        half = self.rotary_dim // 2
        ones = (1,) * (heads.ndim - 2)
        cos, sin = (table[positions].reshape(-1, *ones, half) for table in (self.cos, self.sin))
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return np.concatenate((first * cos - second * sin, second * cos + first * sin, rest), axis=-1)


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


@dataclass(frozen=True)
class _Columns:
    """Columns `first` .. `first + width` of a value."""

    value: str
    first: int
    width: int


def attention_operands(step: AttentionStep, buffers: ValueBuffers) -> Operands:
    """Views of the step's query, key and value."""
    return Operands(*(buffers.floats(at.value)[:, at.first : at.first + at.width] for at in _operands(step)))


def check_attention(program: Program, kv: KVGeometry) -> None:
    """Refuse what the kernel would read or write out of bounds: it trusts the manifest's numbers."""
    for step in program.steps:
        if isinstance(step, AttentionStep):
            _check_heads(step, kv)
            operands = list(_operands(step))
            for name in dict.fromkeys(at.value for at in operands):
                _check_value(step, program, name, [at for at in operands if at.value == name])
            _check_value(step, program, step.output, [_Columns(step.output, 0, step.num_heads * step.head_dim)])


def _operands(step: AttentionStep) -> Iterator[_Columns]:
    """Query, key and value."""
    yield _Columns(step.query, step.query_column, step.num_heads * step.head_dim)
    yield _Columns(step.key, step.key_column, step.num_kv_heads * step.head_dim)
    yield _Columns(step.value, step.value_column, step.num_kv_heads * step.head_dim)


def _check_heads(step: AttentionStep, kv: KVGeometry) -> None:
    own = (step.num_kv_heads, step.head_dim)
    if step.layer >= kv.num_layers or own != (kv.num_kv_heads, kv.head_dim) or step.num_heads % step.num_kv_heads:
        raise EngineError(
            f"attention of layer {step.layer}: {step.num_heads} heads over {own[0]} of {own[1]} dimensions do not fit"
            f" the KV pool's {kv.num_layers} layers of {kv.num_kv_heads} heads of {kv.head_dim} dimensions;"
            " build the artifact again"
        )
    if step.rotary is not None and step.rotary.rotary_dim > step.head_dim:
        raise EngineError(
            f"attention of layer {step.layer}: turns {step.rotary.rotary_dim} of a head's {step.head_dim} dimensions; "
            "build the artifact again"
        )


def _check_value(step: AttentionStep, program: Program, name: str, parts: Sequence[_Columns]) -> None:
    """The parts, which lie in the value `name`, are float32 over tokens, and fill its columns."""
    facts = program.values[name]
    if facts.dtype != "float32" or facts.rows != "tokens":
        raise EngineError(
            f"attention of layer {step.layer}: {name} is {facts.dtype} by {facts.rows}; "
            "this executor attends in float32 over tokens; build the artifact for another engine or dtype"
        )
    columns = sum(part.width for part in parts)
    if facts.columns != columns or max(part.first + part.width for part in parts) > columns:
        raise EngineError(
            f"attention of layer {step.layer}: {name} has {facts.columns} columns, but its heads take {columns}"
            f" from {', '.join(str(part.first) for part in parts)} on; build the artifact again"
        )
