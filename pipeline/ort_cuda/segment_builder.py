"""Builds the ONNX model of one segment for onnxruntime's CUDA provider: as for TensorRT, with Microsoft's operators.

The provider computes ReduceMax by cuDNN, which it needs for nothing else here: the largest of a row comes from TopK.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import onnx_ir as ir

from ingot.passes.lowering.lower_onnxruntime_cpu import MICROSOFT
from ingot.pipeline.tensorrt.segment_builder import Compute, Dims, SegmentBuilder


class OrtSegmentBuilder(SegmentBuilder):
    """The segment so far."""

    @classmethod
    def of(cls, nodes: Iterable[ir.Node], compute: Compute) -> "OrtSegmentBuilder":
        """An empty segment for these nodes of the IR."""
        made = super().of(nodes, compute)
        assert isinstance(made, OrtSegmentBuilder)
        made.graph.opset_imports[MICROSOFT] = 1
        return made

    def emit(
        self,
        op_type: str,
        name: str,
        inputs: Sequence[ir.Value | None],
        shape: Dims,
        dtype: ir.DataType | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """Append a node with one output; it has the node's name."""
        if op_type == "ReduceMax":
            return self._largest(name, inputs, shape, **attributes)
        return super().emit(op_type, name, inputs, shape, dtype, **attributes)

    def emit_microsoft(
        self, op_type: str, name: str, inputs: Sequence[ir.Value | None], shape: Dims, **attributes: int
    ) -> ir.Value:
        """Append a node of com.microsoft with one output; absent inputs at the end are left out."""
        given = list(inputs)
        while given[-1] is None:
            given.pop()
        return self.append(op_type, name, given, [(name, shape, self.dtype)], attributes, MICROSOFT)[0]

    def _largest(self, name: str, inputs: Sequence[ir.Value | None], shape: Dims, keepdims: int = 1) -> ir.Value:
        """The largest of each row [T, 1]. ReduceMax gives its axes as the second input."""
        assert keepdims == 1
        assert shape[-1] == 1
        outputs = [(name, shape, self.dtype), (f"{name}.places", shape, ir.DataType.INT64)]
        return self.append("TopK", name, [inputs[0], self.integers(1)], outputs, {"axis": -1, "sorted": 0})[0]
