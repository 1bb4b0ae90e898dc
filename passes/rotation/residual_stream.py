"""The residual stream of a graph, and a rotation of it folded into the weights that write and read it.

    writers    embedding rows Gather(E, input_ids); linear layers Gemm(y, W, b?, transB=1) whose result is added to it
    readers    linear layers on the stream itself, on RMSNormalization(stream, w), or on rows gathered from these
    between    Add, Gather of rows, Mul and Div by one number (per token or for all)

All values that are added to one another, directly or not, are one stream. It is found by walking the graph, without
names. Only ops that commute with a rotation of the channels may be between; any other is a Refusal that names the node:
a LayerNorm (it subtracts the mean); a norm between a linear layer and the stream (the post-norms of Gemma 2, Gemma 3
and OLMo 2) unless all elements of its weight are equal; a computed norm weight.

A turn of a weight says whether its columns or rows are rotated, and which norm's weight is multiplied into the columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ingot.passes.numerics.hadamard import Rotation, of_columns, of_rows
from ingot.passes.rewriting import Refusal, required_input
from ingot.passes.weights import (
    apply_to_array,
    change_stored,
    float32_values,
    is_embedding,
    is_stored,
    readers,
    separate_copy,
    stored_value,
)

HEAD = "lm_head.weight"  # tensor of a head that is separated from the embedding's
_ALL = slice(None)


class _RefusedError(Exception):
    def __init__(self, node: ir.Node | None, reason: str) -> None:
        self.refusal = Refusal((node.name or "") if node is not None else "", reason)


@dataclass
class ResidualStream:
    """The stream and the nodes that write and read it, in the order in which they are found.

    embeddings    Gather nodes that make its first value
    writers       Gemm nodes whose result is added to it
    readers       Gemm nodes that read it -> the norm between, or None
    values        values of the stream, an ordered set
    """

    embeddings: list[ir.Node] = field(default_factory=list)
    writers: list[ir.Node] = field(default_factory=list)
    readers: dict[ir.Node, ir.Node | None] = field(default_factory=dict)
    values: dict[ir.Value, None] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Number of channels."""
        shape = next(iter(self.values)).shape
        assert shape is not None
        assert isinstance(shape[-1], int)
        return shape[-1]

    @property
    def norms(self) -> list[ir.Node]:
        """Norms between the stream and its readers, without duplicates."""
        return list(dict.fromkeys(norm for norm in self.readers.values() if norm is not None))


def find_residual_stream(graph: ir.Graph) -> ResidualStream | Refusal:
    """Find the stream that begins with the embedding; a Refusal where it cannot be rotated."""
    starts = [node.outputs[0] for node in graph if is_embedding(node)]
    if not starts:
        return Refusal("input_ids", "is not read by a Gather, so there is no residual stream")
    stream = ResidualStream()
    waiting = starts
    try:
        while waiting:
            value = waiting.pop(0)
            if value in stream.values:
                continue
            stream.values[value] = None
            waiting += [*_visit_maker(stream, value), *_visit_readers(stream, value)]
    except _RefusedError as refused:
        return refused.refusal
    return stream


def is_uniform(norm: ir.Node) -> bool:
    """Whether all elements of a norm's stored weight are equal; then it commutes with any rotation."""
    stored = stored_value(norm.inputs[1])
    if stored is None or stored.const_value is None:
        return False
    return apply_to_array(stored.const_value, lambda values: bool(np.all(values == values.flat[0])))


def _visit_maker(stream: ResidualStream, value: ir.Value) -> Iterator[ir.Value]:
    """Classify the node that makes a value of the stream; yield its inputs that belong to the stream too."""
    node = value.producer()
    if node is None:
        raise _RefusedError(None, f"the residual stream holds {value.name!r}, which no node makes")
    if is_embedding(node):
        stream.embeddings.append(node)
    elif node.op_type == "Gemm":
        stream.writers.append(node)
    elif node.op_type == "RMSNormalization":
        if not is_uniform(node):
            raise _RefusedError(node, "writes to the residual stream through a norm weight of unequal elements")
        yield required_input(node, 0)
    else:
        yield from _passed_through(node, value)


def _visit_readers(stream: ResidualStream, value: ir.Value) -> Iterator[ir.Value]:
    """Classify the nodes that read a value of the stream; yield their values that belong to the stream too."""
    if value.is_graph_output():
        raise _RefusedError(value.producer(), "makes the residual stream a graph output")
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
    """The inputs, of the stream, of a node that commutes with a rotation of the channels."""
    if node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0 and value is not node.inputs[1]:
        yield required_input(node, 0)
    elif node.op_type == "Add" and not any(is_stored(required_input(node, index)) for index in (0, 1)):
        yield from (required_input(node, 0), required_input(node, 1))
    elif node.op_type in ("Mul", "Div"):
        factors = [required_input(node, index) for index in (0, 1)]
        scaled = [factor for factor in factors if not _is_one_number(factor)]
        if len(scaled) != 1 or (node.op_type == "Div" and scaled[0] is factors[1]):
            raise _RefusedError(node, "multiplies the residual stream channel by channel")
        yield scaled[0]
    else:
        why = ", which is fused: put rotate before" if node.op_type.startswith("Skip") else ""
        raise _RefusedError(node, f"does not commute with a rotation of the residual stream ({node.op_type}{why})")


