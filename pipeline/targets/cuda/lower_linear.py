"""Lowers linear layers, by the forms of weight and input.

    plain weight                                matmul: the weight in the activations' type
    4 or 8 bits                                 matmul_nbits; for many rows dequantize_nbits, then matmul
    float8_e4m3fn per channel                   matmul, the codes widened before it
    input and weight both int8 or both float8   quantize_rows once for all layers that read the input; matmul of codes

An input rounded to 8 bits before another form of weight is rounded and scaled back. Matmuls of few rows leave their
result as split-K partials, which the reader adds. See lower_matmul.py for the launches.
"""

import onnx_ir as ir

from ingot.artifact.launch_program import BufferArgument
from ingot.errors import PassError
from ingot.passes.weights import is_stored
from ingot.pipeline.targets.cuda import weight_layouts
from ingot.pipeline.targets.cuda.fusions import Rounding
from ingot.pipeline.targets.cuda.lower_matmul import MatmulLowering
from ingot.pipeline.targets.cuda.lowering_context import LoweringContext, QuantizedRows, columns_of
from ingot.sizes import next_power_of_two

_CODE_TYPES = {weight_layouts.FP8: "fp8e4nv", weight_layouts.INT8: "i8"}


def lower_gemm(context: LoweringContext, node: ir.Node) -> None:
    """Lower y = softcap(alpha * (x @ W^T + b)). PassError for a Gemm that is not a linear layer."""
    for name, usual in (("transA", 0), ("transB", 1)):
        if node.attributes.get_int(name, 0) != usual:
            raise PassError(f"{node.name!r} (Gemm) has {name} {1 - usual}; the CUDA kernels compute x @ W^T + b")
    if any((node.attributes.get_float(name, 1.0) or 0.0) != 1.0 for name in ("alpha", "beta")):
        raise PassError(f"{node.name!r} (Gemm) has an alpha or a beta; the CUDA kernels compute x @ W^T + b")
    operand = node.inputs[1]
    assert operand is not None
    if not is_stored(operand):
        raise PassError(f"{node.name!r} (Gemm) multiplies by {operand.name!r}, which is not a stored weight")
    MatmulLowering(context, node, operand).lower()


def lower_matmul(context: LoweringContext, node: ir.Node) -> None:
    """Lower y = x @ W, W stored [columns, n] in floats."""
    operand = node.inputs[1]
    if operand is None or not is_stored(operand) or operand.shape is None or len(operand.shape) != 2:
        raise PassError(f"{node.name!r} (MatMul) multiplies by something other than a stored matrix")
    MatmulLowering(context, node, operand, is_transposed=True).lower()


def lower_rounding(context: LoweringContext, node: ir.Node, rounding: Rounding) -> None:
    """Lower rounded activations: 8-bit codes for layers that multiply codes, floats for all other readers."""
    result = node.outputs[0]
    if any(weight_layouts.takes_codes(reader, rounding.kind) for reader in result.consumers()):
        context.codes_of[result] = _quantize(context, node, rounding)
    if not all(weight_layouts.takes_codes(reader, rounding.kind) for reader in result.consumers()):
        _launch(context, node, rounding, context.make(result).buffer, None)


def _quantize(context: LoweringContext, node: ir.Node, rounding: Rounding) -> QuantizedRows:
    columns = columns_of(rounding.source)
    codes = context.builder.buffer(f"{node.name}.codes", context.rows * columns, _CODE_TYPES[rounding.kind])
    scales = context.builder.buffer(f"{node.name}.scales", context.rows, "fp32")
    _launch(context, node, rounding, codes, scales)
    return QuantizedRows(codes, scales, columns, rounding.kind)


def _launch(
    context: LoweringContext, node: ir.Node, rounding: Rounding, codes: BufferArgument, scales: BufferArgument | None
) -> None:
    x = context.read(rounding.source, node)
    context.builder.launch(
        "quantize_rows",
        node,
        (context.rows,),
        {
            "COLUMNS": x.columns,
            "BLOCK": next_power_of_two(x.columns, 16),
            "KIND": rounding.kind,
            "IS_STATIC": rounding.scale is not None,
            "SCALES_BACK": scales is None,
        },
        x=x.buffer,
        codes=codes,
        scales=scales,
        x_stride=x.stride,
        static_scale=float(rounding.scale or 0.0),
    )
