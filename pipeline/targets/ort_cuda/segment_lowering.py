"""Lowers a segment of the IR to its ONNX model for onnxruntime's CUDA provider.

    plain weight           Gemm(x, W, b)
    2, 4, 8 bit codes      com.microsoft::MatMulNBits(x, codes, scales, zero_points?, b?), scales in x's type
    float8 codes           Gemm(x, W, b), W stored in x's type: the provider would write W out in each step
    x quantized to 8 bits  rounded to its codes and back before any of these: the matmuls compute in x's type
    quantized embedding    com.microsoft::GatherBlockQuantized(codes, ids, scales, zero_points?), cut to whole columns
    Swish(x; alpha)        Mul(x, Sigmoid(Mul(x, alpha)))
    maximum of a row       TopK: the provider's ReduceMax needs cuDNN, which nothing else here needs

All weights are inputs of the segment. The provider could repack constants of MatMulNBits for CUTLASS kernels
(ORT_FPA_INTB_GEMM, off by default); as inputs they are stored once for all their readers, and all layers of one shape
share a session, each of which needs workspaces on the GPU.

Operators of com.microsoft are copied: a node that the provider has no kernel for is named when the artifact is loaded
(runtime/cuda/ort_segments.py).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.programs.launch_program import ActivationType
from ingot.errors import PassError
from ingot.passes.lowering.lower_onnxruntime_cpu import MICROSOFT
from ingot.passes.lowering.nbits_packing import UnpackedWeight
from ingot.passes.quantization.activation_nodes import dequantizer
from ingot.passes.weights import float32_values, is_stored
from ingot.pipeline.targets.segments.activation_codes import quantized_rows
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.segment_builder import Dims, SegmentBuilder, dims
from ingot.pipeline.targets.segments.segment_lowering import Handler, SegmentLowering
from ingot.pipeline.targets.segments.stages import ATTENTION, SegmentStage

_BYTES = ir.DataType.UINT8
_log = logging.getLogger("ingot.ort_cuda")


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
            _log.info(
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
