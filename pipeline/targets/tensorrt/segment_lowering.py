"""The IR as TensorRT takes it: which nodes stay with Ingot's kernels, and how the others become segments.

Norms over heads multiply by the weight after the norm, because TensorRT reshapes a vector by a launch of its own.

Linear layers have the forms whose dequantization TensorRT fuses into the matmul. c is 2^-8, exact in any type; n and p:
see activation_codes.py.

    plain                        Gemm(x, W, b)
    int4 in blocks               Gemm(x, DequantizeLinear(codes, scale, axis=1, block_size), b)
      with zero points z         ... + groupsum(x) @ ((8 - z) * scale)^T         TensorRT has no zero points
    int8, float8; x plain        MatMul(x, DequantizeLinear(codes^T, scale, axis=1)) + b
    int8, float8; x quantized    g = Gemm(DequantizeLinear(QuantizeLinear(x / n, p), p), DequantizeLinear(codes, c))
                                 y = g * (scale / c) * n + b

In the last form a static scale's n is part of the vector scale / c. Scales are outside of the matmul, so that it is the
same matmul of integers (or float8) in every layer's plan.

Plain and 8-bit weights are inputs of the plan; int4 codes are constants, because TensorRT fuses their dequantization
only then. See weight_forms.py for the weights that have a form.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.launch_program import ActivationType
from ingot.errors import PassError
from ingot.passes.numerics.activation_rounding import Kind
from ingot.passes.quantization.activation_nodes import activation_scheme, dequantizer
from ingot.passes.rewriting import make_node, static_columns
from ingot.pipeline.targets.segments.activation_codes import Read, activation_codes, quantized_rows
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.segment_builder import SegmentBuilder, dims, folded, stored_array
from ingot.pipeline.targets.segments.segment_lowering import Handler, SegmentLowering
from ingot.pipeline.targets.segments.stages import ATTENTION, SegmentStage, is_attention_or_token_gather
from ingot.pipeline.targets.tensorrt.weight_forms import QuantizedOperand, WeightForm, needs_kernel

_CODE_SCALE = 2.0**-8  # c
_WEIGHT_OF_ACTIVATIONS: dict[Kind, WeightForm] = {"int": "channel", "float": "float8"}
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
        return _lower_linear(self.b, node, self.read)

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


def _lower_linear(b: SegmentBuilder, node: ir.Node, read: Read) -> ir.Value:
    """y = x @ W^T + b in the activations' type; `read` returns the segment's value for a value of the IR."""
    operand, scheme, source = QuantizedOperand.of(node), activation_scheme(node), dequantizer(node)
    if source is None:
        assert node.inputs[0] is not None
        return _of_floats(b, node, operand, read(node.inputs[0]))
    if operand is None or scheme is None or operand.kind != _WEIGHT_OF_ACTIVATIONS[scheme.kind]:
        return _of_floats(b, node, operand, quantized_rows(b, source, read))
    return _of_codes(b, node, operand, source, read)


def _of_floats(b: SegmentBuilder, node: ir.Node, operand: QuantizedOperand | None, x: ir.Value) -> ir.Value:
    if operand is None:
        return b.linear(node, x)
    if operand.kind == "blocks":
        return _blocks(b, node, operand, x)
    return _channel(b, node, operand, x)


def _blocks(b: SegmentBuilder, node: ir.Node, operand: QuantizedOperand, x: ir.Value) -> ir.Value:
    """int4 constants, plus the term of the zero points."""
    b.number_formats.add("int4")
    path, block, (out, columns), shape = node.name or "", operand.plan_block, operand.shape, dims(node.outputs[0])
    assert block is not None, f"{path} needs a kernel"
    codes = b.constant(f"{path}.codes", operand.int4_codes())
    scales = b.constant(f"{path}.scales", _blocked(b, operand, block, operand.scales))
    weight = b.emit("DequantizeLinear", f"{path}.weight", [codes, scales], [out, columns], axis=1, block_size=block)
    y = b.emit("Gemm", path, [x, weight, *b.bias(node)], shape, transB=1)
    if operand.zero_point is None:
        return y
    shifts = b.constant(f"{path}.shifts", _blocked(b, operand, block, operand.int4_shifts))
    rows, groups = shape[0], columns // block
    split = b.emit("Reshape", f"{path}.groups", [x, b.integers(0, groups, block)], [rows, groups, block])
    sums = b.emit("ReduceSum", f"{path}.sums", [split, b.integers(2)], [rows, groups], keepdims=0)
    shifted = b.emit("Gemm", f"{path}.shift", [sums, shifts], shape, transB=1)
    return b.emit("Add", f"{path}.shifted", [y, shifted], shape)


def _channel(b: SegmentBuilder, node: ir.Node, operand: QuantizedOperand, x: ir.Value) -> ir.Value:
    """8 bits with a scale per row. As inputs, codes are fused with their dequantization only if they are transposed."""
    path, shape, name = node.name or "", dims(node.outputs[0]), operand.codes.name or ""
    out, columns = operand.shape

    def transposed() -> NDArray[Any]:
        return np.ascontiguousarray(operand.signed_codes().T)

    codes = b.weight(f"{name}.transposed", _code_type(b, operand), (columns, out), transposed)
    scale = b.weight(f"{operand.scale.name}.plan", b.dtype, (out,), operand.scales)
    weight = b.emit("DequantizeLinear", f"{path}.weight", [codes, scale], [columns, out], axis=1)
    y = b.emit("MatMul", path, [x, weight], shape)
    y = _shifted(b, node, operand, x, y, operand.scales, "plan")
    return _biased(b, node, y)


def _of_codes(b: SegmentBuilder, node: ir.Node, operand: QuantizedOperand, source: ir.Node, read: Read) -> ir.Value:
    """A matmul of 8-bit codes by 8-bit codes."""
    path, shape, name = node.name or "", dims(node.outputs[0]), operand.codes.name or ""
    activations = activation_codes(b, source, read)
    x, norm = activations.value, activations.norm
    codes = b.weight(f"{name}.rows", _code_type(b, operand), operand.shape, operand.signed_codes)
    weight = b.emit("DequantizeLinear", f"{path}.weight", [codes, b.number(_CODE_SCALE)], operand.shape)
    y = b.emit("Gemm", f"{path}.codes", [x, weight], shape, transB=1)
    y = _shifted(b, node, operand, x, y, lambda: np.float32(_CODE_SCALE), "codes")
    factor = 1 / _CODE_SCALE * (activations.static_norm if norm is None else 1.0)
    out = operand.shape[:1]
    scales = b.weight(f"{path}.output_scale", b.dtype, out, lambda: operand.scales() * np.float32(factor))
    y = b.emit("Mul", f"{path}.scaled", [y, scales], shape)
    if norm is not None:
        y = b.emit("Mul", f"{path}.normed", [y, norm], shape)
    return _biased(b, node, y)


def _shifted(
    b: SegmentBuilder,
    node: ir.Node,
    operand: QuantizedOperand,
    x: ir.Value,
    y: ir.Value,
    scale: Callable[[], Any],
    suffix: str,
) -> ir.Value:
    """Add rowsum(x) * (128 - z) * scale for unsigned codes, which became signed by subtracting 128."""
    if operand.codes.dtype != ir.DataType.UINT8:
        return y
    path, out, points = node.name or "", operand.shape[0], operand.zero_point
    rows = b.emit("ReduceSum", f"{path}.sums", [x, b.integers(1)], [dims(node.outputs[0])[0], 1], keepdims=1)

    def shifts() -> NDArray[np.float32]:
        zero = 0.0 if points is None else stored_array(points).astype(np.float32)
        return np.broadcast_to((128.0 - zero) * scale(), (out,)).astype(np.float32)

    shift = b.weight(f"{operand.codes.name}.shifts.{suffix}", b.dtype, (out,), shifts)
    added = b.emit("Mul", f"{path}.shift", [rows, shift], dims(node.outputs[0]))
    return b.emit("Add", f"{path}.shifted", [y, added], dims(node.outputs[0]))


def _biased(b: SegmentBuilder, node: ir.Node, y: ir.Value) -> ir.Value:
    bias = b.bias(node)
    return b.emit("Add", f"{node.name}.biased", [y, *bias], dims(node.outputs[0])) if bias else y


def _code_type(b: SegmentBuilder, operand: QuantizedOperand) -> ir.DataType:
    """Type of 8-bit codes in the plan, noted among its number formats."""
    b.number_formats.add("fp8" if operand.kind == "float8" else "int8")
    return ir.DataType.FLOAT8E4M3FN if operand.kind == "float8" else ir.DataType.INT8


def _blocked(
    b: SegmentBuilder, operand: QuantizedOperand, block: int, make: Callable[[], NDArray[np.float32]]
) -> ir.LazyTensor:
    """Numbers [out] or [out, blocks] for the plan's blocks, [out, in / block], made when they are written."""
    out, columns = operand.shape
    dtype = b.dtype

    def tensor() -> ir.TensorProtocol:
        return ir.Tensor(operand.per_block(make(), block).astype(dtype.numpy()), dtype=dtype)

    return ir.LazyTensor(tensor, dtype, ir.Shape([out, columns // block]))
