"""Norms and sums as launches: what is added between two norms goes with them."""

import onnx_ir as ir

from ingot.artifact.launch_program import Argument
from ingot.errors import PassError
from ingot.passes.weight_values import is_stored
from ingot.pipeline.cuda.fusions import Branch, Norm, norm
from ingot.pipeline.cuda.placed_rows import Rows
from ingot.pipeline.cuda.program_builder import next_power_of_two
from ingot.pipeline.cuda.scope import Scope, columns_of

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
