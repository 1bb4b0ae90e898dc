"""Finds who writes the residual stream and who reads it, by walking the graph: no names, and any number of branches.

    writers    embedding rows Gather(E, input_ids), linear layers Gemm(y, W, b?, transB=1) whose result is added to it
    readers    linear layers on the stream itself, or on RMSNormalization(stream, w), or on rows gathered from these
    between    Add, Gather of rows, Mul and Div by one number (per token or for all)

All values that are added to one another, directly or not, are one stream. Whatever commutes with a rotation of the
channels may stand in it; anything else is a Refusal that names the node: a LayerNorm (it subtracts the mean), a norm
whose weight stands between a linear layer and the stream (the post-norms of Gemma 2, Gemma 3 and OLMo 2) unless all
its elements are equal, a norm weight that is computed.

Folds a rotation of the residual stream into the weights beside it, and norm weights into the layers behind them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ingot.passes.numerics.hadamard import Rotation, of_columns, of_rows
from ingot.passes.rewriting import Refusal
from ingot.passes.weights import (
    apply_to_array,
    change_stored,
    float32_values,
    is_stored,
    readers,
    separate_copy,
    stored_value,
)


class _RefusedError(Exception):
    def __init__(self, node: ir.Node | None, reason: str) -> None:
        self.refusal = Refusal((node.name or "") if node is not None else "", reason)


@dataclass
class ResidualStream:
    """The stream's neighbours, in the order they were found.

    embeddings    Gather nodes whose table's rows are its first values
    writers       Gemm nodes whose result joins it
    readers       Gemm nodes that read it -> the norm between, None where there is none
    values        the stream itself
    """

    embeddings: list[ir.Node] = field(default_factory=list)
    writers: list[ir.Node] = field(default_factory=list)
    readers: dict[ir.Node, ir.Node | None] = field(default_factory=dict)
    values: dict[ir.Value, None] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Channels."""
        shape = next(iter(self.values)).shape
        assert shape is not None
        assert isinstance(shape[-1], int)
        return shape[-1]

    @property
    def norms(self) -> list[ir.Node]:
        """The norms between the stream and its readers, each once."""
        return list(dict.fromkeys(norm for norm in self.readers.values() if norm is not None))


def find_residual_stream(graph: ir.Graph) -> ResidualStream | Refusal:
    """The stream that begins with the embedding of input_ids; a Refusal where it cannot be rotated."""
    starts = [node.outputs[0] for node in graph if _is_embedding(node)]
    if not starts:
        return Refusal("input_ids", "is looked up in no table, so there is no residual stream")
    stream = ResidualStream()
    waiting = starts
    try:
        while waiting:
            value = waiting.pop(0)
            if value in stream.values:
                continue
            stream.values[value] = None
            waiting += [*_behind(stream, value), *_ahead(stream, value)]
    except _RefusedError as refused:
        return refused.refusal
    return stream


def is_uniform(norm: ir.Node) -> bool:
    """Whether all elements of a norm's stored weight are equal; then it commutes with any rotation."""
    stored = stored_value(norm.inputs[1])
    if stored is None or stored.const_value is None:
        return False
    return apply_to_array(stored.const_value, lambda values: bool(np.all(values == values.flat[0])))


def _behind(stream: ResidualStream, value: ir.Value) -> Iterator[ir.Value]:
    """Note what makes a value of the stream, and give what must then be of the stream, too."""
    node = value.producer()
    if node is None:
        raise _RefusedError(None, f"the residual stream holds {value.name!r}, which no node makes")
    if _is_embedding(node):
        stream.embeddings.append(node)
    elif node.op_type == "Gemm":
        stream.writers.append(node)
    elif node.op_type == "RMSNormalization":
        if not is_uniform(node):
            raise _RefusedError(node, "writes to the residual stream through a norm weight, which no rotation passes")
        yield _input(node, 0)
    else:
        yield from _passed_through(node, value)


def _ahead(stream: ResidualStream, value: ir.Value) -> Iterator[ir.Value]:
    """Note what reads a value of the stream, and give what must then be of the stream, too."""
    if value.is_graph_output():
        raise _RefusedError(value.producer(), "gives the residual stream as a graph output")
    for use in value.uses():
        node = use.node
        if node.op_type == "RMSNormalization" and use.idx == 0:
            if node.outputs[0] not in stream.values:
                _read_normed(stream, node)
        elif node.op_type == "Gemm" and use.idx == 0:
            stream.readers[node] = None
        else:
            yield from _passed_through(node, value)
            yield node.outputs[0]


def _passed_through(node: ir.Node, value: ir.Value) -> Iterator[ir.Value]:
    """Inputs of the stream of a node that commutes with a rotation of the channels."""
    if node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0 and value is not node.inputs[1]:
        yield _input(node, 0)
    elif node.op_type == "Add" and not any(is_stored(_input(node, index)) for index in (0, 1)):
        yield from (_input(node, 0), _input(node, 1))
    elif node.op_type in ("Mul", "Div"):
        factors = [_input(node, index) for index in (0, 1)]
        scaled = [factor for factor in factors if not _is_one_number(factor)]
        if len(scaled) != 1 or (node.op_type == "Div" and scaled[0] is factors[1]):
            raise _RefusedError(node, "multiplies the residual stream channel by channel")
        yield scaled[0]
    else:
        why = "which is fused already: rotate comes before" if node.op_type.startswith("Skip") else "unlike a rotation"
        raise _RefusedError(node, f"treats channels of the residual stream apart ({node.op_type}, {why})")


