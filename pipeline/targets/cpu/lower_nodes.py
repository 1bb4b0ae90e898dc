"""Lowers nodes of the IR to operations of a CPU launch program, or to views and facts that later operations read."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import onnx_ir as ir

from ingot.artifact.programs.cpu_program import (
    Combine,
    Embed,
    Linear,
    Normalize,
    Rounding,
)
from ingot.artifact.programs.operation_row import Norm
from ingot.errors import one_of
from ingot.passes.projections import projections_of
from ingot.passes.rewriting import keeps_rows, row_columns, sole_consumer
from ingot.passes.weights import float32_values, is_stored
from ingot.pipeline.targets.cpu.lower_elementwise import (
    emit_combine,
    lower_activation,
    lower_clip,
    lower_gate,
    lower_multiplication,
    lower_softplus,
    lower_sum,
)
from ingot.pipeline.targets.cpu.lower_experts import lower_combine, lower_dispatch, lower_route
from ingot.pipeline.targets.cpu.lower_mixers import lower_attention, lower_recurrent, lower_rotation
from ingot.pipeline.targets.cpu.lowering_context import LoweringContext, Rows, float_attribute, refusal
from ingot.pipeline.targets.cpu.matrices import StoredMatrix
from ingot.pipeline.targets.fusions import Curve, Epilogue, Gate, NormedBranch
from ingot.pipeline.targets.fusions import Rounding as RoundedActivations


def lower_node(context: LoweringContext, node: ir.Node) -> None:
    """Lower a node that no fusion absorbed, with the nodes that its own fusion absorbs."""
    match context.fusions.at.get(node):
        case Gate() as gate:
            lower_gate(context, node, gate)
        case Curve() as curve:
            x = context.read(curve.source, node)
            emit_combine(context, node, "gate", x, 1.0, node.outputs[0], curve.activation, numbers=curve.numbers)
        case RoundedActivations() as rounding:
            context.rounded[node.outputs[0]] = rounding
        case NormedBranch() as branch if node.op_type == "Add":
            _lower_branch(context, node, branch)
        case _ if node.op_type in _HANDLERS:
            _HANDLERS[node.op_type](context, node)
        case _:
            raise refusal(node, f"has no operation on the CPU; there are operations for {one_of(_HANDLERS)}")


def _lower_gather(context: LoweringContext, node: ir.Node) -> None:
    """Rows of a stored table by a graph input, or the hidden states that need logits."""
    source, indices = node.inputs[0], node.inputs[1]
    assert source is not None
    assert indices is not None
    name = indices.name if indices.is_graph_input() else None
    if node.attributes.get_int("axis", 0) != 0:
        raise refusal(node, "gathers columns; the CPU's operations gather rows")
    if name == "logits_indices" and not is_stored(source):
        rows = context.read(source, node)
        if node in context.fusions.at:
            raise refusal(node, "is scaled before a norm or linear layer reads it")
        context.put(node.outputs[0], Rows(rows.view, rows.columns, "logits"))
    elif is_stored(source) and name in ("input_ids", "position_ids"):
        epilogue = _epilogue(context, node)
        if epilogue.softcap:
            raise refusal(node, "is capped; the CPU's operation scales rows of a table")
        table = context.draft.add_matrix(StoredMatrix.of(source))
        out = context.make(epilogue.result, "tokens")
        ids: Literal["input_ids", "position_ids"] = "input_ids" if name == "input_ids" else "position_ids"
        context.emit(Embed(node=node.name or "", table=table, output=out.view, ids=ids, scale=epilogue.alpha))
    else:
        raise refusal(node, f"gathers by {indices.name!r}; the CPU's operations gather by input_ids or position_ids")


def _lower_gemm(context: LoweringContext, node: ir.Node) -> None:
    """y = softcap(alpha * (x @ W^T + b)), x rounded to 8 bits where the weight has integer codes."""
    for name, usual in (("transA", 0), ("transB", 1)):
        if node.attributes.get_int(name, 0) != usual:
            raise refusal(node, f"has {name} {1 - usual}; the CPU's kernels compute x @ W^T + b")
    if any(node.attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta")):
        raise refusal(node, "has an alpha or a beta; the CPU's kernels compute x @ W^T + b")
    _linear(context, node, StoredMatrix.of(_weight(node)))


def _lower_matmul(context: LoweringContext, node: ir.Node) -> None:
    """y = x @ W, W stored [in, out] in floats."""
    _linear(context, node, StoredMatrix.of(_weight(node), transposed=True))


def _weight(node: ir.Node) -> ir.Value:
    operand = node.inputs[1]
    if operand is None or not is_stored(operand) or operand.shape is None or len(operand.shape) != 2:
        raise refusal(node, "multiplies by something other than a stored matrix")
    return operand


def _linear(context: LoweringContext, node: ir.Node, stored: StoredMatrix) -> None:
    source = node.inputs[0]
    assert source is not None
    given = context.rounded.get(source)
    rounding, static_scale = _rounding(node, stored, given)
    x = context.read(given.source if given else source, node)
    epilogue = _epilogue(context, node)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    out = context.make(epilogue.result, x.rows)
    context.draft.projections[node.name or ""] = projections_of(node)
    context.emit(
        Linear(
            node=node.name or "",
            matrix=context.draft.add_matrix(stored),
            input=x.view,
            output=out.view,
            bias=None if bias is None else _bias(context, node, bias, epilogue.alpha),
            rounding=rounding,
            static_scale=static_scale,
            rows=x.rows,
            alpha=epilogue.alpha,
            cap=epilogue.softcap,
        )
    )


def _rounding(node: ir.Node, stored: StoredMatrix, given: RoundedActivations | None) -> tuple[Rounding, float | None]:
    """Return the rounding of the input: as a pass chose, else per block in front of integer codes."""
    if given is None:
        return ("block" if stored.matrix.is_integer else "none"), None
    if given.kind != "int" or not stored.matrix.is_integer:
        what = f"{'float8' if given.kind == 'float' else 'int8'} activations before {stored.matrix.form} weights"
        raise refusal(node, f"has {what}; the CPU's kernels multiply int8 activations by integer weights")
    return ("token", None) if given.scale is None else ("static", given.scale)


def _bias(context: LoweringContext, node: ir.Node, bias: ir.Value, alpha: float) -> str:
    """The bias, scaled like the matmul."""
    name = context.vector(bias, node)
    if alpha == 1:
        return name
    return context.draft.add_vector(f"{name}.scaled", lambda: float32_values(bias).reshape(-1) * np.float32(alpha))


def _epilogue(context: LoweringContext, node: ir.Node) -> Epilogue:
    found = context.fusions.at.get(node)
    return found if isinstance(found, Epilogue) else Epilogue(node.outputs[0])


def _lower_norm(context: LoweringContext, node: ir.Node) -> None:
    """A norm over the last axis; in [T, heads, dim] each head is a group."""
    _normalize(context, node, node.inputs[0], node.inputs[1], node.outputs[0], node.inputs[2:])


def _normalize(
    context: LoweringContext,
    node: ir.Node,
    source: ir.Value | None,
    weight: ir.Value | None,
    result: ir.Value,
    bias: Sequence[ir.Value | None] = (),
    residual: Rows | None = None,
    epsilon: float | None = None,
) -> None:
    assert weight is not None
    x, axis = context.read(source, node), node.attributes.get_int("axis", -1)
    if node.op_type in _NORMS and axis not in (-1, len(result.shape or ()) - 1):
        raise refusal(node, "norms another axis than the last")
    columns = int(weight.shape.numpy()[-1]) if weight.shape is not None else x.columns
    norm = Norm(
        kind="layer" if node.op_type in _LAYER_NORMS else "rms",
        weight=context.vector(weight, node),
        bias=context.vector(bias[0], node) if bias and bias[0] is not None else None,
        epsilon=float_attribute(node, "epsilon", 1e-5) if epsilon is None else epsilon,
    )
    out = context.make(result, x.rows)
    context.emit(
        Normalize(
            node=node.name or "",
            input=x.view,
            output=out.view,
            norm=norm,
            columns=columns,
            groups=x.columns // columns,
            residual=None if residual is None else residual.view,
            rows=x.rows,
        )
    )


def _lower_branch(context: LoweringContext, node: ir.Node, branch: NormedBranch) -> None:
    """norm(branch) + residual."""
    residual, inner = context.read(branch.residual, node), branch.norm
    _normalize(context, node, inner.source, inner.weight, node.outputs[0], residual=residual, epsilon=inner.epsilon)


def _lower_sum_and_norm(context: LoweringContext, node: ir.Node) -> None:
    """SkipSimplifiedLayerNormalization or SkipLayerNormalization: the sum, and its norm."""
    total = node.outputs[3] if len(node.outputs) > 3 else None
    if total is None:
        total = ir.Value(name=f"{node.name}.sum", shape=node.outputs[0].shape, type=node.outputs[0].type)
    left, right = (context.read(operand, node) for operand in node.inputs[:2])
    emit_combine(context, node, "add", left, right.view, total)
    _normalize(context, node, total, node.inputs[2], node.outputs[0], node.inputs[3:])


def _lower_split(context: LoweringContext, node: ir.Node) -> None:
    """The outputs are views."""
    if node.attributes.get_int("axis", 0) not in (-1, 1):
        raise refusal(node, "splits another axis than the last")
    x, start = context.read(node.inputs[0], node), 0
    for output in node.outputs:
        columns = row_columns(output)
        context.put(output, x.slice(start, columns))
        start += columns


def _lower_concat(context: LoweringContext, node: ir.Node) -> None:
    """Each operand in its own columns of the result: linear layers write there, other operands are copied.

    Operands that are one view after another, as of packed projections, are a view together.
    """
    if node.attributes.get_int("axis", 0) not in (-1, 1):
        raise refusal(node, "joins another axis than the last")
    parts = [context.read(value, node) for value in node.inputs]
    if len({part.rows for part in parts}) > 1:
        raise refusal(node, "joins rows of tokens and rows of logits")
    if _are_adjacent(parts) and not node.outputs[0].is_graph_output():
        context.put(node.outputs[0], parts[0].slice(0, sum(part.columns for part in parts)))
        return
    out = context.make(node.outputs[0], parts[0].rows)
    makers = {operation.output: place for place, operation in enumerate(context.draft.operations)}
    start = 0
    for value, part in zip(node.inputs, parts, strict=True):
        place, target = makers.get(part.view), out.slice(start, part.columns)
        maker = None if place is None else context.draft.operations[place]
        assert value is not None
        # A view of a larger buffer has other readers.
        is_whole = part.view.buffer == value.name
        if place is not None and isinstance(maker, Linear) and is_whole and sole_consumer(value) is node:
            context.draft.operations[place] = maker.model_copy(update={"output": target.view})
            del context.draft.buffers[part.view.buffer]
        else:
            sizes = {"a": part.view, "output": target.view, "columns": part.columns, "rows": part.rows}
            context.emit(Combine.model_validate({"node": node.name, "function": "copy", **sizes}))
        start += part.columns


def _are_adjacent(parts: Sequence[Rows]) -> bool:
    """Return whether each begins in its buffer where the one before ends."""
    return all(before.slice(before.columns, 0).view == after.view for before, after in pairwise(parts))


def _lower_view(context: LoweringContext, node: ir.Node) -> None:
    """Reshape between [T, heads * dim] and [T, heads, dim]; a batch axis of one."""
    source = node.inputs[0]
    if not keeps_rows(node):
        raise refusal(node, "moves elements between rows")
    if source is not None and not source.is_graph_input():  # else position_ids, which attention reads itself
        context.put(node.outputs[0], context.read(source, node))


_NORMS = ("LayerNormalization", "RMSNormalization")
_LAYER_NORMS = ("LayerNormalization", "SkipLayerNormalization")
_HANDLERS: Mapping[str, Callable[[LoweringContext, ir.Node], None]] = {
    "Add": lower_sum,
    "Clip": lower_clip,
    "CombineExperts": lower_combine,
    "Concat": _lower_concat,
    "DispatchExperts": lower_dispatch,
    "Div": lower_multiplication,
    "Gather": _lower_gather,
    "GatedDeltaRule": lower_recurrent,
    "Gelu": lower_activation,
    "Gemm": _lower_gemm,
    "LayerNormalization": _lower_norm,
    "MatMul": _lower_matmul,
    "Mul": lower_multiplication,
    "PagedAttention": lower_attention,
    "QuickGelu": lower_activation,
    "RMSNormalization": _lower_norm,
    "Relu": lower_activation,
    "Reshape": _lower_view,
    "RouteExperts": lower_route,
    "RotaryEmbedding": lower_rotation,
    "SelectiveScan": lower_recurrent,
    "ShortConvolution": lower_recurrent,
    "Sigmoid": lower_activation,
    "SkipLayerNormalization": _lower_sum_and_norm,
    "SkipSimplifiedLayerNormalization": _lower_sum_and_norm,
    "Softplus": lower_softplus,
    "Split": _lower_split,
    "Squeeze": _lower_view,
    "Swish": lower_activation,
    "Tanh": lower_activation,
    "Unsqueeze": _lower_view,
}
