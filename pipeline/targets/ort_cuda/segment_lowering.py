"""Lowers a segment of the IR to its ONNX model for onnxruntime's CUDA provider.

    plain weight           Gemm(x, W, b)
    2, 4, 8 bit codes      com.microsoft::MatMulNBits(x, codes, scales, zero_points?, b?), scales in x's type
    float8 codes           Gemm(x, W, b), W stored in x's type: the provider would write W out in each step
    x quantized to 8 bits  rounded to its codes and back before any of these: the matmuls compute in x's type
    quantized embedding    com.microsoft::GatherBlockQuantized(codes, ids, scales, zero_points?), cut to whole columns
    Swish(x; alpha)        Mul(x, Sigmoid(Mul(x, alpha)))

Operators of com.microsoft are copied: a node that the provider has no kernel for is named when the artifact is loaded
(runtime/cuda/ort_segments.py).
"""

import logging
from collections.abc import Mapping
from typing import ClassVar

import onnx_ir as ir

from ingot.artifact.launch_program import ActivationType
from ingot.errors import PassError
from ingot.passes.lowering.nbits_packing import UnpackedWeight
from ingot.passes.quantization.activation_nodes import dequantizer
from ingot.passes.weights import float32_values, is_stored
from ingot.pipeline.targets.ort_cuda.segment_builder import NBitsInputs, OrtSegmentBuilder
from ingot.pipeline.targets.segments.activation_codes import quantized_rows
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.segment_builder import dims
from ingot.pipeline.targets.segments.segment_lowering import Handler, SegmentLowering
from ingot.pipeline.targets.segments.stages import ATTENTION, SegmentStage

_LOG = logging.getLogger("ingot.ort_cuda")


def is_kernel(node: ir.Node) -> bool:
    """Report whether one of Ingot's kernels computes the node: attention, and the gather where a program's head begins.

    That gather picks the rows that need logits.
    """
    indices = node.inputs[1] if node.op_type == "Gather" else None
    return node.op_type == ATTENTION or (indices is not None and indices.name == "logits_indices")


def lower_ort_segment(stage: SegmentStage, activation_type: ActivationType) -> Segment:
    """Lower one segment. PassError names a node that onnxruntime has no form for."""
    return OrtSegmentLowering(stage, activation_type).run()


class OrtSegmentLowering(SegmentLowering):
    """Lowers the nodes of one stage, each after the nodes that it reads."""

    engine: ClassVar[str] = "onnxruntime"
    builder = OrtSegmentBuilder
    b: OrtSegmentBuilder

    def linear(self, node: ir.Node) -> ir.Value:
        """y = x @ W^T + b in the activations' type."""
        x, dequantize = self._activations(node), _weight_dequantizer(node.inputs[1])
        if dequantize is None:
            return self.b.linear(node, x)
        if _is_float8(dequantize):
            _LOG.info(
                "%s: onnxruntime has no float8 matmul; the weight is stored in %s", node.name, self.b.activation_type
            )
            return self.b.linear(node, x)
        return self._matmul_nbits(node, NBitsInputs(self.b, UnpackedWeight.read(dequantize)), x)

    def _activations(self, node: ir.Node) -> ir.Value:
        source = dequantizer(node)
        if source is None:
            assert node.inputs[0] is not None
            return self.read(node.inputs[0])
        if self.b.activation_type == "bf16":
            raise PassError(
                f"{node.name!r} reads activations in 8 bits, which onnxruntime's CUDA provider makes only from float16 "
                "and float32; set gpu.activations to float16"
            )
        return quantized_rows(self.b, source, self.read)

    def _matmul_nbits(self, node: ir.Node, given: NBitsInputs, x: ir.Value) -> ir.Value:
        b, weight, bias = self.b, given.weight, node.inputs[2] if len(node.inputs) > 2 else None
        vector = None
        if bias is not None:
            vector = b.weight(bias.name or "", b.dtype, (weight.rows,), lambda: float32_values(bias))
        inputs = [x, given.matmul_codes, given.scales, given.zero_points, None, vector]
        sizes = {"K": weight.columns, "N": weight.rows, "bits": weight.bits, "block_size": weight.block_size}
        return b.emit_microsoft("MatMulNBits", node.name or "", inputs, dims(node.outputs[0]), **sizes)

    def _gather(self, node: ir.Node) -> None:
        dequantize, ids = _weight_dequantizer(node.inputs[0]), node.inputs[1]
        if dequantize is None or _is_float8(dequantize):
            self.generic(node)
            return
        assert ids is not None
        self.b.values[node.outputs[0]] = self._gather_nbits(node, dequantize, self.read(ids))

    def _gather_nbits(self, node: ir.Node, dequantize: ir.Node, ids: ir.Value) -> ir.Value:
        """Rows of a quantized embedding."""
        b, given = self.b, NBitsInputs(self.b, UnpackedWeight.read(dequantize))
        weight, shape, path = given.weight, dims(node.outputs[0]), node.name or ""
        padded = weight.num_blocks * weight.block_size
        is_whole = padded == weight.columns
        sizes = {"bits": weight.bits, "block_size": weight.block_size, "gather_axis": 0, "quantize_axis": 1}
        inputs = [given.gather_codes, ids, given.scales, given.zero_points]
        rows = b.emit_microsoft(
            "GatherBlockQuantized", path if is_whole else f"{path}.blocks", inputs, [shape[0], padded], **sizes
        )
        if is_whole:
            return rows
        bounds = [b.integers(number) for number in (0, weight.columns, 1)]
        return b.emit("Slice", path, [rows, *bounds], shape)

    def _swish(self, node: ir.Node) -> None:
        self.sigmoid_gate(node, 1.0)

    handlers: ClassVar[Mapping[str, Handler]] = {**SegmentLowering.handlers, "Gather": _gather, "Swish": _swish}


def _weight_dequantizer(operand: ir.Value | None) -> ir.Node | None:
    """The DequantizeLinear over stored codes that makes an operand."""
    producer = None if operand is None else operand.producer()
    if operand is None or producer is None or producer.op_type != "DequantizeLinear":
        return None
    return producer if is_stored(operand) else None


def _is_float8(dequantize: ir.Node) -> bool:
    """Report whether the codes are 8-bit floats, which MatMulNBits and GatherBlockQuantized do not take."""
    codes = dequantize.inputs[0]
    return codes is not None and codes.dtype == ir.DataType.FLOAT8E4M3FN
