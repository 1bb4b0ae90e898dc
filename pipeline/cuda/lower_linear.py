"""Linear layers of the IR as launches, for each form that a weight and its input have.

    plain                                       matmul: the weight in the activations' type
    4 or 8 bits                                 matmul_nbits
    float8_e4m3fn by channel                    matmul, the codes widened before the product
    input and weight both int8 or both float8   quantize_rows once for all layers that read the input; matmul of codes

An input that is rounded to 8 bits in front of another form of weight is rounded and scaled back. Products of few rows
leave their result in parts, which whoever reads it adds.
"""

from typing import Any

import numpy as np
import onnx_ir as ir

from ingot.artifact.launch_program import Argument, BufferArgument
from ingot.errors import PassError
from ingot.passes.weight_values import float32_values, is_stored
from ingot.pipeline.cuda import weight_forms
from ingot.pipeline.cuda.fusions import Epilogue, Rounding
from ingot.pipeline.cuda.placed_rows import QuantizedRows, Rows
from ingot.pipeline.cuda.program_builder import next_power_of_two
from ingot.pipeline.cuda.scope import Scope, columns_of
from ingot.pipeline.cuda.tiles import FEW_ROWS, SPAN, ProductShape, Tile

_CODE_TYPES = {weight_forms.FP8: "fp8e4nv", weight_forms.INT8: "i8"}
_BAND = 8


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
    _Product(scope, node, operand).lower()


def lower_matmul(scope: Scope, node: ir.Node) -> None:
    """y = x @ W, W stored [columns, n] in floats."""
    operand = node.inputs[1]
    if operand is None or not is_stored(operand) or operand.shape is None or len(operand.shape) != 2:
        raise PassError(f"{node.name!r} (MatMul) has no stored matrix for its second operand")
    _Product(scope, node, operand, is_transposed=True).lower()


def lower_rounding(scope: Scope, node: ir.Node, rounding: Rounding) -> None:
    """Rows of 8-bit codes for the layers that multiply those; floats for all others that read the node."""
    result = node.outputs[0]
    if any(_takes_codes(reader, rounding.kind) for reader in result.consumers()):
        scope.rounded[result] = _rounded(scope, node, rounding)
    if not all(_takes_codes(reader, rounding.kind) for reader in result.consumers()):
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


def _takes_codes(reader: ir.Node, kind: int) -> bool:
    """Whether a layer multiplies 8-bit codes of this kind by its own."""
    dequantize = weight_forms.quantizer(reader.inputs[1]) if reader.op_type == "Gemm" else None
    if dequantize is None:
        return False
    if kind == weight_forms.FP8:
        codes = dequantize.inputs[0]
        return codes is not None and codes.dtype == ir.DataType.FLOAT8E4M3FN and weight_forms.float8(dequantize)
    return weight_forms.is_plain_int8(dequantize)


