"""Lowers linear layers, by the forms of weight and input.

    plain weight                                matmul: the weight in the activations' type
    4 bits, 16-bit input                        matmul_int4, or matmul_int4_wide; for many rows dequantize_nbits, then
                                                matmul
    4 or 8 bits                                 matmul_nbits; for many rows dequantize_nbits, then matmul
    float8_e4m3fn per channel                   matmul, the codes widened before it
    input and weight both int8 or both float8   quantize_rows once for all layers that read the input, or the norm that
                                                makes the input; matmul of codes

An input rounded to 8 bits before another form of weight is rounded and scaled back.

Few rows: the kernel of the weight's form reads it as stored, and its columns are split among programs (split-K); the
partials are the result, which the reader adds. Many rows: a weight of 4 or 8 bits in blocks is first dequantized to 16
bits, in slices that stay in the GPU's cache, and then multiplied by the kernel of plain weights: from some hundred rows
on a matmul is compute-bound, and that kernel only multiplies. A library's kernel multiplies by a plain weight if the
tile table chooses it.

A matmul whose result is only a gate and its factor has them interleaved (weight_layouts.py), and computes the gated
activation where a program has whole sums: without split-K, and where a library cannot be faster.

Batch-invariant programs have one kernel and one tile per weight, whatever the rows: the kernel of the weight's form,
with a fixed split-K. For few rows its programs store the partials; for many rows, whose partials would take too much
memory, each program adds them itself in the same order (kernels/matmul.py, FOLDS).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from ingot.artifact.programs.launch_program import (
    ELEMENT_BYTES,
    Argument,
    BufferArgument,
    Library,
    LibraryMatmul,
    WeightArgument,
)
from ingot.errors import PassError
from ingot.passes.lowering.expand_experts import ROUTE
from ingot.passes.weights import float32_values, is_stored
from ingot.pipeline.targets.cuda import weight_layouts
from ingot.pipeline.targets.cuda.lower.activations import lower_gate, lower_interleaved_gate
from ingot.pipeline.targets.cuda.lower.low_rank import is_adapted, lower_low_rank
from ingot.pipeline.targets.cuda.lower.rows import CODES, make_codes
from ingot.pipeline.targets.cuda.lowering_context import ACTIVATIONS, LaunchContext, RowBuffer
from ingot.pipeline.targets.cuda.tiles import FEW_ROWS, MatmulShape, Tile, packed_constants
from ingot.pipeline.targets.cuda.weight_layouts import Interleaved
from ingot.pipeline.targets.fusions import Epilogue, GatedMatmul, Rounding
from ingot.sizes import ceil_div, next_power_of_two

DEQUANTIZED_FROM = 256  # rows
DIRECT_UP_TO = 1024  # rows of a weight of 4 bits that is multiplied as stored
_DIRECT_UP_TO: Mapping[int | None, int] = {90: 256}  # SM -> rows, where other rows were measured to be faster
_SLICE_BYTES = 32 * 2**20  # 16-bit weights of this size fit the cache of a data-centre GPU with their rows
_SLICE_STEP = 256  # rows of a weight: the widest tile
_SLICE_TILE, _FILLING = 128, 128  # rows of a usual tile, and tiles that fill a GPU: fewer leave it idle
_DEQUANTIZED_TILE = 64
_BAND = 8
_OUTER_VECTORS_SM = 90
NO_GATE = -1


@dataclass(frozen=True)
class _Slice:
    """Rows first .. first + count - 1 of the weight, which are columns of the result."""

    first: int
    count: int


class MatmulLowering:
    """The matmul of a node: x @ W^T, or x @ W if `is_transposed`."""

    def __init__(
        self, context: LaunchContext, node: ir.Node, operand: ir.Value, *, is_transposed: bool = False
    ) -> None:
        assert operand.shape is not None
        self.context, self.node, self.operand, self.is_transposed = context, node, operand, is_transposed
        n, columns = (int(size) for size in operand.shape.numpy())
        self.n, self.columns = (columns, n) if is_transposed else (n, columns)
        found = context.fusions.at.get(node)
        self.epilogue = found if isinstance(found, Epilogue) else Epilogue(node.outputs[0])
        self.gated = found if isinstance(found, GatedMatmul) else None
        self.order: weight_layouts.RowOrder = weight_layouts.IN_ORDER
        if self.gated is not None and self.n % Interleaved.MULTIPLE == 0:
            self.order = Interleaved(self.gated.gate_first)
        self._is_adapted = is_adapted(context, node)
        self._whole: RowBuffer | None = None  # the result before softcap and gate

    def lower(self) -> None:
        """Add the launches for the forms of weight and input."""
        dequantize = weight_layouts.quantizer(self.operand)
        codes = self.context.codes_of.get(self.node.inputs[0]) if self.node.inputs[0] is not None else None
        if codes is not None and weight_layouts.takes_codes(self.node, codes.kind):
            assert dequantize is not None
            weight, scales = weight_layouts.byte_rows(self.context.builder, dequantize, self.order)
            x = RowBuffer(codes.codes, codes.columns, codes.columns)
            self._matmul(x, weight, codes.kind, codes.scales, scales)
        elif dequantize is None:
            self._matmul(self._input(), self._plain(), 0)
        elif weight_layouts.is_float8(dequantize):
            weight, scales = weight_layouts.byte_rows(self.context.builder, dequantize, self.order)
            self._matmul(self._input(), weight, weight_layouts.FP8_WEIGHT, None, scales)
        else:
            self._packed(self._input(), weight_layouts.spans(self.context.builder, dequantize, self.order))
        if self._is_adapted:
            assert self._whole is not None
            lower_low_rank(self.context, self.node, self._unrounded(), self._whole, self.order, self.epilogue.alpha)
        self._finish()
        if self.gated is not None and self.gated.last.outputs[0] not in self.context.rows_of:
            self._gate(self.gated)

    def _gate(self, gated: GatedMatmul) -> None:
        """Launch the gated activation of the result, which the matmul left to another launch."""
        context, result = self.context, self.epilogue.result
        if isinstance(self.order, Interleaved):
            x = context.read(result, gated.last, partials=True)
            lower_interleaved_gate(context, gated.last, gated.gate, x)
            return
        rows, half = context.rows_of[result], self.n // 2
        context.put(gated.gate.gate, rows.slice(0 if gated.gate_first else half, half))
        context.put(gated.gate.up, rows.slice(half if gated.gate_first else 0, half))
        lower_gate(context, gated.last, gated.gate)

    @property
    def _is_invariant(self) -> bool:
        return self.context.builder.shared.batch_invariant

    def _input(self) -> RowBuffer:
        return self.context.read(self.node.inputs[0], self.node)

    def _unrounded(self) -> RowBuffer:
        """The layer's input, before it is rounded to 8 bits."""
        value = self.node.inputs[0]
        sources = (found.source for node, found in self.context.roundings.values() if node.outputs[0] is value)
        return self.context.read(next(sources, value), self.node)

    def _finish(self) -> None:
        """Add partials and cap, where the matmul left that to another launch."""
        result, cap, whole = self.epilogue.result, self.epilogue.softcap, self._whole
        if whole is None:
            return
        is_left = whole.partials > 1 and (result.is_graph_output() or cap > 0)
        if is_left or self._caps_later:
            self.context.map(self.node, whole, self.context.make(result), softcap=cap)

    @property
    def _caps_later(self) -> bool:
        """Report if an adapter is added before the cap."""
        return self._is_adapted and self.epilogue.softcap > 0

    def _plain(self) -> WeightArgument:
        operand, builder, order = self.operand, self.context.builder, self.order
        if not self.is_transposed:
            name = order.name(operand.name)
            return builder.weight(name, builder.activation_type, lambda: order(float32_values(operand)))
        name = order.name(f"{operand.name}.transposed")
        make = partial(np.ascontiguousarray, dtype=np.float32)
        return builder.weight(name, builder.activation_type, lambda: make(order(float32_values(operand).T)))

    def _matmul(
        self,
        x: RowBuffer,
        weight: BufferArgument | WeightArgument,
        kind: int,
        x_scales: Argument | None = None,
        weight_scales: Argument | None = None,
        outputs: _Slice | None = None,
    ) -> None:
        bits, n = 16 if kind == 0 else 8, outputs.count if outputs else self.n
        tile = self._tile(MatmulShape(kernel="matmul", rows=self.context.rows, n=n, columns=self.columns, bits=bits))
        if tile.library and self._fits_libraries():
            self._call_library(tile.library, x, weight, outputs or _Slice(0, self.n))
            return
        splits = 1 if outputs else self._splits(min(tile.splits, ceil_div(self.columns, tile.depth)))
        constants = {
            "TILE_ROWS": tile.rows,
            "TILE_COLUMNS": tile.depth,
            "BAND": _BAND,
            "KIND": kind,
            "UPCAST": False,
        }
        programs = ceil_div(n, tile.columns) * ceil_div(self.context.rows, tile.rows)
        given = {"x": x.buffer, "weight": weight, "x_scales": x_scales, "weight_scales": weight_scales}
        self._launch("matmul", (programs, self._programs(splits)), constants, given, x, tile, splits, outputs)

    def _fits_libraries(self) -> bool:
        """Whether a library computes the epilogue: no softcap, no bias of another type than the result."""
        is_wide = self.epilogue.result.is_graph_output() and self.context.builder.activation_type != "fp32"
        return not self.epilogue.softcap and not (is_wide and self._bias() is not None)

    def _call_library(
        self, library: Library, x: RowBuffer, weight: BufferArgument | WeightArgument, outputs: _Slice
    ) -> None:
        context = self.context
        self._whole = context.make(self.epilogue.result)
        context.builder.call(
            LibraryMatmul(
                library=library,
                rows=context.rows,
                n=outputs.count,
                columns=self.columns,
                x=x.buffer,
                weight=weight,
                bias=self._bias(),
                out=_from_column(self._whole.buffer, outputs.first),
                x_stride=x.stride,
                out_stride=self.n,
                alpha=self.epilogue.alpha,
                node=self.node.name or "",
            )
        )

    def _dequantized(self, x: RowBuffer, weight: weight_layouts.Spans) -> None:
        """Dequantize and multiply slice by slice; a weight with a bias in one piece, because a bias is not sliced.

        A slice fits the cache, but is not so small that its matmul leaves multiprocessors idle.
        """
        builder = self.context.builder
        row_bytes = self.columns * ELEMENT_BYTES[builder.activation_type]
        fitting = max(_SLICE_BYTES // row_bytes // _SLICE_STEP, 1) * _SLICE_STEP
        filling = ceil_div(_FILLING, ceil_div(self.context.rows, _SLICE_TILE)) * _SLICE_TILE
        most = max(fitting, filling) if self._bias() is None else self.n
        dequantized = builder.buffer(f"{self.node.name}.dequantized", min(most, self.n) * self.columns)
        shape = {"N": self.n, "COLUMNS": self.columns, "GROUPS": weight.groups, "TILE": _DEQUANTIZED_TILE}
        for first in range(0, self.n, most):
            outputs = _Slice(first, min(most, self.n - first))
            builder.launch(
                "dequantize_nbits",
                self.node,
                (ceil_div(outputs.count, _DEQUANTIZED_TILE), weight.spans),
                {**weight.constants, **shape, "BITS": weight.bits},
                codes=weight.codes,
                scales=weight.scales,
                zero_points=weight.zero_points,
                out=dequantized,
                first=outputs.first,
                count=outputs.count,
            )
            self._matmul(x, dequantized, 0, outputs=outputs)

    def _packed(self, x: RowBuffer, weight: weight_layouts.Spans) -> None:
        """Multiply by a weight of 4 or 8 bits as stored; or, for many rows, dequantize it first."""
        shape = MatmulShape(
            kernel="matmul_nbits",
            rows=self.context.rows,
            n=self.n,
            columns=self.columns,
            bits=weight.bits,
            group=weight.group,
            is_float32=self.context.builder.activation_type == "fp32",
        )
        direct_up_to = _DIRECT_UP_TO.get(self.context.builder.shared.tiles.sm, DIRECT_UP_TO)
        is_few = shape.rows <= direct_up_to if shape.fits_direct else shape.rows < DEQUANTIZED_FROM
        if is_few or self._is_invariant:
            self._nbits(x, weight, shape)
        else:
            self._dequantized(x, weight)

    def _nbits(self, x: RowBuffer, weight: weight_layouts.Spans, shape: MatmulShape) -> None:
        tile = self._tile(shape)
        kernel, own = packed_constants(shape, tile)
        splits = self._splits(min(tile.splits, weight.spans // int(own.get("SPANS_AT_ONCE", 1))))
        constants: dict[str, Any] = {
            **weight.constants,
            **own,
            "GROUPS": weight.groups,
            "TILE_ROWS": tile.rows,
            "DTYPE": self.context.builder.activation_type,
        }
        if kernel == "matmul_nbits":
            constants["SCALE_WEIGHTS"] = self._is_invariant or self.context.rows > FEW_ROWS
        grid = (ceil_div(self.context.rows, tile.rows), ceil_div(self.n, tile.columns), self._programs(splits))
        given = {"x": x.buffer, "codes": weight.codes, "scales": weight.scales, "zero_points": weight.zero_points}
        self._launch(kernel, grid, constants, given, x, tile, splits)

    def _launch(
        self,
        kernel: str,
        grid: tuple[int, ...],
        constants: dict[str, Any],
        given: dict[str, Argument | None],
        x: RowBuffer,
        tile: Tile,
        splits: int,
        outputs: _Slice | None = None,
    ) -> None:
        """Add the launch; `_finish` adds the one that a softcap or the logits of partials need."""
        context, epilogue, bias = self.context, self.epilogue, self._bias()
        result = epilogue.result
        is_router = any(reader.op_type == ROUTE for reader in result.consumers())
        is_added = self._programs(splits) < splits
        gate = self._fused_gate(kernel, constants, splits)
        if gate is not None:
            out = context.make(gate.last.outputs[0])
            constants["GATE"] = ACTIVATIONS[gate.gate.activation]
        else:
            # Logits of experts in 16 bits would tie.
            is_float32 = splits > 1 or is_router or self._caps_later or self._is_gate_left(kernel, constants, splits)
            added = is_added or splits == 1
            out = context.make_partials(result, splits, added=added) if is_float32 else context.make(result)
            self._whole = out
            if self._caps_later:
                constants["GATE"] = NO_GATE  # no library computes it: the usual launch has a cap, and equal bits
        outputs = outputs or _Slice(0, self.n)
        constants |= {
            "N": outputs.count,
            "COLUMNS": self.columns,
            "SPLITS": splits,
            "TILE": tile.columns,
            "HAS_BIAS": bias is not None,
            "HAS_SOFTCAP": epilogue.softcap > 0 and not self._caps_later,
            "FOLDS": self._is_invariant and splits > 1,
        }
        context.builder.launch(
            kernel,
            self.node,
            grid,
            constants,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **given,
            bias=bias,
            out=_from_column(out.buffer, outputs.first if gate is None else outputs.first // 2),
            rows=context.rows,
            x_stride=x.stride,
            out_stride=out.stride,
            alpha=epilogue.alpha,
            softcap=epilogue.softcap,
        )

    def _is_gate_left(self, kernel: str, constants: Mapping[str, Any], splits: int) -> bool:
        """Report if only adapters keep the launch from computing the gated activation."""
        return self._is_adapted and self._could_gate(kernel, constants, splits)

    def _fused_gate(self, kernel: str, constants: Mapping[str, Any], splits: int) -> GatedMatmul | None:
        """The gated activation that the launch computes."""
        return self.gated if self._could_gate(kernel, constants, splits) and not self._is_adapted else None

    def _could_gate(self, kernel: str, constants: Mapping[str, Any], splits: int) -> bool:
        """Report if a program has the whole sums of a gated activation, and no library may multiply."""
        builder = self.context.builder
        # Of float8 libraries compute matmuls with scales of rows on SM 90 alone.
        kinds = (0, weight_layouts.FP8) if builder.shared.tiles.sm == _OUTER_VECTORS_SM else (0,)
        is_plain = kernel == "matmul" and constants["KIND"] in kinds and builder.activation_type != "fp32"
        is_open = builder.shared.tiles.device is None and not self._is_invariant
        is_left = is_plain and is_open and self.context.rows > FEW_ROWS  # runtime/cuda/library_matmuls.py
        return self.gated is not None and isinstance(self.order, Interleaved) and splits == 1 and not is_left

    def _tile(self, shape: MatmulShape) -> Tile:
        is_float32 = self.context.builder.activation_type == "fp32"
        shape = shape.model_copy(update={"is_float32": is_float32})
        tiles = self.context.builder.shared.tiles
        return tiles.choose_invariant(shape) if self._is_invariant else tiles.choose(shape)

    def _splits(self, wanted: int) -> int:
        """Split-K partials. One in batch-invariant programs where adding them would not be the same in all buckets.

        A factor other than 1 would be rounded, unless the compiler fuses it with the addition; and the stride of the
        partials is a multiple of 16 for any number of rows only if n is one.
        """
        is_same = self.epilogue.alpha == 1 and self.n % 16 == 0
        return wanted if is_same or not self._is_invariant else 1

    def _programs(self, splits: int) -> int:
        """Programs that share the columns of one tile of the result."""
        return 1 if self._is_invariant and self.context.rows > FEW_ROWS else splits

    def _bias(self) -> WeightArgument | None:
        """The bias, scaled like the matmul."""
        bias = self.node.inputs[2] if len(self.node.inputs) > 2 else None
        if bias is None:
            return None
        alpha, builder, order = np.float32(self.epilogue.alpha), self.context.builder, self.order
        name = order.name(bias.name if alpha == 1 else f"{bias.name}.scaled")
        return builder.weight(name, builder.activation_type, lambda: order(float32_values(bias) * alpha))


def _from_column(buffer: BufferArgument, column: int) -> BufferArgument:
    return buffer.model_copy(update={"offset": buffer.offset + column}) if column else buffer


def lower_gemm(context: LaunchContext, node: ir.Node) -> None:
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


def lower_matmul(context: LaunchContext, node: ir.Node) -> None:
    """Lower y = x @ W, W stored [columns, n] in floats."""
    operand = node.inputs[1]
    if operand is None or not is_stored(operand) or operand.shape is None or len(operand.shape) != 2:
        raise PassError(f"{node.name!r} (MatMul) multiplies by something other than a stored matrix")
    MatmulLowering(context, node, operand, is_transposed=True).lower()


def lower_rounding(context: LaunchContext, node: ir.Node, rounding: Rounding) -> None:
    """Lower rounded activations: 8-bit codes for layers that multiply codes, floats for all other readers."""
    result, kind = node.outputs[0], CODES[rounding.kind]
    is_taken = any(weight_layouts.takes_codes(reader, kind) for reader in result.consumers())
    if is_taken and result not in context.codes_of:  # else a norm has made them
        made = make_codes(context, node, rounding)
        _launch(context, node, rounding, made.codes, made.scales)
    if not all(weight_layouts.takes_codes(reader, kind) for reader in result.consumers()):
        _launch(context, node, rounding, context.make(result).buffer, None)


def _launch(
    context: LaunchContext, node: ir.Node, rounding: Rounding, codes: BufferArgument, scales: BufferArgument | None
) -> None:
    x = context.read(rounding.source, node)
    context.builder.launch(
        "quantize_rows",
        node,
        (context.rows,),
        {
            "COLUMNS": x.columns,
            "BLOCK": next_power_of_two(x.columns, 16),
            "KIND": CODES[rounding.kind],
            "IS_STATIC": rounding.scale is not None,
            "SCALES_BACK": scales is None,
        },
        x=x.buffer,
        codes=codes,
        scales=scales,
        x_stride=x.stride,
        static_scale=float(rounding.scale or 0.0),
    )
