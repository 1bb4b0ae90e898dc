"""Marks of the checkpoint's linear layers that a Gemm computes, for adapters that are added when the model runs.

    node.metadata_props["ingot.projections"]    [["model.layers.0.self_attn.q_proj", 256], ...]: names and rows

The importer marks each Gemm of a whole weight. A pass that packs layers joins their marks; one that changes what a
layer computes, other than by rounding, takes the mark away, which `change_stored` does by itself.
"""

import json
from collections.abc import Iterable, Sequence

import onnx_ir as ir

_KEY = "ingot.projections"
Marks = Sequence[tuple[str, int]]


def mark_projections(node: ir.Node, marks: Marks) -> None:
    """Say which modules make the node's output, and the rows of each."""
    node.metadata_props[_KEY] = json.dumps(list(marks))


def projections_of(node: ir.Node) -> list[tuple[str, int]]:
    """Modules and rows, in the order of the node's output; empty where that is not known."""
    return [(module, rows) for module, rows in json.loads(node.metadata_props.get(_KEY, "[]"))]


def forget_projections(nodes: Iterable[ir.Node]) -> None:
    """Remove the marks of nodes that no longer compute the layers of these names."""
    for node in nodes:
        node.metadata_props.pop(_KEY, None)


def join_projections(parts: Sequence[ir.Node], packed: ir.Node) -> None:
    """Mark a node that computes all the parts, one after another, if all of them are marked."""
    marks = [projections_of(part) for part in parts]
    if all(marks):
        mark_projections(packed, [mark for of_part in marks for mark in of_part])
