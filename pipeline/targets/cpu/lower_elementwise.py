"""Lowers additions, multiplications, gates, activations and clips, each to one operation `Combine` over rows."""

import onnx_ir as ir

from ingot.artifact.programs.cpu_program import Activation, Combine
from ingot.artifact.programs.operation_row import View
from ingot.passes.weights import is_stored
from ingot.pipeline.targets.cpu.lowering_context import LoweringContext, Rows, refusal
from ingot.pipeline.targets.fusions import Gate, activation, clip_bounds, scalar


def lower_sum(context: LoweringContext, node: ir.Node) -> None:
    _combine(context, node, "add")


def lower_gate(context: LoweringContext, node: ir.Node, gate: Gate) -> None:
    gated, up = context.read(gate.gate, node), context.read(gate.up, node)
    emit_combine(context, node, "gate", gated, up.view, node.outputs[0], gate.activation, numbers=gate.numbers)


def lower_multiplication(context: LoweringContext, node: ir.Node) -> None:
    """By a number, or of two values."""
    divisor = scalar(node.inputs[1]) if node.op_type == "Div" else None
    if node.op_type == "Mul":
        _combine(context, node, "multiply")
    elif divisor:
        x = context.read(node.inputs[0], node)
        emit_combine(context, node, "multiply", x, 1.0 / divisor, node.outputs[0])
    else:
        raise refusal(node, "divides by something other than a stored number")


def lower_activation(context: LoweringContext, node: ir.Node) -> None:
    """An activation that gates nothing; Tanh is a softcap of 1."""
    if node.op_type == "Tanh":
        emit_combine(context, node, "copy", context.read(node.inputs[0], node), None, node.outputs[0], cap=1.0)
        return
    found = activation(node.outputs[0])
    if found is None:
        raise refusal(node, "has an alpha other than 1")
    emit_combine(context, node, "gate", context.read(node.inputs[0], node), 1.0, node.outputs[0], found[1])


def lower_softplus(context: LoweringContext, node: ir.Node) -> None:
    emit_combine(context, node, "gate", context.read(node.inputs[0], node), 1.0, node.outputs[0], "softplus")


def lower_clip(context: LoweringContext, node: ir.Node) -> None:
    """Between two stored numbers, or one of them."""
    bounds = clip_bounds(node)
    if bounds is None:
        raise refusal(node, "clips to computed bounds; the CPU's operation takes stored numbers")
    x = context.read(node.inputs[0], node)
    emit_combine(context, node, "gate", x, 1.0, node.outputs[0], "clamp", numbers=bounds)


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
        emit_combine(context, node, function, a, number, node.outputs[0])
        return
    if right is not None and is_stored(right):
        if right.shape is None or [size for size in right.shape if size != 1] != [a.columns]:
            raise refusal(node, f"combines {a.columns} columns with {right.name!r}, which has other sizes")
        emit_combine(context, node, function, a, None, node.outputs[0], vector=context.vector(right, node))
        return
    b = context.read(right, node)
    if a.columns < b.columns:
        a, b = b, a
    if b.columns not in (1, a.columns):
        raise refusal(node, f"combines {a.columns} and {b.columns} columns")
    is_broadcast = b.columns < a.columns
    emit_combine(context, node, function, a, b.view, node.outputs[0], is_broadcast=is_broadcast)


def emit_combine(
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
