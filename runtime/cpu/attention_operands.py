"""Operands of an attention step: views of its operands in the program's buffers, its rotary tables and its sinks.

The tensors are mapped from the program's weights file once for all layers. `check_attention` refuses a manifest
whose numbers would make the kernel read or write out of bounds, because the kernel does not check them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ingot.artifact import Artifact, AttentionStep, KVGeometry, Program, RotaryTables, SinkTensor
from ingot.artifact.programs.recurrent_steps import StepTensor
from ingot.artifact.safetensors import MappedTensors
from ingot.errors import EngineError, shown
from ingot.runtime.cpu.buffers import ValueBuffers
from ingot.runtime.forward_batch import FloatArray, Int64Array


class AttentionOperands(NamedTuple):
    """query [rows, heads * dim], key [rows, kv heads * dim], value [rows, kv heads * value dim], float32.

    Columns are contiguous; rows need not be, so that all three may be slices of one matrix. A layer that shares another
    layer's keys and values has none of its own, and one whose values are a part of the keys has no value.
    """

    query: FloatArray
    key: FloatArray | None = None
    value: FloatArray | None = None


@dataclass(frozen=True)
class RotaryOperands:
    """cos and sin [positions, rotary_dim / 2], float32, C-contiguous."""

    cos: FloatArray
    sin: FloatArray

    def __post_init__(self) -> None:
        assert self.cos.shape == self.sin.shape
        assert all(table.flags.c_contiguous and table.dtype == np.float32 for table in (self.cos, self.sin))

    @property
    def rotary_dim(self) -> int:
        """Number of leading elements of a head that are rotated."""
        return 2 * int(self.cos.shape[1])

    def apply(self, heads: FloatArray, positions: Int64Array) -> FloatArray:
        """Rotate heads [n, ..., dim] of the tokens at `positions` [n]: elements d and d + rotary_dim / 2 are a pair."""
        half = self.rotary_dim // 2
        ones = (1,) * (heads.ndim - 2)
        cos, sin = (table[positions].reshape(-1, *ones, half) for table in (self.cos, self.sin))
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return np.concatenate((first * cos - second * sin, second * cos + first * sin, rest), axis=-1)


class StepTensors:
    """The tensors that attention steps of an artifact name, mapped from its files.

    Raises ArtifactError for tensors that are missing, EngineError for those of another type or shape, and for tables
    that are too short for the context.
    """

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._files: dict[str, MappedTensors] = {}
        self._made: dict[RotaryTables, RotaryOperands] = {}

    def rotation(self, tables: RotaryTables | None) -> RotaryOperands | None:
        """The rotation by these tables, made once for all steps that name them."""
        if tables is None:
            return None
        if tables not in self._made:
            shape = (self._artifact.manifest.model.context_tokens, tables.rotary_dim // 2)
            cos, sin = (_table(self._file(tables.file), name, shape) for name in (tables.cos, tables.sin))
            self._made[tables] = RotaryOperands(cos, sin)
        return self._made[tables]

    def sinks(self, tensor: SinkTensor | None, heads: int) -> FloatArray | None:
        """The sinks [heads] of a layer."""
        return None if tensor is None else self.floats(tensor, (heads,))

    def floats(self, tensor: SinkTensor | StepTensor, shape: tuple[int, ...]) -> FloatArray:
        """A tensor of that shape."""
        mapped = self._file(tensor.file)
        content = mapped.view(tensor.name)
        stored = mapped.tensors[tensor.name]
        if (stored.dtype, stored.shape) != ("F32", shape):
            raise EngineError(
                f"{mapped.file}: {shown(tensor.name)} is {stored.dtype} {list(stored.shape)}; it must be"
                f" F32 {list(shape)}; build the artifact again"
            )
        return content.view(np.float32).reshape(shape)

    def _file(self, name: str) -> MappedTensors:
        if name not in self._files:
            self._files[name] = MappedTensors(self._artifact.file(name))
        return self._files[name]


def _table(mapped: MappedTensors, name: str, shape: tuple[int, int]) -> FloatArray:
    """The tensor `name`, which must have at least shape[0] rows and exactly shape[1] columns."""
    content = mapped.view(name)
    stored = mapped.tensors[name]
    rows, columns = shape
    if stored.dtype != "F32" or len(stored.shape) != 2 or stored.shape[0] < rows or stored.shape[1] != columns:
        raise EngineError(
            f"{mapped.file}: {shown(name)} is {stored.dtype} {list(stored.shape)}; the rotary embedding needs F32 with "
            f"at least {rows} rows of {columns}; build the artifact again"
        )
    return content.view(np.float32).reshape(stored.shape)


def attention_operands(step: AttentionStep, buffers: ValueBuffers) -> AttentionOperands:
    """Views of the step's query, key and value."""
    return AttentionOperands(*(buffers.floats(at.value)[:, at.first : at.first + at.width] for at in _operands(step)))


