"""What works on rows as they come: look-ups, activations, multiplications, and views that need no launch.

Norms and sums as launches: what is added between two norms goes with them.
"""

from typing import Any

import onnx_ir as ir

from ingot.artifact.launch_program import Argument
from ingot.errors import PassError
from ingot.passes.rewriting import small_constant
from ingot.passes.weights import is_stored
from ingot.pipeline.targets.cuda import weight_layouts as weight_forms
from ingot.pipeline.targets.cuda.fusions import IDENTITY, Branch, Epilogue, Gate, Norm, activation, norm, scalar
from ingot.pipeline.targets.cuda.lowering_context import Rows, Scope, columns_of
from ingot.pipeline.targets.cuda.program_builder import next_power_of_two

ADD, MULTIPLY = range(2)  # kernels/elementwise.py
_WIDE = 4096  # columns from which a row is given more warps


def lower_norm(scope: Scope, node: ir.Node) -> None:
    """RMSNormalization alone; of [T, heads, dim] each head is a row."""
    if node.op_type == "RMSNormalization":
        found = norm(node.outputs[0])
        assert found is not None
        _launch_norm(scope, node, scope.read(found[0].source, node, parts=True), outer=found[0])
        return
    lower_sum(scope, node)


def lower_sum(scope: Scope, node: ir.Node) -> None:
    """Add, or SkipSimplifiedLayerNormalization: the sum, normed behind it where the op says so."""
    is_normed = node.op_type == "SkipSimplifiedLayerNormalization"
    left, right = node.inputs[0], node.inputs[1]
    assert left is not None
    assert right is not None
    fusion = scope.fusions.at.get(node)
    inner: Norm | None
    if isinstance(fusion, Branch):
        source, inner, residual = fusion.norm.source, fusion.norm, fusion.residual
    elif not is_normed:
        combine(scope, node, ADD)
        return
    else:
        in_parts = left in scope.places and scope.places[left].parts > 1
        inner, (source, residual) = None, (left, right) if in_parts else (right, left)
    weight = node.inputs[2] if is_normed else None
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    assert epsilon is not None
    x, added = scope.read(source, node, parts=True), scope.read(residual, node)
    outer = None if weight is None else Norm(source, weight, float(epsilon))
    _launch_norm(scope, node, x, added, inner, outer)


def _launch_norm(
    scope: Scope,
    node: ir.Node,
    x: Rows,
    residual: Rows | None = None,
    inner: Norm | None = None,
    outer: Norm | None = None,
) -> None:
    """norm(norm(x) + residual), without what is None."""
    columns, rows = _norm_width(node, x, outer), scope.rows
    stored = _sum_place(scope, node, x, outer) if residual is not None else None
    out = scope.make(node.outputs[0]) if outer is not None else None
    if x.columns != columns:  # heads are rows: they must lie one behind the other
        x = x if x.stride == x.columns and x.parts == 1 else scope.copied(x, f"{node.name}.heads", node)
        rows *= x.columns // columns
    scope.builder.launch(
        "rms_norm",
        node,
        (rows,),
        {
            "COLUMNS": columns,
            "BLOCK": next_power_of_two(columns, 16),
            "PARTS": x.parts,
            "HAS_INNER": inner is not None,
            "HAS_RESIDUAL": residual is not None,
            "HAS_OUTER": outer is not None,
        },
        num_warps=8 if columns >= _WIDE else 4,
        x=x.buffer,
        residual=residual.buffer if residual else None,
        inner_weight=scope.vector(inner.weight) if inner else None,
        weight=scope.vector(outer.weight) if outer else None,
        out=out.buffer if out else None,
        sum_out=stored.buffer if stored else None,
        x_stride=x.stride if x.columns == columns else columns,
        part_stride=x.part_stride,
        residual_stride=residual.stride if residual else 0,
        sum_stride=stored.stride if stored else 0,
        out_stride=columns,
        inner_epsilon=inner.epsilon if inner else 0.0,
        epsilon=outer.epsilon if outer else 0.0,
    )


