"""Linear layers and look-ups in the forms of onnxruntime's CUDA provider.

    plain                  Gemm(x, W, b)
    2, 4, 8 bit codes      com.microsoft::MatMulNBits(x, codes, scales, zero_points?, b?), scales in the compute dtype
    float8 codes           Gemm(x, W, b), W stored in the compute dtype: the provider would write W out in each step
    x quantized to 8 bits  rounded to its codes and back before any of these: the products are in the compute dtype
    quantized table        com.microsoft::GatherBlockQuantized(codes, ids, scales, zero_points?), cut to whole columns

All weights are inputs of the segment. The provider could repack constants of MatMulNBits for kernels of CUTLASS
(ORT_FPA_INTB_GEMM, off by default); as inputs they are stored once, wherever they are read, and all layers of one shape
share a session, which is what a card has to hold workspaces for.
"""

import logging
from collections.abc import Callable

import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.lowering.nbits_packing import QuantizedWeight
from ingot.passes.quantization.activation_quantization import dequantizer
from ingot.passes.weight_values import float32_values
from ingot.pipeline.ort_cuda.quantized_weights import SegmentWeight, is_float8, weight_dequantizer
from ingot.pipeline.ort_cuda.segment_builder import OrtSegmentBuilder
from ingot.pipeline.tensorrt.activation_codes import quantized_rows
from ingot.pipeline.tensorrt.linear import plain_linear
from ingot.pipeline.tensorrt.segment_builder import dims

Read = Callable[[ir.Value], ir.Value]

_LOG = logging.getLogger("ingot.ort_cuda")


def lower_linear(b: OrtSegmentBuilder, node: ir.Node, read: Read) -> ir.Value:
    """y = x @ W^T + b in the compute dtype; `read` gives the segment's value for one of the IR's."""
    x = _activations(b, node, read)
    dequantize = weight_dequantizer(node.inputs[1])
    if dequantize is None:
        return plain_linear(b, node, x)
    if is_float8(dequantize):
        _LOG.info("%s: onnxruntime has no float8 matmul for it; the weight is stored in %s", node.name, b.compute)
        return plain_linear(b, node, x)
    return _nbits(b, node, SegmentWeight(b, QuantizedWeight.read(dequantize)), x)


def lower_lookup(b: OrtSegmentBuilder, node: ir.Node, dequantize: ir.Node, ids: ir.Value) -> ir.Value:
    """Rows of a quantized table."""
    given = SegmentWeight(b, QuantizedWeight.read(dequantize))
    weight, shape, path = given.weight, dims(node.outputs[0]), node.name or ""
    padded = weight.num_blocks * weight.block_size
    is_whole = padded == weight.columns
    sizes = {"bits": weight.bits, "block_size": weight.block_size, "gather_axis": 0, "quantize_axis": 1}
    inputs = [given.rows, ids, given.scales, given.zero_points]
    rows = b.emit_microsoft(
        "GatherBlockQuantized", path if is_whole else f"{path}.blocks", inputs, [shape[0], padded], **sizes
    )
    if is_whole:
        return rows
    bounds = [b.integers(number) for number in (0, weight.columns, 1)]
    return b.emit("Slice", path, [rows, *bounds], shape)


def _activations(b: OrtSegmentBuilder, node: ir.Node, read: Read) -> ir.Value:
    source = dequantizer(node)
    if source is None:
        assert node.inputs[0] is not None
        return read(node.inputs[0])
    if b.compute == "bf16":
        raise PassError(
            f"{node.name!r} reads activations in 8 bits, which onnxruntime's CUDA provider makes from float16 and "
            "float32 alone; set gpu.activations to float16"
        )
    return quantized_rows(b, source, read)


def _nbits(b: OrtSegmentBuilder, node: ir.Node, given: SegmentWeight, x: ir.Value) -> ir.Value:
    weight, bias = given.weight, node.inputs[2] if len(node.inputs) > 2 else None
    vector = None
    if bias is not None:
        vector = b.weight(bias.name or "", b.dtype, (weight.rows,), lambda: float32_values(bias))
    inputs = [x, given.codes, given.scales, given.zero_points, None, vector]
    sizes = {"K": weight.columns, "N": weight.rows, "bits": weight.bits, "block_size": weight.block_size}
    return b.emit_microsoft("MatMulNBits", node.name or "", inputs, dims(node.outputs[0]), **sizes)
