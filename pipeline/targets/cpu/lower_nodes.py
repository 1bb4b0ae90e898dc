"""Lowers nodes of the IR to operations of a CPU launch program, or to views and facts that later operations read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.cpu_program import (
    Activation,
    ApplyDeltaRule,
    Attend,
    Combine,
    Convolve,
    Embed,
    Linear,
    Norm,
    Normalize,
    Rotate,
    Rounding,
    Scan,
    View,
)
from ingot.errors import one_of
from ingot.passes.projections import projections_of
from ingot.passes.recurrent_ops import CONVOLUTION, DELTA_RULE
from ingot.passes.rewriting import attention_operands, attention_sinks, keeps_rows, row_columns, sole_consumer
from ingot.passes.weights import float32_values, is_stored
from ingot.pipeline.targets.cpu.lower_experts import lower_combine, lower_dispatch, lower_route
from ingot.pipeline.targets.cpu.lowering_context import LoweringContext, Rows, float_attribute, int_attribute, refusal
from ingot.pipeline.targets.cpu.matrices import StoredMatrix
from ingot.pipeline.targets.fusions import Curve, Epilogue, Gate, NormedBranch, activation, scalar
from ingot.pipeline.targets.fusions import Rounding as RoundedActivations
from ingot.pipeline.targets.recurrent_layers import recurrent_facts, require_stored_operands


def lower_node(context: LoweringContext, node: ir.Node) -> None:
    """Lower a node that no fusion absorbed, with the nodes that its own fusion absorbs."""
    match context.fusions.at.get(node):
        case Gate() as gate:
            _lower_gate(context, node, gate)
        case Curve() as curve:
            x = context.read(curve.source, node)
            _emit_combine(context, node, "gate", x, 1.0, node.outputs[0], curve.activation, numbers=curve.numbers)
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
    """How the input is rounded: as a pass chose, else per block in front of integer codes."""
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


def _lower_sum(context: LoweringContext, node: ir.Node) -> None:
    _combine(context, node, "add")


def _lower_sum_and_norm(context: LoweringContext, node: ir.Node) -> None:
    """SkipSimplifiedLayerNormalization or SkipLayerNormalization: the sum, and its norm."""
    total = node.outputs[3] if len(node.outputs) > 3 else None
    if total is None:
        total = ir.Value(name=f"{node.name}.sum", shape=node.outputs[0].shape, type=node.outputs[0].type)
    left, right = (context.read(operand, node) for operand in node.inputs[:2])
    _emit_combine(context, node, "add", left, right.view, total)
    _normalize(context, node, total, node.inputs[2], node.outputs[0], node.inputs[3:])


def _lower_gate(context: LoweringContext, node: ir.Node, gate: Gate) -> None:
    gated, up = context.read(gate.gate, node), context.read(gate.up, node)
    _emit_combine(context, node, "gate", gated, up.view, node.outputs[0], gate.activation, numbers=gate.numbers)


def _lower_multiplication(context: LoweringContext, node: ir.Node) -> None:
    """By a number, or of two values."""
    divisor = scalar(node.inputs[1]) if node.op_type == "Div" else None
    if node.op_type == "Mul":
        _combine(context, node, "multiply")
    elif divisor:
        x = context.read(node.inputs[0], node)
        _emit_combine(context, node, "multiply", x, 1.0 / divisor, node.outputs[0])
    else:
        raise refusal(node, "divides by something other than a stored number")


def _lower_activation(context: LoweringContext, node: ir.Node) -> None:
    """An activation that gates nothing; Tanh is a softcap of 1."""
    if node.op_type == "Tanh":
        _emit_combine(context, node, "copy", context.read(node.inputs[0], node), None, node.outputs[0], cap=1.0)
        return
    found = activation(node.outputs[0])
    if found is None:
        raise refusal(node, "has an alpha other than 1")
    _emit_combine(context, node, "gate", context.read(node.inputs[0], node), 1.0, node.outputs[0], found[1])


def _lower_softplus(context: LoweringContext, node: ir.Node) -> None:
    _emit_combine(context, node, "gate", context.read(node.inputs[0], node), 1.0, node.outputs[0], "softplus")


def _lower_clip(context: LoweringContext, node: ir.Node) -> None:
    """Between two stored numbers, or one of them."""
    limits = np.finfo(np.float32)
    least, most = (
        float(default) if value is None else scalar(value)
        for value, default in zip((*node.inputs[1:], None, None), (limits.min, limits.max), strict=False)
    )
    if least is None or most is None:
        raise refusal(node, "clips to computed bounds; the CPU's operation takes stored numbers")
    x = context.read(node.inputs[0], node)
    _emit_combine(context, node, "gate", x, 1.0, node.outputs[0], "clamp", numbers=(least, most))


def _combine(context: LoweringContext, node: ir.Node, function: str) -> None:
    """Two values, or a value and a stored number or vector."""
    left, right = node.inputs[0], node.inputs[1]
    if scalar(left) is not None:
        left, right = right, left
    number = scalar(right)
    if number is None and left is not None and is_stored(left):
        left, right = right, left
    a = context.read(left, node)
    if number is not None:
        _emit_combine(context, node, function, a, number, node.outputs[0])
        return
    if right is not None and is_stored(right):
        if right.shape is None or [size for size in right.shape if size != 1] != [a.columns]:
            raise refusal(node, f"combines {a.columns} columns with {right.name!r}, which has other sizes")
        _emit_combine(context, node, function, a, None, node.outputs[0], vector=context.vector(right, node))
        return
    b = context.read(right, node)
    if a.columns < b.columns:
        a, b = b, a
    if b.columns not in (1, a.columns):
        raise refusal(node, f"combines {a.columns} and {b.columns} columns")
    is_broadcast = b.columns < a.columns
    _emit_combine(context, node, function, a, b.view, node.outputs[0], is_broadcast=is_broadcast)


def _emit_combine(
    context: LoweringContext,
    node: ir.Node,
    function: str,
    a: Rows,
    b: View | float | None,
    result: ir.Value,
    name: Activation = "none",
    cap: float = 0.0,
    is_broadcast: bool = False,
    numbers: tuple[float, ...] = (),
    vector: str | None = None,
) -> None:
    out = context.make(result, a.rows)
    operation = {
        "function": function,
        "a": a.view,
        "b": b,
        "vector": vector,
        "activation": name,
        "cap": cap,
        "rows": a.rows,
    }
    sizes = {"columns": a.columns, "broadcast": is_broadcast, "numbers": numbers}
    context.emit(Combine.model_validate({"node": node.name, "output": out.view, **sizes, **operation}))


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
    """Each operand in its own columns of the result: linear layers write there, other operands are copied."""
    if node.attributes.get_int("axis", 0) not in (-1, 1):
        raise refusal(node, "joins another axis than the last")
    parts = [context.read(value, node) for value in node.inputs]
    if len({part.rows for part in parts}) > 1:
        raise refusal(node, "joins rows of tokens and rows of logits")
    out = context.make(node.outputs[0], parts[0].rows)
    makers = {operation.output: place for place, operation in enumerate(context.draft.operations)}
    start = 0
    for value, part in zip(node.inputs, parts, strict=True):
        place, target = makers.get(part.view), out.slice(start, part.columns)
        maker = None if place is None else context.draft.operations[place]
        assert value is not None
        if place is not None and isinstance(maker, Linear) and sole_consumer(value) is node:
            context.draft.operations[place] = maker.model_copy(update={"output": target.view})
            del context.draft.buffers[part.view.buffer]
        else:
            sizes = {"a": part.view, "output": target.view, "columns": part.columns, "rows": part.rows}
            context.emit(Combine.model_validate({"node": node.name, "function": "copy", **sizes}))
        start += part.columns


def _lower_view(context: LoweringContext, node: ir.Node) -> None:
    """Reshape between [T, heads * dim] and [T, heads, dim]; a batch axis of one."""
    source = node.inputs[0]
    if not keeps_rows(node):
        raise refusal(node, "moves elements between rows")
    if source is not None and not source.is_graph_input():  # else position_ids, which attention reads itself
        context.put(node.outputs[0], context.read(source, node))


def _lower_rotation(context: LoweringContext, node: ir.Node) -> None:
    """A rotation that attention does not apply itself: of halves of each head, by the token's position."""
    positions = node.inputs[3] if len(node.inputs) > 3 else None
    source = None if positions is None else positions.producer()
    given = source.inputs[0] if source is not None and source.op_type == "Unsqueeze" else positions
    if node.attributes.get_int("interleaved", 0) or given is None or given.name != "position_ids":
        raise refusal(node, "rotates neighbours, or by other positions than position_ids")
    x, out, heads = (
        context.read(node.inputs[0], node),
        context.make(node.outputs[0], "tokens"),
        int_attribute(node, "num_heads"),
    )
    head_dim = x.columns // heads
    context.emit(
        Rotate(
            node=node.name or "",
            input=x.view,
            output=out.view,
            cos=context.table(node.inputs[1]),
            sin=context.table(node.inputs[2]),
            heads=heads,
            head_dim=head_dim,
            rotary_dim=int_attribute(node, "rotary_embedding_dim") or head_dim,
        )
    )


