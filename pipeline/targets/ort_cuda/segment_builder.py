"""Builds the ONNX model of one segment for onnxruntime's CUDA provider: standard ops and operators of com.microsoft.

All weights are inputs of the segment. The provider could repack constants of MatMulNBits for CUTLASS kernels
(ORT_FPA_INTB_GEMM, off by default); as inputs they are stored once for all their readers, and all layers of one shape
share a session, each of which needs workspaces on the GPU.

The provider computes ReduceMax by cuDNN, which nothing else here needs: the maximum of a row comes from TopK.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.lowering.lower_onnxruntime_cpu import MICROSOFT
from ingot.passes.lowering.nbits_packing import UnpackedWeight
from ingot.pipeline.targets.segments.segment_builder import Dims, SegmentBuilder, dims

_BYTES = ir.DataType.UINT8


@dataclass
class OrtSegmentBuilder(SegmentBuilder):
    """The segment so far."""

    opsets: ClassVar[Mapping[str, int]] = {**SegmentBuilder.opsets, MICROSOFT: 1}

    def emit_microsoft(
        self, op_type: str, name: str, inputs: Sequence[ir.Value | None], shape: Dims, **attributes: int
    ) -> ir.Value:
        """Append a node of com.microsoft with one output; absent inputs at the end are left out."""
        given = list(inputs)
        while given[-1] is None:
            given.pop()
        return self.append(op_type, name, given, [(name, shape, self.dtype)], attributes, MICROSOFT)[0]

    def row_maximum(self, name: str, x: ir.Value) -> ir.Value:
        """Return the largest element of each row, [T, 1]."""
        column = [dims(x)[0], 1]
        outputs = [(name, column, self.dtype), (f"{name}.places", column, ir.DataType.INT64)]
        return self.append("TopK", name, [x, self.integers(1)], outputs, {"axis": -1, "sorted": 0})[0]


@dataclass(frozen=True)
class NBitsInputs:
    """A quantized weight as inputs in the layouts of MatMulNBits and GatherBlockQuantized, scales in its float type.

    An embedding that is the head, too, has the same bytes in both layouts: one weight of the program in two shapes.
    """

    b: OrtSegmentBuilder
    weight: UnpackedWeight

    @property
    def matmul_codes(self) -> ir.Value:
        """Codes [out, blocks, bytes of a block]."""
        return self._input("codes", self.weight.packed_codes(), _BYTES)

    @property
    def gather_codes(self) -> ir.Value:
        """Codes [rows, bytes of a row]."""
        return self._input("codes", self.weight.packed_rows(), _BYTES)

    @property
    def scales(self) -> ir.Value:
        """Scales [out, blocks]."""
        return self._input("scales", self.weight.packed_scales(), self.b.dtype)

    @property
    def zero_points(self) -> ir.Value | None:
        """Zero points [out, bytes of a row's zero points]; None: symmetric."""
        points = self.weight.packed_zero_points()
        return None if points is None else self._input("zero_points", points, _BYTES)

    def _input(self, part: str, tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.Value:
        def make() -> NDArray[np.generic]:
            return np.asarray(tensor.numpy())

        name = f"{self.weight.name}.nbits.{part}"  # Ingot's kernels store the same codes in other layouts
        return self.b.weight(name, dtype, tuple(int(size) for size in tensor.shape.numpy()), make)
