"""The layers of a graph: the nodes between those values of the residual stream that two attentions read.

    h0 = Gather(E, input_ids), scaled or not
    h1 = Add(h0, branch), h2 = Add(h1, branch), ...        the chain: each value adds a branch to the one before

A layer begins at the value of the chain that its attention reads, through a norm or not, and ends where the next one
begins; the last one ends with the chain. Branches may be many, parallel or in sequence.

Block influence of a layer (Men et al., ShortGPT, arXiv:2403.03853): 1 - cos(input, output), the mean over tokens.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.calibration import Calibration, CalibrationStage
from ingot.passes.rewriting import attentions
from ingot.passes.weights import drop_if_unused, is_embedding, is_stored

_NUMBER = re.compile(r"\blayers\.(\d+)(?=\.)")


@dataclass(frozen=True)
class ResidualLayer:
    """One attention and all nodes after it up to the next.

    branches    values that are added to `start`, in order, to make `end`
    nodes       all nodes between `start` and `end`, in graph order
    """

    attention: ir.Node
    start: ir.Value
    end: ir.Value
    branches: tuple[ir.Value, ...]
    nodes: tuple[ir.Node, ...]


def residual_layers(graph: ir.Graph) -> list[ResidualLayer]:
    """All layers in order. PassError when the graph is not a chain of residual additions with one attention each."""
    chain, branches = _chain(graph)
    place = {value: index for index, value in enumerate(chain)}
    begins = {_begin(node, place): node for node in attentions(graph)}
    if len(begins) != len(attentions(graph)):
        raise PassError(
            "two attentions read the same value of the residual stream, so that layers cannot be told apart; run this "
            "pass before fuse-residual-norm"
        )
    layers = []
    for first, last in pairwise([*sorted(begins), len(chain) - 1]):
        nodes = tuple(_between(graph, chain[first], chain[last]))
        parts = tuple(branches[first:last])
        layers.append(ResidualLayer(begins[first], chain[first], chain[last], parts, nodes))
    return layers


def _chain(graph: ir.Graph) -> tuple[list[ir.Value], list[ir.Value]]:
    """Values of the residual stream, and the branch that is added to each but the last."""
    embedding = next((node for node in graph if is_embedding(node)), None)
    if embedding is None:
        raise PassError("no Gather reads input_ids, so there is no residual stream")
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
    """Index in the chain of the value that the attention's inputs are computed from."""
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
        raise PassError(
            f"attention {attention.name!r} reads {len(found)} values of the residual stream; it must read one"
        )
    return found.pop()


def _between(graph: ir.Graph, start: ir.Value, end: ir.Value) -> Iterator[ir.Node]:
    """Nodes that depend on `start` and that `end` depends on, in graph order."""
    needed: set[ir.Node] = set()
    waiting = [end.producer()]
    while waiting:
        node = waiting.pop()
        if node is None or node in needed or start in node.outputs:
            continue
        needed.add(node)
        waiting += [value.producer() for value in node.inputs if value is not None and value is not start]
    depending = {start}
    for node in graph:
        if node in needed and depending.intersection(value for value in node.inputs if value is not None):
            depending.update(node.outputs)
            yield node


def _is_addition(node: ir.Node) -> bool:
    return node.op_type == "Add" and not any(value is None or is_stored(value) for value in node.inputs)


def block_influence(
    model: ir.Model,
    layers: Sequence[ResidualLayer],
    calibration: Calibration,
    tokens: int,
    report: Callable[[int], None],
) -> list[float]:
    """The influence of each layer on about `tokens` calibration tokens; calls `report` with the number done."""
    influence: list[float] = []
    for stage in calibration.stages(model):
        here = [layer for layer in layers[len(influence) :] if _begins(stage, layer)]
        if here:
            influence += _of_stage(stage, here, tokens)
            report(len(influence))
        if len(influence) == len(layers):
            break
    return influence


def _of_stage(stage: CalibrationStage, layers: Sequence[ResidualLayer], tokens: int) -> list[float]:
    """Influence of these layers: measured, or as an interrupted build recorded it."""
    arrays = stage.recorded()
    if arrays is None:
        arrays = {"influence": np.array([_influence(stage, layer, tokens) for layer in layers])}
        stage.record(arrays)
    return [float(value) for value in arrays["influence"]]


def _begins(stage: CalibrationStage, layer: ResidualLayer) -> bool:
    """Whether the stage has linear layers of the layer; the first such stage has all values that the layer reads."""
    return any(node in layer.nodes for group in stage.groups for node in group.linears)


def _influence(stage: CalibrationStage, layer: ResidualLayer, tokens: int) -> float:
    """Block influence; the layer's input is its output less its branches."""
    after, *branches = stage.block(layer.nodes, [layer.end, *layer.branches], tokens)({})
    end = after.astype(np.float64)
    start = end - np.sum(branches, axis=0, dtype=np.float64)
    lengths = np.linalg.norm(start, axis=1) * np.linalg.norm(end, axis=1)
    cosines = np.einsum("tc,tc->t", start, end) / np.maximum(lengths, 1e-30)
    return float(1 - cosines.mean())


def drop_layers(graph: ir.Graph, layers: Sequence[ResidualLayer], kept: Sequence[int]) -> None:
    """Keep the layers of these indices; readers of a removed layer's output read its input instead.

    The kept layers are renumbered in the attentions' attribute `layer`, and in "layers.<n>." of the names of nodes,
    values and weights.
    """
    numbers = {_number(layers[old].attention): new for new, old in enumerate(kept)}
    for index in reversed([index for index in range(len(layers)) if index not in set(kept)]):
        end = layers[index].end
        ir.convenience.replace_all_uses_with(end, layers[index].start)
        drop_if_unused(graph, end)
    for index in kept:
        attention = layers[index].attention
        attention.attributes["layer"] = ir.AttrInt64("layer", numbers[_number(attention)])
    _rename(graph, numbers)


def _number(attention: ir.Node) -> int:
    number = attention.attributes.get_int("layer")
    assert number is not None, attention.name
    return number


def _rename(graph: ir.Graph, numbers: dict[int, int]) -> None:
    """Rename from the first layer to the last: a new number is the old one, or a smaller one that is already free."""

    def renamed(name: str | None) -> str | None:
        return None if name is None else _NUMBER.sub(lambda found: f"layers.{numbers[int(found[1])]}", name)

    for value in list(graph.initializers.values()):
        if renamed(value.name) != value.name:
            value.name = renamed(value.name)
    for node in graph:
        node.name = renamed(node.name)
        for value in node.outputs:
            value.name = renamed(value.name)