def _norm_width(node: ir.Node, x: Rows, outer: Norm | None) -> int:
    """Columns that share a mean."""
    weight = None if outer is None else outer.weight
    if weight is None or weight.shape is None:
        return x.columns
    if node.attributes.get_int("axis", -1) not in (-1, len(node.outputs[0].shape or ()) - 1):
        raise PassError(f"{node.name!r} ({node.op_type}) norms another axis than the last; there is no CUDA kernel")
    return int(weight.shape.numpy()[-1])


def _sum_place(scope: Scope, node: ir.Node, x: Rows, outer: Norm | None) -> Rows:
    """Where the sum is stored: the Add's result, the fused norm's fourth, or a place that nobody reads."""
    if outer is None:
        return scope.make(node.outputs[0])
    if len(node.outputs) > 3:
        return scope.make(node.outputs[3])
    return Rows(scope.builder.buffer(f"{node.name}.sum", scope.rows * x.columns), x.columns, x.columns)


def combine(scope: Scope, node: ir.Node, kind: int) -> None:
    """Two results, or one and a stored vector, element by element. PassError for other constants."""
    left, right = node.inputs[0], node.inputs[1]
    assert left is not None
    assert right is not None
    if is_stored(left):
        left, right = right, left
    columns = columns_of(node.outputs[0])
    operand: Argument
    if is_stored(right):
        if right.shape is None or [size for size in right.shape if size != 1] != [columns]:
            raise PassError(f"{node.name!r} ({node.op_type}) broadcasts a constant that is no vector of its columns")
        operand, stride = scope.vector(right), 0
    else:
        rows = scope.read(right, node)
        operand, stride = rows.buffer, rows.stride
    x, out = scope.read(left, node, parts=True), scope.make(node.outputs[0])
    grid, shape = scope.blocks(columns)
    scope.builder.launch(
        "combine_rows",
        node,
        grid,
        {**shape, "PARTS": x.parts, "KIND": kind},
        left=x.buffer,
        right=operand,
        out=out.buffer,
        left_stride=x.stride,
        left_part_stride=x.part_stride,
        right_stride=stride,
        out_stride=out.stride,
    )


def lower_gather(scope: Scope, node: ir.Node) -> None:
    """Rows of a stored table, or of hidden states; or columns of these."""
    source, indices = node.inputs[0], node.inputs[1]
    assert source is not None
    assert indices is not None
    if node.attributes.get_int("axis", 0) in (1, -1):
        _gather_columns(scope, node, indices)
        return
    if not indices.is_graph_input():
        raise PassError(f"{node.name!r} (Gather) takes rows by {indices.name!r}, which is no input of the model")
    table = None if is_stored(source) else scope.read(source, node)
    if indices.name == "logits_indices":
        scope.builder.begin_head()
    found = scope.fusions.at.get(node)
    epilogue = found if isinstance(found, Epilogue) else Epilogue(node.outputs[0])
    out = scope.make(epilogue.result)
    _gather_rows(scope, node, source, table, out, epilogue.alpha)
    if epilogue.softcap:
        scope.map(node, out, out, softcap=epilogue.softcap)


def _gather_rows(scope: Scope, node: ir.Node, source: ir.Value, table: Rows | None, out: Rows, alpha: float) -> None:
    indices = node.inputs[1]
    assert indices is not None
    dequantize, builder = weight_forms.quantizer(source), scope.builder
    grid, shape = scope.blocks(out.columns)
    common: dict[str, Any] = {
        "indices": builder.external(indices.name or ""),
        "out": out.buffer,
        "out_stride": out.stride,
    }
    if table is None and dequantize is not None:
        if weight_forms.float8(dequantize):
            raise PassError(f"{node.name!r} reads a table of float8, for which there is no CUDA kernel; leave it out")
        spans = weight_forms.spans(builder, dequantize)
        given: dict[str, Any] = {"codes": spans.codes, "scales": spans.scales, "zero_points": spans.zero_points}
        constants = {**shape, **spans.constants, "TABLE_ROWS": _table_rows(source)}
        builder.launch("gather_quantized_rows", node, grid, constants, **common, **given, alpha=alpha)
        return
    plain: Argument = table.buffer if table else scope.vector(source)
    stride = table.stride if table else out.columns
    builder.launch("gather_rows", node, grid, shape, **common, table=plain, table_stride=stride, alpha=alpha)


def _table_rows(table: ir.Value) -> int:
    assert table.shape is not None
    return int(table.shape.numpy()[0])


