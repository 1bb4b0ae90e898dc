"""Lowers a mixture of experts to one operation: its nodes become operations first, which it then takes.

logits -> RouteExperts                 kept until the experts are combined
x -> DispatchExperts -> x_0 ...        views of x: an operation of an expert is lowered as if it computed all rows
y_0 ... -> CombineExperts -> y         the experts' operations (pairs of gate and up, or up alone, then down) in one
"""

from typing import TypeGuard

import onnx_ir as ir

from ingot.artifact.programs.cpu_program import (
    Combine,
    ExpertLayer,
    Experts,
    Linear,
    Operation,
)
from ingot.artifact.programs.operation_row import View
from ingot.passes.lowering.expand_experts import routing_of
from ingot.pipeline.targets.cpu.fuse_operations import changed, gated
from ingot.pipeline.targets.cpu.lowering_context import LoweringContext, refusal

_OF_LAYER = tuple(name for name in ExpertLayer.model_fields)


def lower_route(context: LoweringContext, node: ir.Node) -> None:
    """Keep the node for the operation that computes it."""
    context.routes[node.outputs[0]] = node


def lower_dispatch(context: LoweringContext, node: ir.Node) -> None:
    """Let the operations of each expert read the input itself."""
    ids = node.inputs[1]
    assert ids is not None
    context.dispatched[ids] = len(context.draft.operations)
    x = context.read(node.inputs[0], node)
    for rows in node.outputs:
        context.put(rows, x)


def lower_combine(context: LoweringContext, node: ir.Node) -> None:
    """Take the operations of the experts from the draft, and put one in their place."""
    ids, *_ = node.inputs
    assert ids is not None
    route = context.routes[ids]
    if node.inputs[1] is not route.outputs[1]:
        raise refusal(node, "weighs experts by other weights than those of their router")
    draft, start = context.draft, context.dispatched[ids]
    makers = {operation.output.buffer: operation for operation in draft.operations[start:]}
    results = [context.read(result, node) for result in node.inputs[2:]]
    pairs = [_layers_of_expert(context, node, makers, result.view) for result in results]
    used = {id(operation) for pair in pairs for operation in pair[2]}
    draft.operations = [operation for operation in draft.operations if id(operation) not in used]
    for pair in pairs:
        for operation in pair[2]:
            del draft.buffers[operation.output.buffer]
    first = pairs[0][0]
    for up, _, _ in pairs:
        if up.input != first.input:
            raise refusal(
                node, f"has an expert with inputs of its own ({up.node}), and its operation reads one for all"
            )
    bias = route.inputs[1] if len(route.inputs) > 1 else None
    routing = routing_of(route)
    context.emit(
        Experts(
            node=node.name or "",
            logits=context.read(route.inputs[0], route).view,
            input=first.input,
            output=context.make(node.outputs[0], first.rows).view,
            up=tuple(_layer(up) for up, _, _ in pairs),
            down=tuple(_layer(down) for _, down, _ in pairs),
            bias=None if bias is None else context.vector(bias, route),
            chosen=routing.chosen,
            score=routing.score,
            groups=routing.groups,
            chosen_groups=routing.chosen_groups,
            group_best=routing.group_best,
            normalise=routing.normalise,
            least_sum=routing.least_sum,
            scale=routing.scale,
            margin=routing.margin,
            rows=first.rows,
        )
    )


def _layers_of_expert(
    context: LoweringContext, node: ir.Node, makers: dict[str, Operation], result: View
) -> tuple[Linear, Linear, list[Operation]]:
    """Gate and up in one layer, or up with its activation; down, and the operations that these replace."""
    down = makers.get(result.buffer)
    gate = makers.get(down.input.buffer) if isinstance(down, Linear) else None
    if not isinstance(down, Linear) or not _is_gate(gate):
        raise refusal(
            node, "adds experts other than down(act(gate) * up) and down(act(up)); the CPU's kernels compute such alone"
        )
    if not isinstance(gate.b, View):
        up = makers.get(gate.a.buffer)
        if not isinstance(up, Linear) or up.store != "store" or up.activation != "none":
            raise refusal(node, f"has an expert whose activation is not of a linear layer's result ({gate.node})")
        return changed(up, output=gate.output, activation=gate.activation, numbers=gate.numbers), down, [down, gate, up]
    layers = [makers[view.buffer] for view in (gate.a, gate.b)]
    up = gated(context.draft, layers[0], layers[1], gate)
    if up is None:
        raise refusal(node, f"has an expert whose gate and up projection have different forms ({gate.node})")
    return up, down, [down, gate, *{id(layer): layer for layer in layers}.values()]


def _is_gate(operation: Operation | None) -> TypeGuard[Combine]:
    if not isinstance(operation, Combine) or operation.function != "gate":
        return False
    return isinstance(operation.b, View) or operation.b == 1.0


def _layer(layer: Linear) -> ExpertLayer:
    return ExpertLayer.model_validate({name: getattr(layer, name) for name in _OF_LAYER})