def _lower_attention(context: LoweringContext, node: ir.Node) -> None:
    heads, kv_heads, dim = (int_attribute(node, name) for name in ("num_heads", "num_kv_heads", "head_dim"))
    operands = [_operand(context, node, index) for index in range(3)]
    rotary, sinks = int_attribute(node, "rotary_dim"), attention_sinks(node)
    query = operands[0]
    assert query is not None
    context.emit(
        Attend(
            node=node.name or "",
            layer=int_attribute(node, "layer"),
            query=query,
            key=operands[1],
            value=operands[2],
            output=context.make(node.outputs[0], "tokens").view,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            value_dim=int_attribute(node, "value_dim"),
            scale=float_attribute(node, "scale"),
            softcap=float_attribute(node, "softcap"),
            window=int_attribute(node, "window"),
            cos=context.table(node.inputs[3]) if rotary else None,
            sin=context.table(node.inputs[4]) if rotary else None,
            rotary_dim=rotary,
            sinks=None if sinks is None else context.vector(sinks, node),
            arithmetic=context.attention,
        )
    )


def _lower_recurrent(context: LoweringContext, node: ir.Node) -> None:
    require_stored_operands(node)
    operands = [value for value in node.inputs if value is not None]
    common: dict[str, Any] = {"node": node.name or "", **recurrent_facts(node).model_dump()}
    common["output"] = context.make(node.outputs[0], "tokens").view

    def views(*names: str) -> dict[str, Any]:
        return {name: context.read(value, node).view for name, value in zip(names, operands, strict=False)}

    if node.op_type == CONVOLUTION:
        weight, *bias = operands[1:]
        by_tap = context.draft.add_vector(f"{weight.name}{_BY_TAP}", lambda: _transposed(weight))
        of_bias = context.vector(bias[0], node) if bias else None
        context.emit(Convolve(**common, **views("input"), weight=by_tap, bias=of_bias))
    elif node.op_type == DELTA_RULE:
        context.emit(ApplyDeltaRule(**common, **views("query", "key", "value", "decay", "beta")))
    else:
        a, d = (context.vector(value, node) for value in operands[4:])
        context.emit(Scan(**common, **views("input", "dt", "b", "c"), a=a, d=d))


