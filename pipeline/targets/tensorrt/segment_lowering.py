"""The IR as TensorRT takes it: which nodes stay with Ingot's kernels, and how the others become segments.

Linear layers: see linear_forms.py. Norms over heads multiply by the weight after the norm, because TensorRT reshapes a
vector by a launch of its own.
"""

from collections.abc import Mapping
from typing import ClassVar

import onnx_ir as ir

from ingot.artifact.programs.launch_program import ActivationType
from ingot.errors import PassError
from ingot.passes.rewriting import make_node, static_columns
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.segment_builder import dims, folded
from ingot.pipeline.targets.segments.segment_lowering import Handler, SegmentLowering
from ingot.pipeline.targets.segments.stages import ATTENTION, SegmentStage, is_attention_or_token_gather
from ingot.pipeline.targets.tensorrt.linear_forms import lower_linear
from ingot.pipeline.targets.tensorrt.weight_forms import needs_kernel

_COLUMNS = ("query_column", "key_column", "value_column")


def is_kernel(node: ir.Node) -> bool:
    """Report whether one of Ingot's kernels computes the node: TensorRT has no form for it, or not a fast one."""
    return is_attention_or_token_gather(node) or (node.op_type == "Gemm" and needs_kernel(node))


def lower_segment(stage: SegmentStage, activation_type: ActivationType) -> Segment:
    """Lower one segment. PassError names a node that TensorRT has no form for."""
    return TensorRTSegmentLowering(stage, activation_type).run()


class TensorRTSegmentLowering(SegmentLowering):
    """Standard ops in 16 bits, weights in the forms whose dequantization is fused."""

    engine: ClassVar[str] = "TensorRT"

    def linear(self, node: ir.Node) -> ir.Value:
        """y = x @ W^T + b in the activations' type."""
        assert not is_kernel(node)
        return lower_linear(self.b, node, self.read)

    def _norm(self, node: ir.Node) -> None:
        b, path, shape, source = self.b, node.name or "", dims(node.outputs[0]), node.inputs[0]
        if len(shape) == 2 or source is None:
            self.generic(node)
            return
        width, weight = int(shape[-1]), node.inputs[1]
        assert weight is not None
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        inputs = [self.read(source), b.number(1.0, shape=(width,))]
        normed = b.emit("RMSNormalization", path, inputs, shape, **attributes)
        row = (*([1] * (len(shape) - 1)), width)
        scale = b.weight(f"{weight.name}.row", b.dtype, row, lambda: folded(weight).reshape(row))
        b.values[node.outputs[0]] = b.emit("Mul", f"{path}.weighted", [normed, scale], shape)

    handlers: ClassVar[Mapping[str, Handler]] = {**SegmentLowering.handlers, "RMSNormalization": _norm}


def pack_attention_operands(graph: ir.Graph) -> None:
    """Put queries, keys and values of every attention into one row.

        Matched         a = ingot::PagedAttention(q, k, v, tables..; columns..)     of several values, or in any order
        Replacement     packed = Concat(q, k, v; axis=-1)                           in the segment, and fused there
                        a = ingot::PagedAttention(packed, packed, packed, tables..; columns 0, H * D, (H + KV) * D)

    Queries and keys that the segment itself norms or rotates then need no kernel of their own. PassError for operands
    that are columns of a wider value in another order.
    """
    for node in list(graph):
        if node.op_type == ATTENTION and not _is_packed(node):
            _pack(graph, node)


def _widths(node: ir.Node) -> tuple[int, int, int]:
    heads, kv_heads, dim = (node.attributes[name].as_int() for name in ("num_heads", "num_kv_heads", "head_dim"))
    return heads * dim, kv_heads * dim, kv_heads * dim


def _is_packed(node: ir.Node) -> bool:
    query, key, _ = _widths(node)
    starts = tuple(node.attributes.get_int(name, 0) for name in _COLUMNS)
    return len(set(node.inputs[:3])) == 1 and starts == (0, query, query + key)


def _pack(graph: ir.Graph, node: ir.Node) -> None:
    widths, operands = _widths(node), node.inputs[:3]
    if any(value is None or static_columns(value) != width for value, width in zip(operands, widths, strict=True)):
        raise PassError(
            f"{node.name!r} reads columns of wider values; only queries, keys and values that are whole values, or "
            "one row in this order, can be packed"
        )
    concat = make_node("Concat", f"{node.name}.operands", operands, [operands[0]], axis=-1)
    packed = concat.outputs[0]
    packed.name = concat.name
    assert packed.shape is not None
    packed.shape = ir.Shape([packed.shape[0], sum(widths)])
    graph.insert_before(node, concat)
    for index in range(3):
        node.replace_input_with(index, packed)
    for name, column in zip(_COLUMNS, (0, widths[0], widths[0] + widths[1]), strict=True):
        node.attributes[name] = ir.AttrInt64(name, column)