class _Product:
    """One product on its way to its launch."""

    def __init__(self, scope: Scope, node: ir.Node, operand: ir.Value, *, is_transposed: bool = False) -> None:
        assert operand.shape is not None
        self.scope, self.node, self.operand, self.is_transposed = scope, node, operand, is_transposed
        n, columns = (int(size) for size in operand.shape.numpy())
        self.n, self.columns = (columns, n) if is_transposed else (n, columns)
        found = scope.fusions.at.get(node)
        self.epilogue = found if isinstance(found, Epilogue) else Epilogue(node.outputs[0])

    def lower(self) -> None:
        """By the form of the weight, and of the input."""
        dequantize = weight_forms.quantizer(self.operand)
        codes = self.scope.rounded.get(self.node.inputs[0]) if self.node.inputs[0] is not None else None
        if codes is not None and _takes_codes(self.node, codes.kind):
            assert dequantize is not None
            weight, scales = weight_forms.byte_rows(self.scope.builder, dequantize)
            x = Rows(codes.codes, codes.columns, codes.columns)
            self._matmul(x, weight, codes.kind, codes.scales, scales)
        elif dequantize is None:
            self._matmul(self._input(), self._plain(), 0)
        elif weight_forms.float8(dequantize):
            weight, scales = weight_forms.byte_rows(self.scope.builder, dequantize)
            self._matmul(self._input(), weight, weight_forms.FP8_WEIGHT, None, scales)
        else:
            self._nbits(self._input(), weight_forms.spans(self.scope.builder, dequantize))

    def _input(self) -> Rows:
        return self.scope.read(self.node.inputs[0], self.node)

    def _plain(self) -> Argument:
        operand, builder = self.operand, self.scope.builder
        if not self.is_transposed:
            return builder.weight(operand.name or "", builder.activation_type, lambda: float32_values(operand))
        name = f"{operand.name}.transposed"
        return builder.weight(name, builder.activation_type, lambda: np.ascontiguousarray(float32_values(operand).T))

    def _matmul(
        self,
        x: Rows,
        weight: Argument,
        kind: int,
        x_scales: Argument | None = None,
        weight_scales: Argument | None = None,
    ) -> None:
        bits = 16 if kind == 0 else 8
        tile = self._tile(
            ProductShape(kernel="matmul", rows=self.scope.rows, n=self.n, columns=self.columns, bits=bits)
        )
        splits = min(tile.splits, -(-self.columns // tile.depth))
        constants = {
            "TILE_ROWS": tile.rows,
            "TILE_COLUMNS": tile.depth,
            "BAND": _BAND,
            "KIND": kind,
            "UPCAST": False,
        }
        programs = -(-self.n // tile.columns) * -(-self.scope.rows // tile.rows)
        given = {"x": x.buffer, "weight": weight, "x_scales": x_scales, "weight_scales": weight_scales}
        self._launch("matmul", (programs, splits), constants, given, x, tile, splits)

    def _nbits(self, x: Rows, weight: weight_forms.Spans) -> None:
        shape = ProductShape(
            kernel="matmul_nbits",
            rows=self.scope.rows,
            n=self.n,
            columns=self.columns,
            bits=weight.bits,
            group=weight.group,
        )
        tile = self._tile(shape)
        at_once = tile.depth // SPAN
        if weight.spans % at_once or (at_once > 1 and weight.group % tile.depth):
            at_once = 1  # a step has one scale, and all steps are whole
        splits = min(tile.splits, weight.spans // at_once)
        constants = {
            **weight.constants,
            "GROUPS": weight.groups,
            "SPANS_AT_ONCE": at_once,
            "TILE_ROWS": tile.rows,
            "SCALE_WEIGHTS": self.scope.rows > FEW_ROWS,
            "DTYPE": self.scope.builder.activation_type,
        }
        grid = (-(-self.scope.rows // tile.rows), -(-self.n // tile.columns), splits)
        given = {"x": x.buffer, "codes": weight.codes, "scales": weight.scales, "zero_points": weight.zero_points}
        self._launch("matmul_nbits", grid, constants, given, x, tile, splits)

    def _launch(
        self,
        kernel: str,
        grid: tuple[int, ...],
        constants: dict[str, Any],
        given: dict[str, Argument | None],
        x: Rows,
        tile: Tile,
        splits: int,
    ) -> None:
        """The launch; and the capped sum of its parts where the cap has to wait for that."""
        scope, epilogue, bias = self.scope, self.epilogue, self._bias()
        result, is_last = epilogue.result, epilogue.result.is_graph_output()
        out = scope.make_parts(result, splits) if splits > 1 else scope.make(result)
        constants |= {
            "N": self.n,
            "COLUMNS": self.columns,
            "SPLITS": splits,
            "TILE": tile.columns,
            "HAS_BIAS": bias is not None,
            "HAS_SOFTCAP": epilogue.softcap > 0,
        }
        scope.builder.launch(
            kernel,
            self.node,
            grid,
            constants,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **given,
            bias=bias,
            out=out.buffer,
            rows=scope.rows,
            x_stride=x.stride,
            out_stride=self.n,
            alpha=epilogue.alpha,
            softcap=epilogue.softcap,
        )
        if splits > 1 and (is_last or epilogue.softcap):
            scope.map(self.node, out, scope.make(result), softcap=epilogue.softcap)

    def _tile(self, shape: ProductShape) -> Tile:
        return self.scope.builder.shared.tiles.choose(shape)

    def _bias(self) -> Argument | None:
        """The bias, scaled as the product is."""
        bias = self.node.inputs[2] if len(self.node.inputs) > 2 else None
        if bias is None:
            return None
        alpha, builder = np.float32(self.epilogue.alpha), self.scope.builder
        if alpha == 1:
            return self.scope.vector(bias)
        return builder.weight(f"{bias.name}.scaled", builder.activation_type, lambda: float32_values(bias) * alpha)
