"""Finds who writes the residual stream and who reads it, by walking the graph: no names, and any number of branches.

    writers    embedding rows Gather(E, input_ids), linear layers Gemm(y, W, b?, transB=1) whose result is added to it
    readers    linear layers on the stream itself, or on RMSNormalization(stream, w), or on rows gathered from these
    between    Add, Gather of rows, Mul and Div by one number (per token or for all)

All values that are added to one another, directly or not, are one stream. Whatever commutes with a rotation of the
channels may stand in it; anything else is a Refusal that names the node: a LayerNorm (it subtracts the mean), a norm
whose weight stands between a linear layer and the stream (the post-norms of Gemma 2, Gemma 3 and OLMo 2) unless all
its elements are equal, a norm weight that is computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ingot.passes.rewriting import Refusal
from ingot.passes.stored_weights import stored_value
from ingot.passes.weight_sites import apply_to_array
from ingot.passes.weight_values import is_stored


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
