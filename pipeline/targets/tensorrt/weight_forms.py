"""Rule for the weights that TensorRT multiplies by in their stored form.

A layer's rows (out) and columns (in) are even, and

    16 bits           any
    2 to 4 bits       in blocks of 16, 32, 64, 128 or 256 columns that divide the row, at least two of them
    8 bits            a scale per row

For every other weight TensorRT-RTX 1.7 pads or dequantizes the whole weight in each step: Ingot's kernels compute those
matmuls (`needs_kernel`). Checked on plans of all forms (docs/log.md); plan_report.py checks every plan again.

Coarser blocks, a scale per row of 4 bits among them, are split, which repeats scales and changes no value: a row of 32
columns in blocks of 128 has two blocks of 16. Codes of 2 and 3 bits are stored as int4. Float8 in blocks and 4-bit
floats are not among the IR's forms: importing a checkpoint widens such weights to floats (docs/formats.md).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.quantization.weight_nodes import pack_nibbles
from ingot.pipeline.targets.segments.segment_builder import stored_array

WeightForm = Literal["blocks", "channel", "float8"]

_BLOCKS = (256, 128, 64, 32, 16)
_LEAST_BLOCKS = 2  # TensorRT takes a single block of a row for a scale per row
_MOST_SPLIT = 128  # block size that a scale per row is split into at most
_FOUR_BITS = (ir.DataType.INT4, ir.DataType.UINT4)
_EIGHT_BITS = (ir.DataType.INT8, ir.DataType.UINT8)
_FLOAT8 = ir.DataType.FLOAT8E4M3FN
_SIGN_BITS = np.uint8(0x88)  # sign bits of both nibbles: flipping them subtracts 8 from unsigned codes


@dataclass(frozen=True)
class QuantizedOperand:
    """A DequantizeLinear over stored codes [out, in], with scale and zero point [out] or [out, blocks]."""

    codes: ir.Value
    scale: ir.Value
    zero_point: ir.Value | None
    block: int | None  # columns that share a scale; None: the row

    @classmethod
    def of(cls, node: ir.Node) -> "QuantizedOperand | None":
        """Return a linear layer's quantized weight; None for a plain one."""
        operand = node.inputs[1]
        producer = None if operand is None else operand.producer()
        if producer is None or producer.op_type != "DequantizeLinear":
            return None
        codes, scale, *rest = producer.inputs
        assert codes is not None
        assert scale is not None
        block = producer.attributes.get_int("block_size", 0) or None
        return cls(codes, scale, rest[0] if rest else None, block)

    @property
    def kind(self) -> WeightForm:
        """The form that TensorRT takes it in. PassError for codes without one."""
        if self.codes.dtype in _FOUR_BITS:
            return "blocks"
        if self.codes.dtype in _EIGHT_BITS:
            return "channel"
        if self.codes.dtype == _FLOAT8 and self.block is None:
            return "float8"
        raise PassError(
            f"{self.codes.name!r} is {self.codes.dtype} in blocks of {self.block}; TensorRT takes 4 bits in blocks, "
            "and int8 or float8_e4m3fn with a scale per row"
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows (out) and columns (in)."""
        assert self.codes.const_value is not None, self.codes.name
        out, columns = (int(size) for size in self.codes.const_value.shape.numpy())
        return out, columns

    @property
    def plan_block(self) -> int | None:
        """The largest block size that TensorRT takes and whose blocks have one scale each; None if no size fits."""
        columns = self.shape[1]
        allowed = (b for b in _BLOCKS if columns % b == 0 and (self.block or _MOST_SPLIT) % b == 0)
        return next((b for b in allowed if columns >= _LEAST_BLOCKS * b), None)

    def per_block(self, values: NDArray[Any], block: int) -> NDArray[Any]:
        """Spread scales or zero points [out] or [out, blocks] to blocks of another size: [out, in / block]."""
        columns = self.shape[1]
        if values.ndim == 1:
            return np.repeat(values[:, None], columns // block, axis=1)
        assert self.block is not None
        return values[:, np.arange(0, columns, block) // self.block]

    def scales(self) -> NDArray[np.float32]:
        """The scales as stored, in float32."""
        return stored_array(self.scale).astype(np.float32)

    def signed_codes(self) -> NDArray[Any]:
        """8-bit codes; unsigned codes c become c - 128."""
        codes = stored_array(self.codes)
        return (codes ^ np.uint8(0x80)).view(np.int8) if codes.dtype == np.uint8 else codes

    def int4_codes(self) -> ir.TensorProtocol:
        """The codes as INT4, two to a byte, made when they are written. Unsigned codes c become c - 8."""
        tensor = self.codes.const_value
        assert tensor is not None
        return ir.LazyTensor(
            partial(_packed_int4, tensor), ir.DataType.INT4, ir.Shape(self.shape), name=self.codes.name
        )

    def int4_shifts(self) -> NDArray[np.float32]:
        """(8 - z) * scale, for codes that were unsigned."""
        assert self.zero_point is not None
        return (np.float32(8) - stored_array(self.zero_point).astype(np.float32)) * self.scales()


def needs_kernel(node: ir.Node) -> bool:
    """Report whether TensorRT would write out a linear layer's whole weight in each step."""
    if any(size % 2 for size in _stored_shape(node)):
        return True
    operand = QuantizedOperand.of(node)
    if operand is None:
        return False
    return operand.plan_block is None if operand.kind == "blocks" else operand.block is not None


def _stored_shape(node: ir.Node) -> tuple[int, ...]:
    """Rows and columns of a linear layer's weight; empty where it is computed."""
    shape = None if node.inputs[1] is None else node.inputs[1].shape
    return () if shape is None else tuple(size for size in shape if isinstance(size, int))


def _packed_int4(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    packed: Any = tensor.numpy_packed() if isinstance(tensor, ir.PackedTensor) else pack_nibbles(tensor.numpy())
    if tensor.dtype == ir.DataType.UINT4:
        packed = packed ^ _SIGN_BITS
    return ir.PackedTensor(packed, ir.DataType.INT4, shape=ir.Shape(tensor.shape.numpy()), name=tensor.name)
