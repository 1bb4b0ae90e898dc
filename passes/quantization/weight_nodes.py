"""Quantized weights as ONNX nodes: codes, scales and zero points as initializers, read by a DequantizeLinear.

    integer     codes INT4 | UINT4 | INT8 | UINT8 [out, in], axis=1 and block_size; axis=0 per channel
    float8      codes FLOAT8E4M3FN [out, in], scale [out], axis=0

The initializers are <weight>.q, <weight>.scale and, asymmetric, <weight>.zero_point. Opset 24 has no integer type below
4 bits: weights of 2 and 3 bits use the 4-bit types with codes in their own range (-2..1, 0..3, -4..3, 0..7), and the
DequantizeLinear's metadata "ingot.bits" holds the number of bits. The lowering chooses what the engine stores.

onnxruntime has no float8 matmul on CPUs. The lowering for it calls widen_float8_weights, which makes

    W' = Mul(Cast(codes, to=FLOAT), scale [out, 1])

onnxruntime computes that once, when it loads the segment: the artifact holds 8 bits per weight, memory 32-bit floats
with the same values.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.numerics.arrays import CodeArray
from ingot.passes.numerics.float8 import Float8Weight
from ingot.passes.numerics.rounding import RoundedWeight
from ingot.passes.numerics.scheme import Scheme
from ingot.passes.rewriting import add_initializer
from ingot.passes.weights import WeightSite, drop_if_unused

STRATEGY_KEY = "ingot.strategy"  # metadata_props of a DequantizeLinear: "tensor" when all rows have one scale
BITS_KEY = "ingot.bits"  # metadata_props of a DequantizeLinear whose codes have fewer bits than their type
FLOAT8 = ir.DataType.FLOAT8E4M3FN


def insert_dequantize(
    graph: ir.Graph, weight: ir.Value, before: ir.Node, rounded: RoundedWeight, scheme: Scheme
) -> ir.Node:
    """Add the initializers and the DequantizeLinear that makes [out, in] float32, in front of a node."""
    base = _base_name(graph, weight, before)
    scale = ir.Tensor(_per_channel(rounded.scale, scheme), name=f"{base}.scale")
    tensors = [code_tensor(rounded.codes, scheme.bits, f"{base}.q"), scale]
    if rounded.zero_point is not None:
        zero_point = _per_channel(rounded.zero_point, scheme)
        tensors.append(code_tensor(zero_point, scheme.bits, f"{base}.zero_point"))
    attributes = {"axis": 1, "block_size": scheme.block_size} if scheme.block_size else {"axis": 0}
    node = _insert(graph, base, before, tensors, attributes)
    mark_bits(node, scheme.bits)
    return node


def insert_float8_dequantize(graph: ir.Graph, weight: ir.Value, before: ir.Node, rounded: Float8Weight) -> ir.Node:
    """Add the initializers and the DequantizeLinear of a float8 weight, in front of a node."""
    base = _base_name(graph, weight, before)
    tensors = [ir.Tensor(rounded.codes, name=f"{base}.q"), ir.Tensor(rounded.scale, name=f"{base}.scale")]
    return _insert(graph, base, before, tensors, {"axis": 0})


def insert_tensors(
    graph: ir.Graph, weight: ir.Value, before: ir.Node, tensors: Sequence[ir.TensorProtocol], block_size: int
) -> ir.Node:
    """Add tensors named q, scale and perhaps zero_point under the weight's name, and their DequantizeLinear."""
    base = _base_name(graph, weight, before)
    for tensor in tensors:
        tensor.name = f"{base}.{tensor.name}"
    return _insert(graph, base, before, tensors, {"axis": 1, "block_size": block_size} if block_size else {"axis": 0})


def replace_weight(graph: ir.Graph, sites: Sequence[WeightSite], dequantize: ir.Node) -> None:
    """Let all sites read the dequantized weight; remove what nothing reads any more."""
    operands = {site.operand for site in sites}
    for site in sites:
        site.node.replace_input_with(site.index, dequantize.outputs[0])
    for operand in operands:
        drop_if_unused(graph, operand)


