"""One product of rows with a stored weight as its launches.

Few rows: the weight is read as it is stored, by the kernel of its form, and its columns are shared out. Many rows: a
weight of 4 or 8 bits in blocks is written out in 16 bits first, in slices that stay in the card's cache, and multiplied
by the kernel of plain weights: from some hundred rows on multiplications are what a product costs, and that kernel does
nothing else. Where the table of tiles says so a library's kernel multiplies by a plain weight.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ingot.artifact.launch_program import (
    ELEMENT_BYTES,
    Argument,
    BufferArgument,
    Library,
    LibraryMatmul,
    WeightArgument,
)
from ingot.passes.weights import float32_values
from ingot.pipeline.targets.cuda import weight_layouts as weight_forms
from ingot.pipeline.targets.cuda.fusions import Epilogue
from ingot.pipeline.targets.cuda.lowering_context import Rows, Scope
from ingot.pipeline.targets.cuda.tiles import FEW_ROWS, SPAN, ProductShape, Tile

DEQUANTIZED_FROM = 256  # rows
_SLICE_BYTES = 32 * 2**20  # of 16-bit weights: with the rows they meet they stay in the cache of a data-centre card
_SLICE_STEP = 256  # rows of a weight: the widest tile
_DEQUANTIZED_TILE = 64
_BAND = 8


@dataclass(frozen=True)
class _Slice:
    """Rows first .. first + count - 1 of the weight: columns of the result."""

    first: int
    count: int


class Product:
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
        if codes is not None and weight_forms.takes_codes(self.node, codes.kind):
            assert dequantize is not None
            weight, scales = weight_forms.byte_rows(self.scope.builder, dequantize)
            x = Rows(codes.codes, codes.columns, codes.columns)
            self._matmul(x, weight, codes.kind, codes.scales, scales)
        elif dequantize is None:
            self._matmul(self._input(), self._plain(), 0)
        elif weight_forms.float8(dequantize):
            weight, scales = weight_forms.byte_rows(self.scope.builder, dequantize)
            self._matmul(self._input(), weight, weight_forms.FP8_WEIGHT, None, scales)
        elif self.scope.rows < DEQUANTIZED_FROM:
            self._nbits(self._input(), weight_forms.spans(self.scope.builder, dequantize))
        else:
            self._dequantized(self._input(), weight_forms.spans(self.scope.builder, dequantize))

    def _input(self) -> Rows:
        return self.scope.read(self.node.inputs[0], self.node)

    def _plain(self) -> WeightArgument:
        operand, builder = self.operand, self.scope.builder
        if not self.is_transposed:
            return builder.weight(operand.name or "", builder.activation_type, lambda: float32_values(operand))
        name = f"{operand.name}.transposed"
        return builder.weight(name, builder.activation_type, lambda: np.ascontiguousarray(float32_values(operand).T))

    def _matmul(
        self,
        x: Rows,
        weight: BufferArgument | WeightArgument,
        kind: int,
        x_scales: Argument | None = None,
        weight_scales: Argument | None = None,
        part: _Slice | None = None,
    ) -> None:
        bits, n = 16 if kind == 0 else 8, part.count if part else self.n
        tile = self._tile(ProductShape(kernel="matmul", rows=self.scope.rows, n=n, columns=self.columns, bits=bits))
        if tile.library and self._is_for_libraries():
            self._by_library(tile.library, x, weight, part or _Slice(0, self.n))
            return
        splits = 1 if part else min(tile.splits, -(-self.columns // tile.depth))
        constants = {
            "TILE_ROWS": tile.rows,
            "TILE_COLUMNS": tile.depth,
            "BAND": _BAND,
            "KIND": kind,
            "UPCAST": False,
        }
        programs = -(-n // tile.columns) * -(-self.scope.rows // tile.rows)
        given = {"x": x.buffer, "weight": weight, "x_scales": x_scales, "weight_scales": weight_scales}
        self._launch("matmul", (programs, splits), constants, given, x, tile, splits, part)

    def _is_for_libraries(self) -> bool:
        """Whether nothing is asked that libraries lack: a cap, a bias of another type than the result's."""
        is_wide = self.epilogue.result.is_graph_output() and self.scope.builder.activation_type != "fp32"
        return not self.epilogue.softcap and not (is_wide and self._bias() is not None)

    def _by_library(self, library: Library, x: Rows, weight: BufferArgument | WeightArgument, part: _Slice) -> None:
        scope = self.scope
        scope.builder.call(
            LibraryMatmul(
                library=library,
                rows=scope.rows,
                n=part.count,
                columns=self.columns,
                x=x.buffer,
                weight=weight,
                bias=self._bias(),
                out=_from_column(scope.make(self.epilogue.result).buffer, part.first),
                x_stride=x.stride,
                out_stride=self.n,
                alpha=self.epilogue.alpha,
                node=self.node.name or "",
            )
        )

    def _dequantized(self, x: Rows, weight: weight_forms.Spans) -> None:
        """Slice after slice; a bias has no slices, and so its weight has none either."""
        builder = self.scope.builder
        row_bytes = self.columns * ELEMENT_BYTES[builder.activation_type]
        most = max(_SLICE_BYTES // row_bytes // _SLICE_STEP, 1) * _SLICE_STEP if self._bias() is None else self.n
        place = builder.buffer(f"{self.node.name}.dequantized", min(most, self.n) * self.columns)
        shape = {"N": self.n, "COLUMNS": self.columns, "GROUPS": weight.groups, "TILE": _DEQUANTIZED_TILE}
        for first in range(0, self.n, most):
            part = _Slice(first, min(most, self.n - first))
            builder.launch(
                "dequantize_nbits",
                self.node,
                (-(-part.count // _DEQUANTIZED_TILE), weight.spans),
                {**weight.constants, **shape},
                codes=weight.codes,
                scales=weight.scales,
                zero_points=weight.zero_points,
                out=place,
                first=part.first,
                count=part.count,
            )
            self._matmul(x, place, 0, part=part)

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
        part: _Slice | None = None,
    ) -> None:
        """The launch; and the capped sum of its parts where the cap has to wait for that."""
        scope, epilogue, bias = self.scope, self.epilogue, self._bias()
        result, is_last = epilogue.result, epilogue.result.is_graph_output()
        out = scope.make_parts(result, splits) if splits > 1 else scope.make(result)
        part = part or _Slice(0, self.n)
        constants |= {
            "N": part.count,
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
            out=_from_column(out.buffer, part.first),
            rows=scope.rows,
            x_stride=x.stride,
            out_stride=self.n,
            alpha=epilogue.alpha,
            softcap=epilogue.softcap,
        )
        if splits > 1 and (is_last or epilogue.softcap):
            scope.map(self.node, out, scope.make(result), softcap=epilogue.softcap)

    def _tile(self, shape: ProductShape) -> Tile:
        is_float32 = self.scope.builder.activation_type == "fp32"
        return self.scope.builder.shared.tiles.choose(shape.model_copy(update={"is_float32": is_float32}))

    def _bias(self) -> WeightArgument | None:
        """The bias, scaled as the product is."""
        bias = self.node.inputs[2] if len(self.node.inputs) > 2 else None
        if bias is None:
            return None
        alpha, builder = np.float32(self.epilogue.alpha), self.scope.builder
        if alpha == 1:
            return self.scope.vector(bias)
        return builder.weight(f"{bias.name}.scaled", builder.activation_type, lambda: float32_values(bias) * alpha)


def _from_column(buffer: BufferArgument, column: int) -> BufferArgument:
    return buffer.model_copy(update={"offset": buffer.offset + column}) if column else buffer
