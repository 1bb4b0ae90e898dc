"""Paged attention that applies the rotary embedding, and reads packed projections, itself.

    Matched         q, k, v = Split(packed; axis=-1)                                 [T, H * D], and [T, KV * D] twice
                    q', k' = Squeeze(RotaryEmbedding(Unsqueeze(.., 0), cos, sin, positions), 0)  of q and of k
                    a = ingot::PagedAttention(q', k', v)

    Replacement     a = ingot::PagedAttention(packed, packed, packed, cos, sin; query_column=0, key_column=H * D,
                                              value_column=(H + KV) * D, rotary_dim=...)

The columns say where each operand begins in its input. The kernel reads the operands where the matmul wrote them and
rotates queries and keys as it reads them: no copies, and six ops less in each layer. Either half is applied alone: only
the rotary embedding where queries and keys are not packed or have a norm, only the split in a layer without a rotary
embedding. Segments no longer read the tables; these are stored with the weights for the executor.

An attention that shares the keys and values of another layer (`shares`) reads them from the KV cache: it loses these
operands, whether its rotary embedding is absorbed or not.

Refuses: queries and keys rotated by different tables, or only one of them rotated; interleaved pairs; a number of heads
other than the attention's; positions other than the graph's position_ids. Such a rotary embedding stays an op.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import onnx_ir as ir

from ingot.passes.base import Pass, PassKind
from ingot.passes.rewriting import (
    Refusal,
    attention_operands,
    attentions,
    make_node,
    replace_nodes,
    settle,
    small_constant,
    sole_consumer,
    static_columns,
)

_COLUMNS = ("query_column", "key_column", "value_column")
_ABSORBED = ("Squeeze", "RotaryEmbedding", "Unsqueeze", "Split")


@dataclass(frozen=True)
class FuseRotaryAttention(Pass):
    """No options. A rotary embedding that does not match stays an op of its own."""

    name: ClassVar[str] = "fuse-rotary-attention"
    kind: ClassVar[PassKind] = "lowering"
    summary: ClassVar[str] = "Lets paged attention read packed projections and apply the rotary embedding itself."

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Absorb rotary embeddings first: they hide the splits."""
        refusals, modified = [], False
        for match in list(_find(model.graph)):
            refusal = _check(match)
            if refusal is None:
                _replace(model.graph, match)
                modified = True
            else:
                refusals.append(refusal)
        for attention in attentions(model.graph):
            modified |= _read_shared(model.graph, attention)
        for attention in attentions(model.graph):
            modified |= _read_packed(model.graph, attention)
        settle(self.name, refusals, strict=False, is_present=True)
        return ir.passes.PassResult(model, modified)


@dataclass(frozen=True)
class _Match:
    """An attention, and the RotaryEmbedding of its query and of its key, where they have one."""

    attention: ir.Node
    query: ir.Node | None
    key: ir.Node | None

    @property
    def rotations(self) -> tuple[tuple[ir.Node | None, str], ...]:
        return (self.query, "num_heads"), (self.key, "num_kv_heads")


def _find(graph: ir.Graph) -> Iterator[_Match]:
    for attention in attentions(graph):
        query, key = (_rotation_of(attention.inputs[index]) for index in (0, 1))
        if query is not None or key is not None:
            yield _Match(attention, query, key)


def _rotation_of(operand: ir.Value | None) -> ir.Node | None:
    """The RotaryEmbedding that makes `operand`, through the Squeeze of its batch axis."""
    rotated = _without_batch(operand, "Squeeze")
    rotation = rotated.producer() if rotated is not None else None
    return rotation if rotation is not None and rotation.op_type == "RotaryEmbedding" else None


