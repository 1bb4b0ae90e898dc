"""A whole graph -> what runs in turn: segments for TensorRT, and single nodes for Ingot's own kernels.

    embedding look-up | norm, qkv | attention | o_proj ... qkv | attention | ... | rows that want logits | norm, head

Kernels take attention, both look-ups, and matmuls whose weights have a form that TensorRT does not fuse. All other
nodes of one depth between two kernels are one segment. Nodes that no token reaches (the row of position_ids, weights)
belong to no stage: each segment that reads one computes it for itself.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from ingot.passes.quantization.activation_quantization import ACTIVATIONS_KEY, dequantizer
from ingot.pipeline.targets.segments.weight_forms import needs_kernel

ATTENTION = "PagedAttention"
_TOKENS = ("input_ids", "logits_indices")


@dataclass(frozen=True)
class KernelStage:
    """One node that a kernel computes."""

    node: ir.Node


@dataclass(frozen=True)
class SegmentStage:
    """Nodes that one plan computes, in graph order, and those of their results that are read elsewhere."""

    nodes: tuple[ir.Node, ...]
    outputs: tuple[ir.Value, ...]


Stage = KernelStage | SegmentStage
IsKernel = Callable[[ir.Node], bool]


def is_kernel(node: ir.Node) -> bool:
    """Whether one of Ingot's kernels computes the node beside TensorRT's segments."""
    return is_attention_or_lookup(node) or (node.op_type == "Gemm" and needs_kernel(node))


def is_attention_or_lookup(node: ir.Node) -> bool:
    """What one of Ingot's kernels computes whatever engine runs the segments."""
    if node.op_type == "Gather":
        indices = node.inputs[1]
        return indices is not None and indices.is_graph_input() and indices.name in _TOKENS
    return node.op_type == ATTENTION


def split_stages(graph: ir.Graph, kernels: IsKernel = is_kernel) -> list[Stage]:
    """The stages in an order that they can run in. `kernels`: which nodes kernels compute."""
    live = _live(graph, kernels)
    depths = _depths([node for node in graph if node in live], kernels)
    by_depth: dict[int, list[ir.Node]] = defaultdict(list)
    for node, depth in depths.items():
        by_depth[depth].append(node)
    readers: dict[ir.Value, list[ir.Node]] = defaultdict(list)
    for node in depths:
        for value in token_inputs(node, kernels):
            readers[value].append(node)
    stages: list[Stage] = []
    for depth in sorted(by_depth):
        if depth % 2:
            stages += map(KernelStage, by_depth[depth])
        else:
            stages.append(_segment(by_depth[depth], readers))
    return stages


def token_inputs(node: ir.Node, kernels: IsKernel = is_kernel) -> Iterator[ir.Value]:
    """What a node reads of what tokens reach. Quantized activations are what they are made from: quantizing them again
    is the reader's affair."""
    dequantize = dequantizer(node) if node.op_type == "Gemm" and not kernels(node) else None
    if dequantize is None and node.op_type == "DequantizeLinear" and ACTIVATIONS_KEY in node.metadata_props:
        dequantize = node
    if dequantize is not None:
        yield unquantized(dequantize)
        return
    for value in dict.fromkeys(node.inputs):
        if value is not None and depends_on_tokens(value):
            yield value


def unquantized(dequantize: ir.Node) -> ir.Value:
    """The activations that a DequantizeLinear's codes were made from."""
    codes = dequantize.inputs[0]
    assert codes is not None
    quantize = codes.producer()
    assert quantize is not None
    assert quantize.inputs[0] is not None
    return quantize.inputs[0]


def depends_on_tokens(value: ir.Value) -> bool:
    """Whether input_ids, or rows chosen by logits_indices, reach a value that is no input of the graph."""
    producer = value.producer()
    if producer is None:
        return False
    waiting, seen = [producer], {producer}
    while waiting:
        node = waiting.pop()
        if is_attention_or_lookup(node):
            return True
        before = {source.producer() for source in node.inputs if source is not None}
        new = {made for made in before if made is not None} - seen
        waiting += new
        seen |= new
    return False


def _live(graph: ir.Graph, kernels: IsKernel) -> set[ir.Node]:
    """Nodes that the outputs are made from, quantization of activations left out."""
    live: set[ir.Node] = set()
    waiting = [value.producer() for value in graph.outputs]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in live:
            live.add(node)
            waiting += [value.producer() for value in token_inputs(node, kernels)]
    return live


def _depths(nodes: list[ir.Node], kernels: IsKernel) -> dict[ir.Node, int]:
    """Kernels stand at odd depths, segments at even ones; a node is never above what it reads."""
    depths: dict[ir.Node, int] = {}
    for node in nodes:
        before = [value.producer() for value in token_inputs(node, kernels)]
        least = max((depths[made] for made in before if made is not None), default=0)
        depths[node] = least + (2 if least % 2 else 1) if kernels(node) else least + least % 2
    return depths


def _segment(nodes: list[ir.Node], readers: dict[ir.Value, list[ir.Node]]) -> SegmentStage:
    inside = set(nodes)
    made = [value for node in nodes for value in node.outputs]
    outputs = [value for value in made if value.is_graph_output() or any(r not in inside for r in readers[value])]
    return SegmentStage(tuple(nodes), tuple(outputs))
