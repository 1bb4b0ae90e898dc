"""Lowers what mixes the tokens of a sequence: attention, the rotation before it, and recurrent layers."""

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.programs.cpu_program import (
    ApplyDeltaRule,
    Attend,
    Convolve,
    Rotate,
    Scan,
)
from ingot.artifact.programs.operation_row import View
from ingot.passes.recurrent_ops import CONVOLUTION, DELTA_RULE
from ingot.passes.rewriting import attention_operands, attention_sinks
from ingot.passes.weights import float32_values
from ingot.pipeline.targets.cpu.lowering_context import LoweringContext, float_attribute, int_attribute, refusal
from ingot.pipeline.targets.recurrent_layers import recurrent_facts, require_stored_operands

_BY_TAP = ".by-tap"  # a convolution's weight as its kernel reads it, [taps, channels]


def lower_rotation(context: LoweringContext, node: ir.Node) -> None:
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


def lower_attention(context: LoweringContext, node: ir.Node) -> None:
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


def lower_recurrent(context: LoweringContext, node: ir.Node) -> None:
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
