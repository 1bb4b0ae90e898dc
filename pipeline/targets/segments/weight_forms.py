"""In which form a linear layer's weight reaches TensorRT, so that its dequantization is fused into the matmul.

    plain      16 bits [out, in]                      an input of the plan
    channel    int8 | float8 with a scale a row       an input of the plan
    blocks     int4, scales in the compute dtype      a constant of the plan: only so is it fused

Blocks are of 16 to 256 columns and divide the row. Coarser ones (a scale a row among them) and a partial last block are
split, which repeats scales and changes no value. Codes of 2 and 3 bits are int4. Where a row has no such blocks, and
for 8 bits in blocks, TensorRT would write out the whole weight in each step: those matmuls are left to Ingot's kernels.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.weights import apply_to_array

BLOCKS = (256, 128, 64, 32, 16)
MOST_SPLIT = 128  # of a scale for a whole row
_FOUR_BITS = (ir.DataType.INT4, ir.DataType.UINT4)
_EIGHT_BITS = (ir.DataType.INT8, ir.DataType.UINT8)
_FLOAT8 = ir.DataType.FLOAT8E4M3FN

WeightKind = Literal["blocks", "channel", "float8"]


@dataclass(frozen=True)
class QuantizedOperand:
    """A DequantizeLinear over stored codes [out, in], with scale and zero point [out] or [out, blocks]."""

    codes: ir.Value
    scale: ir.Value
    zero_point: ir.Value | None
    block: int | None  # columns that share a scale; None: the row

    @classmethod
    def of(cls, node: ir.Node) -> "QuantizedOperand | None":
        """Of a linear layer's weight; None where that is plain."""
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
    def kind(self) -> WeightKind:
        """How TensorRT sees it; PassError for codes that have no form."""
        if self.codes.dtype in _FOUR_BITS:
            return "blocks"
        if self.codes.dtype in _EIGHT_BITS:
            return "channel"
        if self.codes.dtype == _FLOAT8 and self.block is None:
            return "float8"
        raise PassError(
            f"{self.codes.name!r} is {self.codes.dtype} in blocks of {self.block}; TensorRT takes 4 bits in blocks, "
            "and int8 or float8_e4m3fn with a scale a row"
        )

    @property
    def columns(self) -> int:
        """In-features."""
        return int(stored_shape(self.codes)[1])

    @property
    def plan_block(self) -> int | None:
        """The largest block that TensorRT takes and that has one scale each; None where there is none."""
        allowed = (b for b in BLOCKS if self.columns % b == 0 and (self.block or MOST_SPLIT) % b == 0)
        return next(allowed, None)

    def per_block(self, values: NDArray[Any], block: int) -> NDArray[Any]:
        """Scales or zero points [out] or [out, blocks], for blocks of that size: [out, in / block]."""
        if values.ndim == 1:
            return np.repeat(values[:, None], self.columns // block, axis=1)
        assert self.block is not None
        return values[:, np.arange(0, self.columns, block) // self.block]


def needs_kernel(node: ir.Node) -> bool:
    """Whether TensorRT would write out the layer's weight in each step."""
    operand = QuantizedOperand.of(node)
    if operand is None:
        return False
    return operand.plan_block is None if operand.kind == "blocks" else operand.block is not None


def stored_array(value: ir.Value) -> NDArray[Any]:
    """An initializer's values: a copy, whose memory map is given back."""
    assert value.const_value is not None, value.name
    return apply_to_array(value.const_value, np.array)


def stored_shape(value: ir.Value) -> tuple[int, ...]:
    """An initializer's shape."""
    assert value.const_value is not None, value.name
    return tuple(int(size) for size in value.const_value.shape.numpy())
