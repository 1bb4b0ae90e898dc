"""The pass partition-at-attention: assigns every node to the segment of the program that runs it.

    segment 0 | PagedAttention | segment 1 | GatedDeltaRule | segment 2 ...

A program is cut at attentions and at recurrent ops (recurrent_ops.py), which the runtime computes. A node's segment is
the number of these cuts on the longest path to it; a cut has the number of the segment before it. The number is stored
in node.metadata_props["ingot.segment"]; no value changes.

Ops that depend only on positions and constants (the row of position_ids, a norm weight plus one) are cheap and read in
many segments. Each segment that reads one gets a copy, <name>.segment-<number>, so that only the residual stream and
the attention's operands pass between segments.

Ensures: a value that passes between segments is float32 or int64, [rows] or [rows, columns] with a fixed number of
columns.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.base import Pass, PassKind
from ingot.passes.recurrent_ops import RECURRENT_OPS

SEGMENT_KEY = "ingot.segment"  # node.metadata_props: number of the segment, as text
ATTENTION = "PagedAttention"
CUTS = (ATTENTION, *RECURRENT_OPS)

Segments = dict[ir.Node, int]


@dataclass(frozen=True)
class PartitionAtAttention(Pass):
    """No options: a program is cut at every attention and recurrent op, and only there."""

    name: ClassVar[str] = "partition-at-attention"
    kind: ClassVar[PassKind] = "lowering"
    summary: ClassVar[str] = "Assigns every node to the segment between two attentions or recurrent ops that runs it."

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Copy the cheap shared ops, then number the nodes."""
        segments = _longest_paths(model.graph)
        modified = _copy_shared(model.graph, segments)
        for node in model.graph:
            number = str(segments[node])
            modified |= node.metadata_props.get(SEGMENT_KEY) != number
            node.metadata_props[SEGMENT_KEY] = number
        return ir.passes.PassResult(model, modified)

    def ensures(self, model: ir.Model) -> None:
        """Every crossing value has a dtype and shape that the runtime can hold in a buffer."""
        for value in crossing_values(model.graph):
            if value.dtype not in (ir.DataType.FLOAT, ir.DataType.INT64):
                raise PassError(f"{value.name!r} crosses a cut as {value.dtype}; only float32 and int64 may")
            shape = list(value.shape or ())
            if len(shape) not in (1, 2) or (len(shape) == 2 and not isinstance(shape[1], int)):
                raise PassError(f"{value.name!r} crosses a cut as {shape}; only [rows] and [rows, columns] may")


def segment_of(node: ir.Node) -> int:
    """The node's segment; PassError when the pass did not run."""
    number = node.metadata_props.get(SEGMENT_KEY)
    if number is None:
        raise PassError(f"{node.name!r} is in no segment; run partition-at-attention after the last other pass")
    return int(number)


def crossing_values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Values that pass between segments, or between a segment and a cut."""
    for node in graph:
        for value in node.outputs:
            if any(_step(reader) != _step(node) for reader in value.consumers()):
                yield value


def _step(node: ir.Node) -> tuple[int, str]:
    return segment_of(node), (node.name or "") if node.op_type in CUTS else ""


def _longest_paths(graph: ir.Graph) -> Segments:
    segments: Segments = {}
    for node in graph:
        producers = [value.producer() for value in node.inputs if value is not None]
        before = [segments[made] + (made.op_type in CUTS) for made in producers if made is not None]
        segments[node] = max(before, default=0)
    return segments


def _copy_shared(graph: ir.Graph, segments: Segments) -> bool:
    """Give each segment its own copy of every node that depends on no token; add the copies to `segments`."""
    free = _free_of_tokens(graph)
    copied = False
    for node in reversed(list(graph)):
        reading = sorted({segments[reader] for value in node.outputs for reader in value.consumers()})
        if node not in free or not reading:
            continue
        segments[node] = reading[0]
        for segment in reading[1:]:
            segments[_copy_for(graph, node, segment, segments)] = segment
            copied = True
    return copied


def _free_of_tokens(graph: ir.Graph) -> set[ir.Node]:
    """Nodes that depend on neither input_ids nor a cut, and do not make an output of the graph."""
    free: set[ir.Node] = set()
    for node in graph:
        is_output = any(value.is_graph_output() for value in node.outputs)
        if not is_output and all(_is_free(value, free) for value in node.inputs if value is not None):
            free.add(node)
    return free


def _is_free(value: ir.Value, free: Iterable[ir.Node]) -> bool:
    producer = value.producer()
    if producer is not None:
        return producer in free
    return value.name != "input_ids"


def _copy_for(graph: ir.Graph, node: ir.Node, segment: int, segments: Segments) -> ir.Node:
    """Copy a node for its readers in one segment."""
    suffix = f".segment-{segment}"
    outputs = [ir.Value(name=f"{value.name}{suffix}", type=value.type, shape=value.shape) for value in node.outputs]
    attributes = list(node.attributes.values())
    copy = ir.Node(node.domain, node.op_type, node.inputs, attributes, outputs=outputs, name=f"{node.name}{suffix}")
    graph.insert_after(node, copy)
    for old, new in zip(node.outputs, outputs, strict=True):
        for reader, index in list(old.uses()):
            if segments[reader] == segment:
                reader.replace_input_with(index, new)
    return copy
