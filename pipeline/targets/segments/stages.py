"""Splits a graph into the stages that run in turn: segments for another engine, single nodes for Ingot's kernels.

    embedding gather | norm, qkv | attention | o_proj ... qkv | attention | ... | gather of logits rows | norm, head

Each target decides by an `IsKernel` which nodes its kernels compute. All other nodes of one depth between two kernels
form one segment. Nodes that do not depend on tokens (the row of position_ids, weights) belong to no stage: every
segment that reads one computes it itself.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from ingot.passes.quantization.activation_nodes import ACTIVATIONS_KEY, dequantizer

ATTENTION = "PagedAttention"
_TOKEN_INPUTS = ("input_ids", "logits_indices")


@dataclass(frozen=True)
class KernelStage:
    """One node that a kernel computes."""

    node: ir.Node


@dataclass(frozen=True)
class SegmentStage:
    """Nodes of one segment in graph order, and those of their results that other stages or the model's caller read."""

    nodes: tuple[ir.Node, ...]
    outputs: tuple[ir.Value, ...]


Stage = KernelStage | SegmentStage
IsKernel = Callable[[ir.Node], bool]


def split_stages(graph: ir.Graph, is_kernel: IsKernel) -> list[Stage]:
    """Return the stages in an order in which they can run."""
    live = _live(graph, is_kernel)
    depths = _depths([node for node in graph if node in live], is_kernel)
    by_depth: dict[int, list[ir.Node]] = defaultdict(list)
    for node, depth in depths.items():
        by_depth[depth].append(node)
    readers: dict[ir.Value, list[ir.Node]] = defaultdict(list)
    for node in depths:
        for value in _token_inputs(node, is_kernel):
            readers[value].append(node)
    stages: list[Stage] = []
    for depth in sorted(by_depth):
        if depth % 2:
            stages += map(KernelStage, by_depth[depth])
        else:
            stages.append(_segment(by_depth[depth], readers))
    return stages


def is_attention_or_token_gather(node: ir.Node) -> bool:
    """Report whether a node is an attention, the embedding's gather, or the gather of the rows that need logits."""
    if node.op_type == "Gather":
        indices = node.inputs[1]
        return indices is not None and indices.is_graph_input() and indices.name in _TOKEN_INPUTS
    return node.op_type == ATTENTION


def depends_on_tokens(value: ir.Value) -> bool:
    """Report whether a value is computed from input_ids, or from rows chosen by logits_indices."""
    producer = value.producer()
    if producer is None:
        return False
    waiting, seen = [producer], {producer}
    while waiting:
        node = waiting.pop()
        if is_attention_or_token_gather(node):
            return True
        before = {source.producer() for source in node.inputs if source is not None}
        new = {made for made in before if made is not None} - seen
        waiting += new
        seen |= new
    return False


def unquantized(dequantize: ir.Node) -> ir.Value:
    """Return the activations that a DequantizeLinear's codes were made from."""
    codes = dequantize.inputs[0]
    assert codes is not None
    quantize = codes.producer()
    assert quantize is not None
    assert quantize.inputs[0] is not None
    return quantize.inputs[0]


def _token_inputs(node: ir.Node, is_kernel: IsKernel) -> Iterator[ir.Value]:
    """Inputs that depend on tokens; for quantized activations the unquantized ones, which each reader quantizes."""
    dequantize = dequantizer(node) if node.op_type == "Gemm" and not is_kernel(node) else None
    if dequantize is None and node.op_type == "DequantizeLinear" and ACTIVATIONS_KEY in node.metadata_props:
        dequantize = node
    if dequantize is not None:
        yield unquantized(dequantize)
        return
    for value in dict.fromkeys(node.inputs):
        if value is not None and depends_on_tokens(value):
            yield value


def _live(graph: ir.Graph, is_kernel: IsKernel) -> set[ir.Node]:
    """Nodes that the outputs depend on, without the quantization of activations."""
    live: set[ir.Node] = set()
    waiting = [value.producer() for value in graph.outputs]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in live:
            live.add(node)
            waiting += [value.producer() for value in _token_inputs(node, is_kernel)]
    return live


def _depths(nodes: list[ir.Node], is_kernel: IsKernel) -> dict[ir.Node, int]:
    """Depth of every node: odd for kernels, even for segments, and never less than the depth of an input."""
    depths: dict[ir.Node, int] = {}
    for node in nodes:
        before = [value.producer() for value in _token_inputs(node, is_kernel)]
        least = max((depths[made] for made in before if made is not None), default=0)
        depths[node] = least + (2 if least % 2 else 1) if is_kernel(node) else least + least % 2
    return depths


def _segment(nodes: list[ir.Node], readers: dict[ir.Value, list[ir.Node]]) -> SegmentStage:
    inside = set(nodes)
    made = [value for node in nodes for value in node.outputs]
    outputs = [value for value in made if value.is_graph_output() or any(r not in inside for r in readers[value])]
    return SegmentStage(tuple(nodes), tuple(outputs))
