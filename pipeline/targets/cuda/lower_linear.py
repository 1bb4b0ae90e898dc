"""Linear layers of the IR as launches, for each form that a weight and its input have.

    plain                                       matmul: the weight in the activations' type
    4 or 8 bits                                 matmul_nbits; of many rows dequantize_nbits, then matmul
    float8_e4m3fn by channel                    matmul, the codes widened before the product
    input and weight both int8 or both float8   quantize_rows once for all layers that read the input; matmul of codes

An input that is rounded to 8 bits in front of another form of weight is rounded and scaled back. Products of few rows
leave their result in parts, which whoever reads it adds.
"""

import onnx_ir as ir

from ingot.artifact.launch_program import BufferArgument
from ingot.errors import PassError
from ingot.passes.weights import is_stored
from ingot.pipeline.targets.cuda import weight_layouts as weight_forms
from ingot.pipeline.targets.cuda.fusions import Rounding
from ingot.pipeline.targets.cuda.lower_matmul import Product
from ingot.pipeline.targets.cuda.lowering_context import QuantizedRows, Scope, columns_of
from ingot.pipeline.targets.cuda.program_builder import next_power_of_two

_CODE_TYPES = {weight_forms.FP8: "fp8e4nv", weight_forms.INT8: "i8"}


def lower_gemm(scope: Scope, node: ir.Node) -> None:
    """y = softcap(alpha * (x @ W^T + b)). PassError for another Gemm than a linear layer's."""
    for name, usual in (("transA", 0), ("transB", 1)):
        if node.attributes.get_int(name, 0) != usual:
            raise PassError(f"{node.name!r} (Gemm) has {name} {1 - usual}; the CUDA kernels compute x @ W^T + b")
    if any((node.attributes.get_float(name, 1.0) or 0.0) != 1.0 for name in ("alpha", "beta")):
        raise PassError(f"{node.name!r} (Gemm) has an alpha or a beta; the CUDA kernels compute x @ W^T + b")
    operand = node.inputs[1]
    assert operand is not None
    if not is_stored(operand):
        raise PassError(f"{node.name!r} (Gemm) multiplies by {operand.name!r}, which is no stored weight")
    Product(scope, node, operand).lower()


def lower_matmul(scope: Scope, node: ir.Node) -> None:
    """y = x @ W, W stored [columns, n] in floats."""
    operand = node.inputs[1]
    if operand is None or not is_stored(operand) or operand.shape is None or len(operand.shape) != 2:
        raise PassError(f"{node.name!r} (MatMul) has no stored matrix for its second operand")
    Product(scope, node, operand, is_transposed=True).lower()


def lower_rounding(scope: Scope, node: ir.Node, rounding: Rounding) -> None:
    """Rows of 8-bit codes for the layers that multiply those; floats for all others that read the node."""
    result = node.outputs[0]
    if any(weight_forms.takes_codes(reader, rounding.kind) for reader in result.consumers()):
        scope.rounded[result] = _rounded(scope, node, rounding)
    if not all(weight_forms.takes_codes(reader, rounding.kind) for reader in result.consumers()):
        _round(scope, node, rounding, scope.make(result).buffer, None)


def _rounded(scope: Scope, node: ir.Node, rounding: Rounding) -> QuantizedRows:
    columns = columns_of(rounding.source)
    codes = scope.builder.buffer(f"{node.name}.codes", scope.rows * columns, _CODE_TYPES[rounding.kind])
    scales = scope.builder.buffer(f"{node.name}.scales", scope.rows, "fp32")
    _round(scope, node, rounding, codes, scales)
    return QuantizedRows(codes, scales, columns, rounding.kind)


def _round(
    scope: Scope, node: ir.Node, rounding: Rounding, codes: BufferArgument, scales: BufferArgument | None
) -> None:
    x = scope.read(rounding.source, node)
    scope.builder.launch(
        "quantize_rows",
        node,
        (scope.rows,),
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