def _gather_columns(scope: Scope, node: ir.Node, indices: ir.Value) -> None:
    x, out = scope.read(node.inputs[0], node), scope.make(node.outputs[0])
    if not is_stored(indices):
        raise PassError(f"{node.name!r} (Gather) takes columns by {indices.name!r}, which is no stored list")
    grid, shape = scope.blocks(out.columns)
    given: dict[str, Any] = {"x": x.buffer, "columns": scope.numbers(indices), "out": out.buffer}
    scope.builder.launch("gather_columns", node, grid, shape, **given, x_stride=x.stride, out_stride=out.stride)


def lower_gate(scope: Scope, node: ir.Node, gate: Gate) -> None:
    """Both halves where they lie, be it in parts."""
    x = scope.read(gate.gate, node, parts=True)
    up = scope.read(gate.up, node, parts=True, unaligned=True)
    if x.parts != up.parts:
        x, up = scope.read(gate.gate, node), scope.read(gate.up, node, unaligned=True)
    out, (source, offset) = scope.make(node.outputs[0]), up.unaligned
    grid, shape = scope.blocks(out.columns)
    scope.builder.launch(
        "gated_activation",
        node,
        grid,
        {**shape, "PARTS": x.parts, "KIND": gate.kind},
        gate=x.buffer,
        up=source,
        out=out.buffer,
        gate_stride=x.stride,
        gate_part_stride=x.part_stride,
        up_offset=offset,
        up_stride=up.stride,
        up_part_stride=up.part_stride,
        out_stride=out.stride,
    )


def lower_multiplication(scope: Scope, node: ir.Node) -> None:
    """Mul and Div: by a scalar, by a vector, or of two results."""
    one, other = node.inputs[0], node.inputs[1]
    factor = scalar(other) if scalar(other) is not None or node.op_type == "Div" else scalar(one)
    if factor is not None and factor != 0:
        x = scope.read(one if scalar(other) is not None else other, node, parts=True, unaligned=True)
        alpha = 1.0 / factor if node.op_type == "Div" else factor
        scope.map(node, x, scope.make(node.outputs[0]), alpha=alpha)
    elif node.op_type == "Mul":
        combine(scope, node, MULTIPLY)
    else:
        raise PassError(f"{node.name!r} (Div) divides by other than a stored number; there is no CUDA kernel for that")


def lower_activation(scope: Scope, node: ir.Node) -> None:
    """An activation that gates nothing; Tanh is a softcap of 1."""
    found = None if node.op_type == "Tanh" else activation(node.outputs[0])
    if found is None and node.op_type != "Tanh":
        raise PassError(f"{node.name!r} ({node.op_type}) has an alpha other than 1, for which there is no CUDA kernel")
    x = scope.read(node.inputs[0], node, parts=True, unaligned=True)
    kind = IDENTITY if found is None else found[1]
    scope.map(node, x, scope.make(node.outputs[0]), kind, softcap=1.0 if node.op_type == "Tanh" else 0.0)


def lower_split(scope: Scope, node: ir.Node) -> None:
    """Parts where they lie."""
    if node.attributes.get_int("axis", 0) not in (-1, 1):
        raise PassError(f"{node.name!r} (Split) splits another axis than the last; there is no CUDA kernel for that")
    x, start = scope.read(node.inputs[0], node, parts=True, unaligned=True), 0
    for output in node.outputs:
        columns = columns_of(output)
        scope.put(output, x.slice(start, columns))
        start += columns


def lower_view(scope: Scope, node: ir.Node) -> None:
    """Reshape between [T, heads * dim] and [T, heads, dim], Squeeze and Unsqueeze of a batch of one: the same rows."""
    sizes = small_constant(node.inputs[1]) if len(node.inputs) > 1 else None
    is_view = sizes in ([0],) or (node.op_type == "Reshape" and sizes is not None and sizes[0] in (0, -1))
    source = node.inputs[0]
    if source is not None and is_view and source.is_graph_input():
        return  # position_ids as a batch of one, which rotary embeddings read from the input itself
    if not is_view:
        raise PassError(f"{node.name!r} ({node.op_type}) does more than view rows; there is no CUDA kernel for that")
    scope.put(node.outputs[0], scope.read(source, node, parts=True, unaligned=True))