def check_attention(program: Program, kv: KVGeometry) -> None:
    """Raise EngineError for a pool that the kernel does not read, and for steps that would leave their values or it."""
    for step in program.steps:
        if isinstance(step, AttentionStep):
            _check_heads(step, kv)
            operands = list(_operands(step))
            for name in dict.fromkeys(at.value for at in operands):
                _check_value(step, program, name, [at for at in operands if at.value == name])
            _check_value(step, program, step.output, [_Columns(step.output, 0, step.num_heads * step.output_dim)])


@dataclass(frozen=True)
class _Columns:
    """Columns `first` .. `first + width` of a value."""

    value: str
    first: int
    width: int


def _operands(step: AttentionStep) -> Iterator[_Columns]:
    """Columns of query, key and value."""
    yield _Columns(step.query, step.query_column, step.num_heads * step.head_dim)
    if step.key is not None:
        yield _Columns(step.key, step.key_column, step.num_kv_heads * step.head_dim)
    if step.value is not None:
        yield _Columns(step.value, step.value_column, step.num_kv_heads * step.output_dim)


def _check_heads(step: AttentionStep, kv: KVGeometry) -> None:
    layer = kv.layers[step.layer] if step.layer < kv.num_layers else None
    is_latent = layer is not None and layer.value_dim == 0  # values are a part of the keys
    own = (step.num_kv_heads, step.head_dim, 0 if is_latent else step.output_dim)
    if layer is None or own != (layer.num_kv_heads, layer.key_dim, layer.value_dim) or step.num_heads % own[0]:
        stored = "no such layer"
        if layer is not None:
            stored = (
                f"{layer.num_kv_heads} heads with keys of {layer.key_dim} and values of {layer.value_dim} dimensions"
            )
        raise EngineError(
            f"attention of layer {step.layer}: {step.num_heads} heads over {own[0]} of {own[1]} dimensions do not fit"
            f" the KV pool, which has {stored}; build the artifact again"
        )
    if is_latent and not 1 <= (step.value_dim or 0) <= step.head_dim:
        raise EngineError(
            f"attention of layer {step.layer}: values of {step.value_dim} dimensions cannot be a part of keys of"
            f" {step.head_dim}; build the artifact again"
        )
    if step.rotary is not None and step.rotary.rotary_dim > step.head_dim:
        raise EngineError(
            f"attention of layer {step.layer}: rotates {step.rotary.rotary_dim} of a head's {step.head_dim} dimensions;"
            " build the artifact again"
        )


def _check_value(step: AttentionStep, program: Program, name: str, parts: Sequence[_Columns]) -> None:
    """Raise EngineError unless the value is float32 over tokens, and the parts are all of its columns."""
    facts = program.values[name]
    if facts.dtype != "float32" or facts.rows != "tokens":
        raise EngineError(
            f"attention of layer {step.layer}: {shown(name)} is {facts.dtype} by {facts.rows}; "
            "this executor attends in float32 over tokens; build the artifact for another engine or dtype"
        )
    columns = sum(part.width for part in parts)
    if facts.columns != columns or max(part.first + part.width for part in parts) > columns:
        raise EngineError(
            f"attention of layer {step.layer}: {shown(name)} has {facts.columns} columns, but its heads take {columns}"
            f" from {', '.join(str(part.first) for part in parts)} on; build the artifact again"
        )
