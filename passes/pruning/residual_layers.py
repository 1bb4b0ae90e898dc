"""Which part of a graph is a layer: what lies between the values of the residual stream that two attentions read.

    h0 = Gather(E, input_ids), scaled or not
    h1 = Add(h0, branch), h2 = Add(h1, branch), ...        the chain: each value the sum of the one before and a branch

A layer begins at the value of the chain that its attention reads, through a norm or not, and ends where the next one's
begins; the last one ends with the chain. Branches may be many, side by side or one behind the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.weight_values import is_stored


@dataclass(frozen=True)
class ResidualLayer:
    """One attention with all that stands behind it up to the next.

    branches    what is added to `start`, in order, to give `end`
    nodes       all nodes between `start` and `end`, in graph order
    """

    attention: ir.Node
    start: ir.Value
    end: ir.Value
    branches: tuple[ir.Value, ...]
    nodes: tuple[ir.Node, ...]


def residual_layers(graph: ir.Graph) -> list[ResidualLayer]:
    """All layers in order. PassError where the graph is no chain of residual additions with one attention each."""
    chain, branches = _chain(graph)
    place = {value: index for index, value in enumerate(chain)}
    begins = {_begin(node, place): node for node in graph if node.op_type == "PagedAttention"}
    if len(begins) != sum(node.op_type == "PagedAttention" for node in graph):
        raise PassError(
            "two attentions read the same value of the residual stream, so they are no layers of their own; run this "
            "pass before fuse-residual-norm"
        )
    layers = []
    for first, last in pairwise([*sorted(begins), len(chain) - 1]):
        nodes = tuple(_between(graph, chain[first], chain[last]))
        parts = tuple(branches[first:last])
        layers.append(ResidualLayer(begins[first], chain[first], chain[last], parts, nodes))
    return layers


def _chain(graph: ir.Graph) -> tuple[list[ir.Value], list[ir.Value]]:
    """Values of the residual stream, and what is added to each but the last."""
    embedding = next((node for node in graph if _reads_ids(node)), None)
    if embedding is None:
        raise PassError("input_ids is looked up in no table, so there is no residual stream")
    value = embedding.outputs[0]
    scaled = value.consumers()
    if len(scaled) == 1 and scaled[0].op_type == "Mul":
        value = scaled[0].outputs[0]
    chain, branches = [value], []
    while additions := [node for node in value.consumers() if _is_addition(node)]:
        if len(additions) > 1:
            raise PassError(f"node {additions[1].name!r} adds to a value that {additions[0].name!r} adds to as well")
        first, second = additions[0].inputs
        branch = second if first is value else first
        assert branch is not None
        branches.append(branch)
        value = additions[0].outputs[0]
        chain.append(value)
    return chain, branches


def _begin(attention: ir.Node, place: dict[ir.Value, int]) -> int:
    """Where in the chain the attention's inputs come from."""
    waiting, seen, found = [value for value in attention.inputs if value is not None], set(), set()
    while waiting:
        value = waiting.pop()
        producer = value.producer()
        if value in place:
            found.add(place[value])
        elif producer is not None and producer not in seen:
            seen.add(producer)
            waiting += [operand for operand in producer.inputs if operand is not None]
    if len(found) != 1:
        raise PassError(f"attention {attention.name!r} reads {len(found)} values of the residual stream; one is wanted")
    return found.pop()


def _between(graph: ir.Graph, start: ir.Value, end: ir.Value) -> Iterator[ir.Node]:
    """Nodes that depend on `start` and on which `end` depends, with the stored operands' Casts among what they read."""
    wanted: set[ir.Node] = set()
    waiting = [end.producer()]
    while waiting:
        node = waiting.pop()
        if node is None or node in wanted or start in node.outputs:
            continue
        wanted.add(node)
        waiting += [value.producer() for value in node.inputs if value is not None and value is not start]
    depending = {start}
    for node in graph:
        if node in wanted and depending.intersection(value for value in node.inputs if value is not None):
            depending.update(node.outputs)
            yield node


def _is_addition(node: ir.Node) -> bool:
    return node.op_type == "Add" and not any(value is None or is_stored(value) for value in node.inputs)


def _reads_ids(node: ir.Node) -> bool:
    indices = node.inputs[1] if node.op_type == "Gather" else None
    return indices is not None and indices.is_graph_input() and indices.name == "input_ids"
