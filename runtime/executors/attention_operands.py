"""Where an attention's operands lie in the program's buffers, and what this executor asks of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ingot.artifact import AttentionStep, KVGeometry, Program
from ingot.errors import EngineError
from ingot.runtime.executors.buffers import ValueBuffers
from ingot.runtime.native.operands import Operands


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
