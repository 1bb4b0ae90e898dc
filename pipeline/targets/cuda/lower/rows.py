"""Lowers ops on rows: norms and sums (one launch for norm, sum, norm, rounding to 8 bits), gathers, multiplications,
and views, which need no launch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ingot.artifact.programs.launch_program import Argument
from ingot.errors import PassError
from ingot.passes.numerics.activation_rounding import Kind
from ingot.passes.rewriting import keeps_rows, row_columns
from ingot.passes.weights import is_stored
from ingot.pipeline.targets.cuda import weight_layouts
from ingot.pipeline.targets.cuda.lowering_context import LaunchContext, QuantizedRows, RowBuffer
from ingot.pipeline.targets.fusions import (
    Epilogue,
    GatheredNorm,
    NormedBranch,
    RmsNorm,
    Rounding,
    scalar,
)
from ingot.sizes import next_power_of_two

ADD, MULTIPLY = range(2)  # kernels/elementwise.py
CODES: Mapping[Kind, int] = {"float": weight_layouts.FP8, "int": weight_layouts.INT8}  # kernels/kv_precision.py
_CODE_TYPES: Mapping[Kind, str] = {"float": "fp8e4nv", "int": "i8"}
_WIDE = 4096  # columns from which a row gets more warps
_LAYER_NORMS = ("LayerNormalization", "SkipLayerNormalization")
_SUMS_AND_NORMS = ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")


def lower_norm(context: LaunchContext, node: ir.Node) -> None:
    """Lower a norm without a sum in its own node; in [T, heads, dim] each head is a row."""
    source, weight, *bias = node.inputs
    assert source is not None
    assert weight is not None
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    assert epsilon is not None
    outer, found = RmsNorm(source, weight, float(epsilon)), context.fusions.at.get(node)
    if isinstance(found, GatheredNorm):
        _lower_gathered(context, node, found, outer, bias)
    else:
        _launch_norm(context, node, context.read(source, node, partials=True), outer=outer, bias=bias)


def _lower_gathered(
    context: LaunchContext, node: ir.Node, found: GatheredNorm, outer: RmsNorm, bias: Sequence[ir.Value | None]
) -> None:
    """Lower the norm of the rows whose logits are wanted, with the residual addition before it: the head begins."""
    source, residual = found.source, found.residual
    if residual is not None and found.inner is None and _has_partials(context, residual):
        source, residual = residual, source
    x = context.read(source, node, partials=True)
    added = None if residual is None else context.read(residual, node)
    context.builder.begin_head()
    indices = context.builder.external(found.indices.name or "")
    _launch_norm(context, node, x, added, found.inner, outer, bias, indices)


def _has_partials(context: LaunchContext, value: ir.Value) -> bool:
    return value in context.rows_of and context.rows_of[value].partials > 1


def lower_sum(context: LaunchContext, node: ir.Node) -> None:
    """Lower Add, or the sum followed by its norm: SkipSimplifiedLayerNormalization, SkipLayerNormalization."""
    is_normed = node.op_type in _SUMS_AND_NORMS
    left, right = node.inputs[0], node.inputs[1]
    assert left is not None
    assert right is not None
    fusion = context.fusions.at.get(node)
    inner: RmsNorm | None
    if isinstance(fusion, NormedBranch):
        source, inner, residual = fusion.norm.source, fusion.norm, fusion.residual
    elif not is_normed:
        combine(context, node, ADD)
        return
    else:
        inner, (source, residual) = None, (left, right) if _has_partials(context, left) else (right, left)
    weight = node.inputs[2] if is_normed else None
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    assert epsilon is not None
    x, added = context.read(source, node, partials=True), context.read(residual, node)
    outer = None if weight is None else RmsNorm(source, weight, float(epsilon))
    _launch_norm(context, node, x, added, inner, outer, node.inputs[3:4])


def _launch_norm(
    context: LaunchContext,
    node: ir.Node,
    x: RowBuffer,
    residual: RowBuffer | None = None,
    inner: RmsNorm | None = None,
    outer: RmsNorm | None = None,
    bias: Sequence[ir.Value | None] = (),
    indices: Argument | None = None,
) -> None:
    """Launch norm(norm(x) + residual), leaving out what is None; the outer norm is the node's, with a bias or none.

    indices    of the rows that it reads; None: all
    """
    columns, rows = _norm_width(node, x, outer), context.rows
    stored = _sum_rows(context, node, x, outer) if residual is not None else None
    rounded = _rounded(context, node.outputs[0]) if outer is not None and x.columns == columns else None
    stores = rounded is None or not rounded.replaces
    out = context.make(node.outputs[0]) if outer is not None and stores else None
    if x.columns != columns:  # heads are rows, and must be contiguous
        x = x if x.stride == x.columns and x.partials == 1 else context.copied(x, f"{node.name}.heads", node)
        rows *= x.columns // columns
    constants = {
        "COLUMNS": columns,
        "BLOCK": next_power_of_two(columns, 16),
        "PARTS": x.partials,
        "HAS_RESIDUAL": residual is not None,
    }
    if indices is not None:
        constants["GATHERS"] = True
    if rounded is not None:
        constants |= {"STORES": stores, "KIND": rounded.rows.kind, "IS_STATIC": rounded.scale is not None}
    arguments: dict[str, Any] = {
        "x": x.buffer,
        "residual": residual.buffer if residual else None,
        "weight": context.vector(outer.weight) if outer else None,
        "out": out.buffer if out else None,
        "sum_out": stored.buffer if stored else None,
        "indices": indices,
        "codes": rounded.rows.codes if rounded else None,
        "scales": rounded.rows.scales if rounded else None,
        "x_stride": x.stride if x.columns == columns else columns,
        "part_stride": x.partial_stride,
        "residual_stride": residual.stride if residual else 0,
        "sum_stride": stored.stride if stored else 0,
        "out_stride": columns,
        "epsilon": outer.epsilon if outer else 0.0,
        "static_scale": float(rounded.scale or 0.0) if rounded else 0.0,
    }
    if node.op_type in _LAYER_NORMS:
        shift = bias[0] if bias else None
        kernel, constants["HAS_BIAS"] = "layer_norm", shift is not None
        arguments["bias"] = context.vector(shift) if shift is not None else None
    else:
        kernel, constants["HAS_INNER"], constants["HAS_OUTER"] = "rms_norm", inner is not None, outer is not None
        arguments["inner_weight"] = context.vector(inner.weight) if inner else None
        arguments["inner_epsilon"] = inner.epsilon if inner else 0.0
    warps = 8 if columns >= _WIDE else 4
    context.builder.launch(kernel, node, (rows,), constants, num_warps=warps, **arguments)


@dataclass(frozen=True)
class _Rounded:
    """Codes that a norm makes of its result. replaces: whether nothing reads the result itself."""

    rows: QuantizedRows
    scale: float | None
    replaces: bool


def _rounded(context: LaunchContext, result: ir.Value) -> _Rounded | None:
    """The codes of a norm's result, if layers multiply them; recorded for these layers."""
    found = context.roundings.get(result)
    if found is None:
        return None
    node, rounding = found
    readers = [weight_layouts.takes_codes(reader, CODES[rounding.kind]) for reader in node.outputs[0].consumers()]
    if not any(readers):
        return None
    is_adapted = context.builder.adapter_units is not None  # adapters multiply what is not rounded
    replaces = not is_adapted and all(readers) and all(reader in rounding.nodes for reader in result.consumers())
    return _Rounded(make_codes(context, node, rounding), rounding.scale, replaces)


