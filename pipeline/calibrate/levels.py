"""The order in which linear layers can run: a level is what comes after one more of them.

    level 0    embedding, first norm          level 1    q, k, v, rope, attention       level 2    o, residual, norm ...

A node's level is the number of Gemms on the longest path to it, itself included. So the Gemms of a level read nothing
of their own level, and running the levels in order runs every node once.

What does not depend on the tokens' ids (positions, a norm weight plus one) has no level: it is shared, and whoever
reads it makes it again.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from ingot.passes.calibration import LinearGroup


@dataclass(frozen=True)
class Level:
    """Nodes of one level in graph order, and its linear layers by the value that they read."""

    nodes: tuple[ir.Node, ...]
    groups: tuple[LinearGroup, ...]


def shared_nodes(graph: ir.Graph) -> frozenset[ir.Node]:
    """Nodes that depend on constants, position_ids and logits_indices alone."""
    depending = {value for value in graph.inputs if value.name == "input_ids"}
    shared = []
    for node in graph:
        if any(value in depending for value in node.inputs if value is not None):
            depending.update(node.outputs)
        else:
            shared.append(node)
    return frozenset(shared)


def levels(graph: ir.Graph, shared: frozenset[ir.Node]) -> list[Level]:
    """All levels in order."""
    by_level: dict[int, list[ir.Node]] = {}
    level_of: dict[ir.Value, int] = {}
    for node in graph:
        if node in shared:
            continue
        level = max((level_of.get(value, 0) for value in node.inputs if value is not None), default=0)
        level += node.op_type == "Gemm"
        level_of.update(dict.fromkeys(node.outputs, level))
        by_level.setdefault(level, []).append(node)
    return [Level(tuple(by_level[level]), _groups(by_level[level])) for level in sorted(by_level)]


def _groups(nodes: Iterable[ir.Node]) -> tuple[LinearGroup, ...]:
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in nodes:
        if node.op_type == "Gemm" and node.inputs[0] is not None:
            readers.setdefault(node.inputs[0], []).append(node)
    return tuple(LinearGroup(source, tuple(linears)) for source, linears in readers.items())