def _transposed(weight: ir.Value) -> NDArray[np.float32]:
    return np.ascontiguousarray(float32_values(weight).T)


def _operand(context: LoweringContext, node: ir.Node, index: int) -> View | None:
    """Query, key or value: columns of the value that it is in; None where the layer shares another's."""
    value, column = attention_operands(node)[index], int_attribute(node, f"{('query', 'key', 'value')[index]}_column")
    return None if value is None else context.read(value, node).slice(column, 0).view


_BY_TAP = ".by-tap"  # a convolution's weight as its kernel reads it, [taps, channels]
_NORMS = ("LayerNormalization", "RMSNormalization")
_LAYER_NORMS = ("LayerNormalization", "SkipLayerNormalization")
_HANDLERS: Mapping[str, Callable[[LoweringContext, ir.Node], None]] = {
    "Add": _lower_sum,
    "Clip": _lower_clip,
    "CombineExperts": lower_combine,
    "Concat": _lower_concat,
    "DispatchExperts": lower_dispatch,
    "Div": _lower_multiplication,
    "Gather": _lower_gather,
    "GatedDeltaRule": _lower_recurrent,
    "Gelu": _lower_activation,
    "Gemm": _lower_gemm,
    "LayerNormalization": _lower_norm,
    "MatMul": _lower_matmul,
    "Mul": _lower_multiplication,
    "PagedAttention": _lower_attention,
    "QuickGelu": _lower_activation,
    "RMSNormalization": _lower_norm,
    "Relu": _lower_activation,
    "Reshape": _lower_view,
    "RouteExperts": lower_route,
    "RotaryEmbedding": _lower_rotation,
    "SelectiveScan": _lower_recurrent,
    "ShortConvolution": _lower_recurrent,
    "Sigmoid": _lower_activation,
    "SkipLayerNormalization": _lower_sum_and_norm,
    "SkipSimplifiedLayerNormalization": _lower_sum_and_norm,
    "Softplus": _lower_softplus,
    "Split": _lower_split,
    "Squeeze": _lower_view,
    "Swish": _lower_activation,
    "Tanh": _lower_activation,
    "Unsqueeze": _lower_view,
}