def _read_normed(stream: ResidualStream, norm: ir.Node) -> None:
    """Note the linear layers behind a norm, which may read rows gathered from its result."""
    if norm.attributes.get_int("axis", -1) != -1:
        raise _RefusedError(norm, "norms over more than the channels")
    if stored_value(norm.inputs[1]) is None:
        raise _RefusedError(norm, "has a computed weight; run fold-constants before")
    waiting = [norm.outputs[0]]
    while waiting:
        value = waiting.pop()
        if value.is_graph_output():
            raise _RefusedError(norm, "gives a graph output")
        for use in value.uses():
            if use.node.op_type == "Gemm" and use.idx == 0:
                stream.readers[use.node] = norm
            elif use.node.op_type == "Gather" and use.idx == 0 and use.node.attributes.get_int("axis", 0) == 0:
                waiting.append(use.node.outputs[0])
            else:
                raise _RefusedError(use.node, "reads a norm of the residual stream and is no linear layer")


def _is_embedding(node: ir.Node) -> bool:
    indices = node.inputs[1] if node.op_type == "Gather" else None
    return indices is not None and indices.is_graph_input() and indices.name == "input_ids"


def _is_one_number(value: ir.Value) -> bool:
    """A scalar, or one number for each token."""
    return value.shape is not None and (len(value.shape) == 0 or value.shape[-1] == 1)


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


HEAD = "lm_head.weight"
_ALL = slice(None)


@dataclass(frozen=True)
class _Turn:
    """What a weight's reader wants of it: its columns turned, with a norm's weight in them or not; its rows turned."""

    columns: bool = False
    rows: bool = False
    norm: ir.Node | None = None


Turns = dict[ir.Value, dict[ir.Node, _Turn]]  # stored weight -> its readers beside the stream


def plan_turns(stream: ResidualStream) -> Turns | Refusal:
    """What to do with each weight beside the stream; a Refusal names the first that cannot be changed."""
    turns: Turns = {}
    for node, index, turn in _wanted(stream):
        stored = stored_value(node.inputs[index])
        if stored is None:
            return Refusal(node.name or "", "has a weight that is computed or quantized; rotate comes before")
        turns.setdefault(stored, {})[node] = turn
    for stored, by_node in turns.items():
        refusal = _why_not_shared(stored, by_node, stream)
        if refusal is not None:
            return refusal
    norms = set(_weighted_norms(stream))
    for norm in norms:
        stored = stored_value(norm.inputs[1])
        if stored is None or not norms.issuperset(node for node, _ in readers(stored)):
            return Refusal(norm.name or "", "shares its weight with what is no norm of the residual stream")
    return turns


def turn_stream(graph: ir.Graph, stream: ResidualStream, turns: Turns, rotation: Rotation) -> int:
    """Change every weight; return the bytes of a head that had to part from the embedding's tensor, else 0."""
    added = _separate_heads(graph, turns)
    for stored, by_node in turns.items():
        turn = next(iter(by_node.values()))
        if turn.columns:
            scale = None if turn.norm is None else float32_values(_operand(turn.norm))
            change_stored(graph, stored, of_columns(rotation, scale))
        if turn.rows:
            change_stored(graph, stored, of_rows(rotation, _ALL))
    for weight in dict.fromkeys(stored_value(norm.inputs[1]) for norm in _weighted_norms(stream)):
        assert weight is not None
        change_stored(graph, weight, np.ones_like)
    return added


def _wanted(stream: ResidualStream) -> list[tuple[ir.Node, int, _Turn]]:
    """Reader, operand and turn of every weight beside the stream."""
    weighted = set(_weighted_norms(stream))
    found = [(node, 0, _Turn(columns=True)) for node in stream.embeddings]
    for node in dict.fromkeys([*stream.writers, *stream.readers]):
        norm, writes = stream.readers.get(node), node in stream.writers
        found.append((node, 1, _Turn(node in stream.readers, writes, norm if norm in weighted else None)))
        if writes and len(node.inputs) > 2:
            found.append((node, 2, _Turn(rows=True)))
    return found


def _weighted_norms(stream: ResidualStream) -> list[ir.Node]:
    """Norms whose weight must be folded: equal elements commute with the rotation and stay."""
    return [norm for norm in stream.norms if not is_uniform(norm)]


def _why_not_shared(stored: ir.Value, by_node: dict[ir.Node, _Turn], stream: ResidualStream) -> Refusal | None:
    """A shared weight can be turned when all its readers want the same, or are embeddings and heads that agree."""
    nodes = [node for node, _ in readers(stored)]
    stranger = next((node for node in nodes if node not in by_node), None)
    if stranger is not None:
        return Refusal(stranger.name or "", f"reads {stored.name!r} as well, which the rotation would change")
    linears = {turn for node, turn in by_node.items() if node not in stream.embeddings}
    if len(set(by_node.values())) == 1 or (len(linears) == 1 and not next(iter(linears)).rows):
        return None
    return Refusal(nodes[0].name or "", f"shares {stored.name!r} with layers that need it turned otherwise")


def _separate_heads(graph: ir.Graph, turns: Turns) -> int:
    """Give linear layers that share the embedding's tensor but want a norm's weight in it a tensor of their own."""
    for stored, by_node in list(turns.items()):
        if len(set(by_node.values())) == 1:
            continue
        heads = {node: turn for node, turn in by_node.items() if turn.norm is not None}
        copy = separate_copy(graph, stored, HEAD, [(node, 1) for node in heads])
        turns[copy] = heads
        turns[stored] = {node: turn for node, turn in by_node.items() if node not in heads}
        assert copy.const_value is not None
        return copy.const_value.nbytes
    return 0


def _operand(norm: ir.Node) -> ir.Value:
    weight = norm.inputs[1]
    assert weight is not None
    return weight