def make_codes(context: LaunchContext, node: ir.Node, rounding: Rounding) -> QuantizedRows:
    """Allocate the codes of rounded activations, and record them as those of the node's result."""
    columns = row_columns(rounding.source)
    codes = context.builder.buffer(f"{node.name}.codes", context.rows * columns, _CODE_TYPES[rounding.kind])
    scales = context.builder.buffer(f"{node.name}.scales", context.rows, "fp32")
    made = QuantizedRows(codes, scales, columns, CODES[rounding.kind])
    context.codes_of[node.outputs[0]] = made
    return made


def _norm_width(node: ir.Node, x: RowBuffer, outer: RmsNorm | None) -> int:
    """Columns of one norm."""
    weight = None if outer is None else outer.weight
    if weight is None or weight.shape is None:
        return x.columns
    if node.attributes.get_int("axis", -1) not in (-1, len(node.outputs[0].shape or ()) - 1):
        raise PassError(
            f"{node.name!r} ({node.op_type}) norms another axis than the last, and CUDA kernels norm only that"
        )
    return int(weight.shape.numpy()[-1])


def _sum_rows(context: LaunchContext, node: ir.Node, x: RowBuffer, outer: RmsNorm | None) -> RowBuffer:
    """The rows of the sum: the Add's result, the fused norm's fourth output, or an unused buffer."""
    if outer is None:
        return context.make(node.outputs[0])
    if len(node.outputs) > 3:
        return context.make(node.outputs[3])
    return RowBuffer(context.builder.buffer(f"{node.name}.sum", context.rows * x.columns), x.columns, x.columns)


