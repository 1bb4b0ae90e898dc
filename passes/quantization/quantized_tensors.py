"""Quantized weights as ONNX: codes, scales and zero points as initializers, read by a DequantizeLinear.

Codes are INT4, UINT4, INT8 or UINT8. Opset 24 has no narrower type, so weights of 2 and 3 bits stand in the 4-bit ones,
with codes of their own range (-2..1, 0..3, -4..3, 0..7), and the DequantizeLinear says how many bits are meant in its
metadata "ingot.bits". What the engine then stores is the lowering's choice.
"""

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.numerics.rounding import CodeArray, RoundedWeight
from ingot.passes.numerics.scale_search import FloatArray, Scheme
from ingot.passes.rewriting import add_initializer


def pack_nibbles(codes: NDArray[Any]) -> NDArray[np.uint8]:
    """ONNX's layout of 4-bit tensors: flattened, two to a byte, the first in the low half; [ceil(size / 2)]."""
    flat = codes.reshape(-1).view(np.uint8)
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    low, high = flat[0::2] & np.uint8(0x0F), flat[1::2] << np.uint8(4)
    packed: NDArray[np.uint8] = np.bitwise_or(low, high)
    return packed


STRATEGY_KEY = "ingot.strategy"  # metadata_props of a DequantizeLinear: "tensor" when all rows have one scale
BITS_KEY = "ingot.bits"  # metadata_props of a DequantizeLinear whose codes have fewer bits than their type


def code_tensor(codes: CodeArray, bits: int, name: str) -> ir.TensorProtocol:
    """Codes as INT4, UINT4, INT8 or UINT8; those of up to 4 bits are held packed."""
    if bits == 8:
        return ir.Tensor(codes, name=name)
    dtype = ir.DataType.INT4 if codes.dtype == np.int8 else ir.DataType.UINT4
    return ir.PackedTensor(pack_nibbles(codes), dtype, shape=codes.shape, name=name)


def insert_dequantize(
    graph: ir.Graph, weight: ir.Value, before: ir.Node, rounded: RoundedWeight, scheme: Scheme
) -> ir.Value:
    """Add the initializers and a DequantizeLinear in front of a node; return what it makes, [out, in] float32."""
    base = _base_name(graph, weight.name or "", before.name or "")
    tensors = [code_tensor(rounded.codes, scheme.bits, f"{base}.q"), _scale_tensor(rounded.scale, scheme, base)]
    if rounded.zero_point is not None:
        zero_point = _per_channel(rounded.zero_point, scheme)
        tensors.append(code_tensor(zero_point, scheme.bits, f"{base}.zero_point"))
    inputs = [add_initializer(graph, tensor) for tensor in tensors]
    node = ir.node(
        "DequantizeLinear",
        inputs,
        attributes={"axis": 1, "block_size": scheme.block_size} if scheme.block_size else {"axis": 0},
        name=f"{base.removesuffix('.weight')}.dequantize",
        outputs=[float_value(f"{base}.dequantized", rounded.codes.shape)],
    )
    mark_bits(node, scheme.bits)
    graph.insert_before(before, node)
    return node.outputs[0]


def mark_bits(node: ir.Node, bits: int) -> None:
    """Say on a DequantizeLinear how many bits its codes have, where their type does not."""
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


def float_value(name: str, shape: tuple[int | str, ...]) -> ir.Value:
    """A float32 value of that shape."""
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))


def _base_name(graph: ir.Graph, weight: str, node: str) -> str:
    """The weight's name; for a second copy of a tied weight, a name made from the node that reads it."""
    return weight if f"{weight}.q" not in graph.initializers else f"{node}.weight"


def _scale_tensor(scale: FloatArray, scheme: Scheme, base: str) -> ir.TensorProtocol:
    return ir.Tensor(_per_channel(scale, scheme), name=f"{base}.scale")


def _per_channel(values: NDArray[Any], scheme: Scheme) -> NDArray[Any]:
    """[out, blocks] as it is; [out, 1] as [out] when the scheme is per channel."""
    return values if scheme.block_size else values[:, 0]
