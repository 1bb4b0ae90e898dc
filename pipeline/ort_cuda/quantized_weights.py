"""Quantized weights as inputs of a segment: the layout of MatMulNBits and GatherBlockQuantized, scales in its dtype.

A table that is the head, too, has the same bytes in both: one weight of the program, shown in two shapes.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.lowering.nbits_packing import QuantizedWeight
from ingot.passes.weight_values import is_stored
from ingot.pipeline.ort_cuda.segment_builder import OrtSegmentBuilder

_BYTES = ir.DataType.UINT8
_FLOAT8 = ir.DataType.FLOAT8E4M3FN


def weight_dequantizer(operand: ir.Value | None) -> ir.Node | None:
    """The DequantizeLinear over stored codes that makes an operand."""
    producer = None if operand is None else operand.producer()
    if operand is None or producer is None or producer.op_type != "DequantizeLinear":
        return None
    return producer if is_stored(operand) else None


def is_float8(dequantize: ir.Node) -> bool:
    """Whether the codes are 8-bit floats, which neither operator takes."""
    codes = dequantize.inputs[0]
    return codes is not None and codes.dtype == _FLOAT8


@dataclass(frozen=True)
class SegmentWeight:
    """A quantized weight within a segment."""

    b: OrtSegmentBuilder
    weight: QuantizedWeight

    @property
    def codes(self) -> ir.Value:
        """Of a matmul: [out, blocks, bytes of a block]."""
        return self._input("codes", self.weight.packed_codes(), _BYTES)

    @property
    def rows(self) -> ir.Value:
        """Of a look-up: [rows, bytes of a row]."""
        return self._input("codes", self.weight.packed_rows(), _BYTES)

    @property
    def scales(self) -> ir.Value:
        """[out, blocks]."""
        return self._input("scales", self.weight.packed_scales(), self.b.dtype)

    @property
    def zero_points(self) -> ir.Value | None:
        """[out, bytes of a row's]; None: symmetric."""
        points = self.weight.packed_zero_points()
        return None if points is None else self._input("zero_points", points, _BYTES)

    def _input(self, part: str, tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.Value:
        def make() -> NDArray[np.generic]:
            return np.asarray(tensor.numpy())

        name = f"{self.weight.name}.nbits.{part}"  # kernels store the same codes in layouts of their own
        return self.b.weight(name, dtype, tuple(int(size) for size in tensor.shape.numpy()), make)
