"""Linear layers in the forms that TensorRT fuses. c is 2^-8, exact in any dtype; n and p: activation_codes.py.

    plain                        Gemm(x, W, b)
    int4 in blocks               Gemm(x, DequantizeLinear(codes, scale, axis=1, block_size), b)
      with zero points z         ... + groupsum(x) @ ((8 - z) * scale)^T         TensorRT knows no zero points
    int8, float8, x as it is     MatMul(x, DequantizeLinear(codes^T, scale, axis=1)) + b
    int8, float8, x quantized    g = Gemm(DequantizeLinear(QuantizeLinear(x / n, p), p), DequantizeLinear(codes, c))
                                 y = g * (scale / c) * n + b

In the last, a static scale's n is part of the vector. Scales stand outside of the matmul, which is so one of integers
(or float8) in any layer's plan.

4-bit codes as TensorRT takes them: signed, two to a byte, [out, in].
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.quantization.activation_quantization import Kind, activation_scheme, dequantizer
from ingot.passes.quantization.quantized_tensors import pack_nibbles
from ingot.passes.weights import float32_values, is_stored
from ingot.pipeline.targets.segments.activation_codes import Read, activation_codes, quantized_rows
from ingot.pipeline.targets.segments.builder import SegmentBuilder, dims
from ingot.pipeline.targets.segments.weight_forms import QuantizedOperand, stored_array, stored_shape

_EIGHT = np.uint8(0x88)  # 8 in both halves: turns unsigned codes into those less 8


def int4_codes(codes: ir.Value) -> ir.TensorProtocol:
    """The codes as INT4, made when they are written. Unsigned codes c become c - 8."""
    tensor = codes.const_value
    assert tensor is not None
    shape = ir.Shape(tensor.shape.numpy())
    return ir.LazyTensor(partial(_pack, tensor), ir.DataType.INT4, shape, name=codes.name)


def _pack(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    packed: Any = tensor.numpy_packed() if isinstance(tensor, ir.PackedTensor) else pack_nibbles(tensor.numpy())
    if tensor.dtype == ir.DataType.UINT4:
        packed = packed ^ _EIGHT
    return ir.PackedTensor(packed, ir.DataType.INT4, shape=ir.Shape(tensor.shape.numpy()), name=tensor.name)


CODE_SCALE = 2.0**-8  # c
_KINDS: dict[Kind, str] = {"int": "channel", "float": "float8"}


def lower_linear(b: SegmentBuilder, node: ir.Node, read: Read) -> ir.Value:
    """y = x @ W^T + b in the compute dtype; `read` gives the segment's value for one of the IR's."""
    operand, scheme, source = QuantizedOperand.of(node), activation_scheme(node), dequantizer(node)
    if source is not None and (operand is None or scheme is None or operand.kind != _KINDS[scheme.kind]):
        return _weight_alone(b, node, operand, quantized_rows(b, source, read))
    if source is None:
        assert node.inputs[0] is not None
        return _weight_alone(b, node, operand, read(node.inputs[0]))
    assert operand is not None
    return _integer(b, node, operand, source, read)


def _weight_alone(b: SegmentBuilder, node: ir.Node, operand: QuantizedOperand | None, x: ir.Value) -> ir.Value:
    if operand is None:
        return plain_linear(b, node, x)
    if operand.kind == "blocks":
        return _blocks(b, node, operand, x)
    return _channel(b, node, operand, x)


def plain_linear(b: SegmentBuilder, node: ir.Node, x: ir.Value) -> ir.Value:
    """y = x @ W^T + b, whatever the IR holds W in: it is stored in the compute dtype."""
    return b.emit("Gemm", node.name or "", [x, _plain(b, node), *_bias(b, node)], dims(node.outputs[0]), transB=1)


def _blocks(b: SegmentBuilder, node: ir.Node, operand: QuantizedOperand, x: ir.Value) -> ir.Value:
    """int4 constants, and what zero points add."""
    b.forms.add("int4")
    path, block, (out, columns) = node.name or "", operand.plan_block, stored_shape(operand.codes)
    assert block is not None, f"{path} is a kernel's"
    codes = b.constant(f"{path}.codes", int4_codes(operand.codes))
    scales = b.constant(f"{path}.scales", _blocked(b, operand, block, partial(_scale, operand)))
    weight = b.emit("DequantizeLinear", f"{path}.weight", [codes, scales], [out, columns], axis=1, block_size=block)
    y = b.emit("Gemm", path, [x, weight, *_bias(b, node)], dims(node.outputs[0]), transB=1)
    if operand.zero_point is None:
        return y
    shifts = b.constant(f"{path}.shifts", _blocked(b, operand, block, partial(_shifts, operand)))
    rows, groups = dims(node.outputs[0])[0], columns // block
    split = b.emit("Reshape", f"{path}.groups", [x, b.integers(0, groups, block)], [rows, groups, block])
    sums = b.emit("ReduceSum", f"{path}.sums", [split, b.integers(2)], [rows, groups], keepdims=0)
    shifted = b.emit("Gemm", f"{path}.shift", [sums, shifts], dims(node.outputs[0]), transB=1)
    return b.emit("Add", f"{path}.shifted", [y, shifted], dims(node.outputs[0]))


def _channel(b: SegmentBuilder, node: ir.Node, operand: QuantizedOperand, x: ir.Value) -> ir.Value:
    """8 bits with a scale a row. Codes lie transposed: only so is their dequantization fused where they are inputs."""
    path, shape, name = node.name or "", dims(node.outputs[0]), operand.codes.name or ""
    out, columns = stored_shape(operand.codes)
    codes = b.weight(f"{name}.transposed", _code_type(b, operand), (columns, out), partial(_transposed, operand))
    scale = b.weight(f"{operand.scale.name}.plan", b.dtype, (out,), partial(_scale, operand))
    weight = b.emit("DequantizeLinear", f"{path}.weight", [codes, scale], [columns, out], axis=1)
    y = b.emit("MatMul", path, [x, weight], shape)
    y = _shifted(b, node, operand, x, y, partial(_scale, operand), "plan")
    return _biased(b, node, y)


def _integer(b: SegmentBuilder, node: ir.Node, operand: QuantizedOperand, source: ir.Node, read: Read) -> ir.Value:
    """A matmul of codes with codes."""
    path, shape, name = node.name or "", dims(node.outputs[0]), operand.codes.name or ""
    sizes = stored_shape(operand.codes)
    codes_of_x = activation_codes(b, source, read)
    x, norm = codes_of_x.value, codes_of_x.norm
    codes = b.weight(f"{name}.rows", _code_type(b, operand), sizes, partial(_signed, operand))
    weight = b.emit("DequantizeLinear", f"{path}.weight", [codes, b.number(CODE_SCALE)], sizes)
    y = b.emit("Gemm", f"{path}.codes", [x, weight], shape, transB=1)
    y = _shifted(b, node, operand, x, y, lambda: np.float32(CODE_SCALE), "codes")
    factor = 1 / CODE_SCALE * (codes_of_x.static_norm if norm is None else 1.0)
    scales = b.weight(f"{path}.output_scale", b.dtype, sizes[:1], lambda: _scale(operand) * np.float32(factor))
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
    what: str,
) -> ir.Value:
    """Unsigned codes were made signed by taking 128: give rowsum(x) * (128 - z) * scale back."""
    if operand.codes.dtype != ir.DataType.UINT8:
        return y
    path, out = node.name or "", stored_shape(operand.codes)[0]
    points = operand.zero_point
    rows = b.emit("ReduceSum", f"{path}.sums", [x, b.integers(1)], [dims(node.outputs[0])[0], 1], keepdims=1)

    def shifts() -> NDArray[np.float32]:
        zero = 0.0 if points is None else stored_array(points).astype(np.float32)
        return np.broadcast_to((128.0 - zero) * scale(), (out,)).astype(np.float32)

    shift = b.weight(f"{operand.codes.name}.shifts.{what}", b.dtype, (out,), shifts)
    added = b.emit("Mul", f"{path}.shift", [rows, shift], dims(node.outputs[0]))
    return b.emit("Add", f"{path}.shifted", [y, added], dims(node.outputs[0]))


def _biased(b: SegmentBuilder, node: ir.Node, y: ir.Value) -> ir.Value:
    bias = _bias(b, node)
    return b.emit("Add", f"{node.name}.biased", [y, *bias], dims(node.outputs[0])) if bias else y


def _bias(b: SegmentBuilder, node: ir.Node) -> list[ir.Value]:
    """[1, out]: a vector that is an input would be reshaped by a launch of its own."""
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is None:
        return []
    (out,) = _stored_dims(node, bias)
    return [b.weight(f"{bias.name}.row", b.dtype, (1, out), lambda: float32_values(bias).reshape(1, out))]


def _plain(b: SegmentBuilder, node: ir.Node) -> ir.Value:
    """A weight matrix in the compute dtype."""
    operand = node.inputs[1]
    assert operand is not None
    return b.weight(operand.name or "", b.dtype, _stored_dims(node, operand), partial(float32_values, operand))


def _stored_dims(node: ir.Node, operand: ir.Value) -> tuple[int, ...]:
    if not is_stored(operand) or operand.shape is None:
        raise PassError(f"{node.name!r} multiplies by {operand.name!r}, which is computed; plans take stored weights")
    return tuple(int(size) for size in operand.shape.numpy())


def _code_type(b: SegmentBuilder, operand: QuantizedOperand) -> ir.DataType:
    b.forms.add("fp8" if operand.kind == "float8" else "int8")
    return ir.DataType.FLOAT8E4M3FN if operand.kind == "float8" else ir.DataType.INT8


def _signed(operand: QuantizedOperand) -> NDArray[Any]:
    codes = stored_array(operand.codes)
    return (codes ^ np.uint8(0x80)).view(np.int8) if codes.dtype == np.uint8 else codes


def _transposed(operand: QuantizedOperand) -> NDArray[Any]:
    return np.ascontiguousarray(_signed(operand).T)


def _scale(operand: QuantizedOperand) -> NDArray[np.float32]:
    return stored_array(operand.scale).astype(np.float32)


def _shifts(operand: QuantizedOperand) -> NDArray[np.float32]:
    """(8 - z) * scale of int4 codes that were unsigned."""
    assert operand.zero_point is not None
    return (np.float32(8) - stored_array(operand.zero_point).astype(np.float32)) * _scale(operand)


def _blocked(
    b: SegmentBuilder, operand: QuantizedOperand, block: int, make: Callable[[], NDArray[np.float32]]
) -> ir.LazyTensor:
    """Numbers [out] or [out, blocks] for the plan's blocks, [out, in / block], made when they are written."""
    out, columns = stored_shape(operand.codes)
    dtype = b.dtype

    def tensor() -> ir.TensorProtocol:
        return ir.Tensor(operand.per_block(make(), block).astype(dtype.numpy()), dtype=dtype)

    return ir.LazyTensor(tensor, dtype, ir.Shape([out, columns // block]))
