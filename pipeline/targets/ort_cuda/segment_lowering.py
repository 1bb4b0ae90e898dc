"""A segment of the IR -> its ONNX model for onnxruntime's CUDA provider.

What has a form of its own for TensorRT only (norms without weights) stays what it is, and operators of com.microsoft
pass: a node that the provider has no kernel for is named when the artifact is loaded (runtime/cuda/ort_segments.py).

    Swish(x; alpha)        Mul(x, Sigmoid(Mul(x, alpha)))
"""

from collections.abc import Callable
from typing import ClassVar

import onnx_ir as ir

from ingot.passes.lowering.lower_onnxruntime_cpu import MICROSOFT
from ingot.pipeline.targets.ort_cuda.segment_builder import (
    OrtSegmentBuilder,
    is_float8,
    lower_linear,
    lower_lookup,
    weight_dequantizer,
)
from ingot.pipeline.targets.segments.builder import Compute
from ingot.pipeline.targets.segments.lowering import SegmentLowering
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.stages import SegmentStage


def lower_ort_segment(stage: SegmentStage, compute: Compute) -> Segment:
    """Lower one segment. PassError names a node that has no form."""
    return OrtSegmentLowering(stage, compute).run()


class OrtSegmentLowering(SegmentLowering):
    """One walk from the outputs to what they need."""

    engine: ClassVar[str] = "onnxruntime"
    domains: ClassVar[tuple[str, ...]] = ("", MICROSOFT)

    def __init__(self, stage: SegmentStage, compute: Compute) -> None:
        super().__init__(stage, compute)
        self.b: OrtSegmentBuilder = OrtSegmentBuilder.of(stage.nodes, compute)

    def linear(self, node: ir.Node) -> ir.Value:
        """y = x @ W^T + b in the compute dtype."""
        return lower_linear(self.b, node, self.read)

    def handler(self, node: ir.Node) -> Callable[[ir.Node], None]:
        """What lowers the node."""
        match node.op_type:
            case "RMSNormalization":
                return self.generic
            case "Gather":
                return self._gather
            case "Swish":
                return self._swish
            case _:
                return super().handler(node)

    def _gather(self, node: ir.Node) -> None:
        dequantize, ids = weight_dequantizer(node.inputs[0]), node.inputs[1]
        if dequantize is None or is_float8(dequantize):
            self.generic(node)
            return
        assert ids is not None
        self.b.values[node.outputs[0]] = lower_lookup(self.b, node, dequantize, self.read(ids))

    def _swish(self, node: ir.Node) -> None:
        self.sigmoid_gate(node, 1.0)