def combine(context: LaunchContext, node: ir.Node, kind: int) -> None:
    """Launch an elementwise op of two values, or of one and a stored vector. PassError for other constants.

    One of two values may have a single column, for all columns of the other.
    """
    left, right = node.inputs[0], node.inputs[1]
    assert left is not None
    assert right is not None
    columns = row_columns(node.outputs[0])
    if is_stored(left) or row_columns(left) < columns:
        left, right = right, left
    operand: Argument
    spreads = not is_stored(right) and row_columns(right) == 1 < columns
    if is_stored(right):
        if right.shape is None or [size for size in right.shape if size != 1] != [columns]:
            raise PassError(f"{node.name!r} ({node.op_type}) broadcasts a constant that is not a vector of its columns")
        operand, stride = context.vector(right), 0
    else:
        rows = context.read(right, node)
        operand, stride = rows.buffer, rows.stride
    x, out = context.read(left, node, partials=True), context.make(node.outputs[0])
    grid, shape = context.blocks(columns)
    context.builder.launch(
        "combine_rows",
        node,
        grid,
        {**shape, "PARTS": x.partials, "KIND": kind, **({"SPREADS": True} if spreads else {})},
        left=x.buffer,
        right=operand,
        out=out.buffer,
        left_stride=x.stride,
        left_part_stride=x.partial_stride,
        right_stride=stride,
        out_stride=out.stride,
    )


def lower_gather(context: LaunchContext, node: ir.Node) -> None:
    """Lower a gather of rows of a stored table or of hidden states, or of columns of hidden states."""
    source, indices = node.inputs[0], node.inputs[1]
    assert source is not None
    assert indices is not None
    if node.attributes.get_int("axis", 0) in (1, -1):
        _gather_columns(context, node, indices)
        return
    if not indices.is_graph_input():
        raise PassError(f"{node.name!r} (Gather) gathers rows by {indices.name!r}, which is not an input of the model")
    table = None if is_stored(source) else context.read(source, node)
    if indices.name == "logits_indices":
        context.builder.begin_head()
    found = context.fusions.at.get(node)
    epilogue = found if isinstance(found, Epilogue) else Epilogue(node.outputs[0])
    out = context.make(epilogue.result)
    _gather_rows(context, node, source, table, out, epilogue.alpha)
    if epilogue.softcap:
        context.map(node, out, out, softcap=epilogue.softcap)