def code_tensor(codes: CodeArray, bits: int, name: str) -> ir.TensorProtocol:
    """Codes as INT4, UINT4, INT8 or UINT8; up to 4 bits they are packed in memory."""
    if bits == 8:
        return ir.Tensor(codes, name=name)
    dtype = ir.DataType.INT4 if codes.dtype == np.int8 else ir.DataType.UINT4
    return ir.PackedTensor(pack_nibbles(codes), dtype, shape=codes.shape, name=name)


def pack_nibbles(codes: NDArray[Any]) -> NDArray[np.uint8]:
    """ONNX's layout of 4-bit tensors: flattened, two per byte, the first in the low half; [ceil(size / 2)]."""
    flat = codes.reshape(-1).view(np.uint8)
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    low, high = flat[0::2] & np.uint8(0x0F), flat[1::2] << np.uint8(4)
    packed: NDArray[np.uint8] = np.bitwise_or(low, high)
    return packed


def mark_bits(node: ir.Node, bits: int) -> None:
    """Record the number of bits on a DequantizeLinear whose codes have fewer than their type."""
    if bits not in (4, 8):
        node.metadata_props[BITS_KEY] = str(bits)


def weight_bits(node: ir.Node) -> int:
    """Bits of the codes that a DequantizeLinear reads: 2, 3, 4 or 8."""
    if BITS_KEY in node.metadata_props:
        return int(node.metadata_props[BITS_KEY])
    codes = node.inputs[0]
    assert codes is not None
    assert codes.dtype is not None
    return int(codes.dtype.bitwidth)


def widen_float8_weights(graph: ir.Graph) -> bool:
    """Replace every DequantizeLinear over stored float8 codes; return whether there was one."""
    found = [node for node in graph if _is_float8_weight(node)]
    for node in found:
        _widen(graph, node)
    return bool(found)


def float_value(name: str, shape: tuple[int | str, ...]) -> ir.Value:
    """A float32 value of that shape."""
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))


def _insert(
    graph: ir.Graph, base: str, before: ir.Node, tensors: Sequence[ir.TensorProtocol], attributes: Mapping[str, int]
) -> ir.Node:
    shape = tuple(int(size) for size in tensors[0].shape.numpy())
    node = ir.node(
        "DequantizeLinear",
        [add_initializer(graph, tensor) for tensor in tensors],
        attributes=attributes,
        name=f"{base.removesuffix('.weight')}.dequantize",
        outputs=[float_value(f"{base}.dequantized", shape)],
    )
    graph.insert_before(before, node)
    return node


def _base_name(graph: ir.Graph, weight: ir.Value, reader: ir.Node) -> str:
    """The weight's name; for a second copy of a tied weight, a name made from the node that reads it."""
    return weight.name or "" if f"{weight.name}.q" not in graph.initializers else f"{reader.name}.weight"


def _per_channel(values: NDArray[Any], scheme: Scheme) -> NDArray[Any]:
    """[out, blocks] unchanged; [out, 1] as [out] when the scheme is per channel."""
    return values if scheme.block_size else values[:, 0]


def _is_float8_weight(node: ir.Node) -> bool:
    codes = node.inputs[0] if node.op_type == "DequantizeLinear" else None
    return codes is not None and codes.is_initializer() and codes.dtype == FLOAT8


def _widen(graph: ir.Graph, node: ir.Node) -> None:
    codes, scale = node.inputs[0], node.inputs[1]
    assert codes is not None
    assert scale is not None
    assert scale.const_value is not None
    column = ir.Tensor(np.asarray(scale.const_value.numpy()).reshape(-1, 1), name=f"{scale.name}.column")
    shape = tuple(int(size) for size in (codes.shape or ir.Shape(())).numpy())
    wide = ir.node(
        "Cast",
        [codes],
        {"to": ir.DataType.FLOAT},
        name=f"{node.name}.widen",
        outputs=[float_value(f"{node.name}.widen", shape)],
    )
    inputs = [wide.outputs[0], add_initializer(graph, column)]
    scaled = ir.node("Mul", inputs, name=f"{node.name}.scale", outputs=[float_value(f"{node.name}.scale", shape)])
    old = [value for value in node.inputs if value is not None]
    new = [wide, scaled]
    ir.convenience.replace_nodes_and_values(graph, node, [node], new, [node.outputs[0]], [scaled.outputs[0]])
    for value in old:
        drop_if_unused(graph, value)
