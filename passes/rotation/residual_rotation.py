"""Folds a rotation of the residual stream into the weights beside it, and norm weights into the layers behind them."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ingot.passes.rewriting import Refusal
from ingot.passes.rotation.residual_stream import ResidualStream, is_uniform
from ingot.passes.rotation.rotations import Rotation, of_columns, of_rows
from ingot.passes.stored_weights import change_stored, readers, separate_copy, stored_value
from ingot.passes.weight_values import float32_values

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