def _gather_rows(
    context: LaunchContext, node: ir.Node, source: ir.Value, table: RowBuffer | None, out: RowBuffer, alpha: float
) -> None:
    indices = node.inputs[1]
    assert indices is not None
    dequantize, builder = weight_layouts.quantizer(source), context.builder
    grid, shape = context.blocks(out.columns)
    carries = context.carries and indices.name == "input_ids"
    if carries:
        shape["CARRIES"] = True
    common: dict[str, Any] = {
        "indices": builder.external(indices.name or ""),
        "carried": builder.external("carried") if carries else None,
        "tokens": builder.external("tokens") if carries else None,
        "out": out.buffer,
        "out_stride": out.stride,
    }
    if table is None and dequantize is not None:
        if weight_layouts.is_float8(dequantize):
            raise PassError(
                f"{node.name!r} gathers from a float8 table, and no CUDA kernel does; exclude it from quantization"
            )
        spans = weight_layouts.spans(builder, dequantize)
        given: dict[str, Any] = {"codes": spans.codes, "scales": spans.scales, "zero_points": spans.zero_points}
        constants = {**shape, **spans.constants, "BITS": spans.bits, "TABLE_ROWS": _table_rows(source)}
        builder.launch("gather_quantized_rows", node, grid, constants, **common, **given, alpha=alpha)
        return
    plain: Argument = table.buffer if table else context.vector(source)
    stride = table.stride if table else out.columns
    builder.launch("gather_rows", node, grid, shape, **common, table=plain, table_stride=stride, alpha=alpha)


def _table_rows(table: ir.Value) -> int:
    assert table.shape is not None
    return int(table.shape.numpy()[0])


def _gather_columns(context: LaunchContext, node: ir.Node, indices: ir.Value) -> None:
    x, out = context.read(node.inputs[0], node), context.make(node.outputs[0])
    if not is_stored(indices):
        raise PassError(f"{node.name!r} (Gather) gathers columns by {indices.name!r}, which is not a stored list")
    grid, shape = context.blocks(out.columns)
    given: dict[str, Any] = {"x": x.buffer, "columns": context.numbers(indices), "out": out.buffer}
    context.builder.launch("gather_columns", node, grid, shape, **given, x_stride=x.stride, out_stride=out.stride)


def lower_multiplication(context: LaunchContext, node: ir.Node) -> None:
    """Lower Mul and Div: by a scalar, by a vector, or of two values."""
    one, other = node.inputs[0], node.inputs[1]
    factor = scalar(other) if scalar(other) is not None or node.op_type == "Div" else scalar(one)
    if factor is not None and factor != 0:
        x = context.read(one if scalar(other) is not None else other, node, partials=True, unaligned=True)
        alpha = 1.0 / factor if node.op_type == "Div" else factor
        context.map(node, x, context.make(node.outputs[0]), alpha=alpha)
    elif node.op_type == "Mul":
        combine(context, node, MULTIPLY)
    else:
        raise PassError(f"{node.name!r} (Div) divides by something other than a stored number, and no CUDA kernel does")


def lower_split(context: LaunchContext, node: ir.Node) -> None:
    """Lower Split: the outputs are views."""
    if node.attributes.get_int("axis", 0) not in (-1, 1):
        raise PassError(f"{node.name!r} (Split) splits another axis than the last, and CUDA kernels view only that")
    x, start = context.read(node.inputs[0], node, partials=True, unaligned=True), 0
    for output in node.outputs:
        columns = row_columns(output)
        context.put(output, x.slice(start, columns))
        start += columns


def lower_concatenation(context: LaunchContext, node: ir.Node) -> None:
    """Lower Concat of columns: each part is copied to its place."""
    if node.attributes.get_int("axis", 0) not in (-1, 1):
        raise PassError(f"{node.name!r} (Concat) joins another axis than the last, and CUDA kernels join only that")
    out, start = context.make(node.outputs[0]), 0
    for value in node.inputs:
        x = context.read(value, node, partials=True, unaligned=True)
        part = out.slice(start, x.columns)
        if not part.is_aligned:
            raise PassError(f"{node.name!r} (Concat) joins {x.columns} columns at {start}, which is not aligned")
        context.map(node, x, part)
        start += x.columns


def lower_view(context: LaunchContext, node: ir.Node) -> None:
    """Lower views: Reshape between [T, heads * dim] and [T, heads, dim], Squeeze and Unsqueeze of a batch of one."""
    source, is_view = node.inputs[0], keeps_rows(node)
    if source is not None and is_view and source.is_graph_input():
        return  # position_ids as a batch of one, which rotary embeddings read from the input itself
    if not is_view:
        raise PassError(f"{node.name!r} ({node.op_type}) moves elements between rows, and no CUDA kernel does")
    context.put(node.outputs[0], context.read(source, node, partials=True, unaligned=True))