def _read_normed(stream: ResidualStream, norm: ir.Node) -> None:
    """Find the linear layers that read a norm, or rows gathered from its result."""
    if norm.attributes.get_int("axis", -1) != -1:
        raise _RefusedError(norm, "norms over more than the channels")
    if stored_value(norm.inputs[1]) is None:
        raise _RefusedError(norm, "has a computed weight; put fold-constants before")
    waiting = [norm.outputs[0]]
    while waiting:
        value = waiting.pop()
        if value.is_graph_output():
            raise _RefusedError(norm, "makes a graph output")
        for use in value.uses():
            if use.node.op_type == "Gemm" and use.idx == 0:
                stream.readers[use.node] = norm
            elif use.node.op_type == "Gather" and use.idx == 0 and use.node.attributes.get_int("axis", 0) == 0:
                waiting.append(use.node.outputs[0])
            else:
                raise _RefusedError(use.node, "reads a norm of the residual stream and is not a linear layer")


def _is_one_number(value: ir.Value) -> bool:
    """A scalar, or one number for each token."""
    return value.shape is not None and (len(value.shape) == 0 or value.shape[-1] == 1)


@dataclass(frozen=True)
class _Turn:
    """The change of a weight for one reader: rotate its columns, times a norm's weight if there is one, or its rows."""

    columns: bool = False
    rows: bool = False
    norm: ir.Node | None = None


Turns = dict[ir.Value, dict[ir.Node, _Turn]]  # stored weight -> its readers


def plan_turns(stream: ResidualStream) -> Turns | Refusal:
    """Plan the turn of each weight that writes or reads the stream; a Refusal for the first that cannot be changed."""
    turns: Turns = {}
    for node, index, turn in _single_turns(stream):
        stored = stored_value(node.inputs[index])
        if stored is None:
            return Refusal(node.name or "", "has a weight that is computed or quantized; rotate before quantizing")
        turns.setdefault(stored, {})[node] = turn
    for stored, by_node in turns.items():
        refusal = _why_not_shared(stored, by_node, stream)
        if refusal is not None:
            return refusal
    norms = set(_weighted_norms(stream))
    for norm in norms:
        stored = stored_value(norm.inputs[1])
        if stored is None or not norms.issuperset(node for node, _ in readers(stored)):
            return Refusal(norm.name or "", "shares its weight with a node that is not a norm of the residual stream")
    return turns


def turn_stream(graph: ir.Graph, stream: ResidualStream, turns: Turns, rotation: Rotation) -> int:
    """Change every weight; return the bytes of a head separated from the embedding's tensor, or 0."""
    added = _separate_heads(graph, turns)
    for stored, by_node in turns.items():
        turn = next(iter(by_node.values()))
        if turn.columns:
            scale = None if turn.norm is None else float32_values(required_input(turn.norm, 1))
            change_stored(graph, stored, of_columns(rotation, scale))
        if turn.rows:
            change_stored(graph, stored, of_rows(rotation, _ALL))
    for weight in dict.fromkeys(stored_value(norm.inputs[1]) for norm in _weighted_norms(stream)):
        assert weight is not None
        change_stored(graph, weight, np.ones_like)
    return added


def _single_turns(stream: ResidualStream) -> list[tuple[ir.Node, int, _Turn]]:
    """Reader, operand index and turn of every weight that writes or reads the stream."""
    weighted = set(_weighted_norms(stream))
    found = [(node, 0, _Turn(columns=True)) for node in stream.embeddings]
    for node in dict.fromkeys([*stream.writers, *stream.readers]):
        norm, writes = stream.readers.get(node), node in stream.writers
        found.append((node, 1, _Turn(node in stream.readers, writes, norm if norm in weighted else None)))
        if writes and len(node.inputs) > 2:
            found.append((node, 2, _Turn(rows=True)))
    return found


def _weighted_norms(stream: ResidualStream) -> list[ir.Node]:
    """Norms whose weight must be folded. Weights of equal elements commute with the rotation and stay."""
    return [norm for norm in stream.norms if not is_uniform(norm)]


def _why_not_shared(stored: ir.Value, by_node: dict[ir.Node, _Turn], stream: ResidualStream) -> Refusal | None:
    """Return why a weight cannot be turned: a reader outside the stream, or readers that need different turns.

    An embedding may differ from the heads that share its tensor: these get a copy.
    """
    nodes = [node for node, _ in readers(stored)]
    stranger = next((node for node in nodes if node not in by_node), None)
    if stranger is not None:
        return Refusal(stranger.name or "", f"also reads {stored.name!r}, which the rotation would change")
    linears = {turn for node, turn in by_node.items() if node not in stream.embeddings}
    if len(set(by_node.values())) == 1 or (len(linears) == 1 and not next(iter(linears)).rows):
        return None
    return Refusal(nodes[0].name or "", f"shares {stored.name!r} with layers that need another rotation of it")


def _separate_heads(graph: ir.Graph, turns: Turns) -> int:
    """Give linear layers that share the embedding's tensor, but fold a norm's weight into it, a tensor of their own."""
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