def _without_batch(value: ir.Value | None, op_type: str) -> ir.Value | None:
    """The input of the Squeeze or Unsqueeze of axis 0 that makes `value`; None for anything else."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != op_type or len(node.inputs) < 2 or small_constant(node.inputs[1]) != [0]:
        return None
    return node.inputs[0]


def _check(match: _Match) -> Refusal | None:
    if match.query is None or match.key is None:
        return Refusal(match.attention.name or "", "has only its queries or only its keys rotated")
    for rotation, heads in match.rotations:
        assert rotation is not None
        reason = _why_not(rotation, match.attention, heads)
        if reason:
            return Refusal(rotation.name or "", reason)
    if match.query.inputs[1:3] != match.key.inputs[1:3] or _rotary_dim(match, match.query) != _rotary_dim(
        match, match.key
    ):
        return Refusal(match.key.name or "", f"rotates keys otherwise than {match.query.name!r} rotates queries")
    return None


def _why_not(rotation: ir.Node, attention: ir.Node, heads: str) -> str | None:
    """Return why the kernel cannot replace this RotaryEmbedding."""
    if rotation.attributes.get_int("interleaved", 0):
        return "pairs neighbours (interleaved); the kernel pairs halves"
    if rotation.attributes.get_int("num_heads", 0) != attention.attributes[heads].as_int():
        return f"has another number of heads than the {heads} of {attention.name!r}"
    if _without_batch(rotation.inputs[0], "Unsqueeze") is None:
        return "reads a batch axis that no Unsqueeze adds"
    positions = _without_batch(rotation.inputs[3], "Unsqueeze") if len(rotation.inputs) > 3 else None
    if positions is None or positions.name != "position_ids" or not positions.is_graph_input():
        return "takes positions that are not the graph's position_ids"
    tables = rotation.inputs[1:3]
    if not all(_is_table(table) for table in tables):
        return "has tables other than float32 initializers"
    return None


def _is_table(table: ir.Value | None) -> bool:
    return table is not None and table.is_initializer() and table.dtype == ir.DataType.FLOAT


def _rotary_dim(match: _Match, rotation: ir.Node) -> int:
    """Leading elements of a head that are rotated; the op's 0 means all."""
    return rotation.attributes.get_int("rotary_embedding_dim", 0) or match.attention.attributes["head_dim"].as_int()


def _replace(graph: ir.Graph, match: _Match) -> None:
    assert match.query is not None
    assert match.key is not None
    query, key = (_without_batch(rotation.inputs[0], "Unsqueeze") for rotation in (match.query, match.key))
    inputs = [query, key, attention_operands(match.attention)[2], *match.query.inputs[1:3], *match.attention.inputs[5:]]
    _rewrite(graph, match.attention, inputs, rotary_dim=_rotary_dim(match, match.query))


def _read_shared(graph: ir.Graph, attention: ir.Node) -> bool:
    """Drop the key and the value of an attention that shares those of another layer; return whether it had them."""
    if "shares" not in attention.attributes or attention.inputs[1] is None:
        return False
    _rewrite(graph, attention, [attention.inputs[0], None, None, *attention.inputs[3:]])
    return True


def _read_packed(graph: ir.Graph, attention: ir.Node) -> bool:
    """Read the Split's input where only this attention reads the Split; report whether it was replaced."""
    operands = attention.inputs[:3]
    splits = {operand.producer() for operand in operands if operand is not None}
    split = splits.pop()
    if splits or split is None or split.op_type != "Split" or set(split.outputs) != set(operands):
        return False
    widths = [static_columns(output) for output in split.outputs]
    is_last_axis = split.attributes.get_int("axis", 0) in (-1, 1)
    if not is_last_axis or None in widths or any(sole_consumer(output) is None for output in split.outputs):
        return False
    begins = {output: sum(filter(None, widths[:index])) for index, output in enumerate(split.outputs)}
    columns = {name: begins[operand] for name, operand in zip(_COLUMNS, operands, strict=True) if operand is not None}
    _rewrite(graph, attention, [*[split.inputs[0]] * 3, *attention.inputs[3:]], **columns)
    return True


def _rewrite(graph: ir.Graph, attention: ir.Node, inputs: list[ir.Value | None], **attributes: int) -> None:
    """Give the attention other inputs and more attributes; remove ops that become unread."""
    read = list(attention.inputs)
    kept: dict[str, Any] = {attribute.name: attribute.value for attribute in attention.attributes.values()}
    outputs = list(attention.outputs)
    new = make_node("PagedAttention", attention.name or "", inputs, outputs, domain="ingot", **{**kept, **attributes})
    replace_nodes(graph, attention, [attention], [new], {outputs[0]: new.outputs[0]})
    for value in read:
        _drop_unread(graph, value)


def _drop_unread(graph: ir.Graph, value: ir.Value | None) -> None:
    """Remove the op that makes the value, and those before it, if they are absorbed ops without readers."""
    node = value.producer() if value is not None else None
    if node is None or node.graph is not graph or node.op_type not in _ABSORBED:
        return
    if any(output.uses() or output.is_graph_output() for output in node.outputs):
        return
    before = list(node.inputs)
    graph.remove(node, safe=True)
    for source in before:
        _drop_unread(graph, source)
