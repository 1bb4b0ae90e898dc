"""Recurrent ops over whole sequences in onnxruntime's own operators, for calibration.

    ShortConvolution    com.microsoft::CausalConvWithState, channels last
    GatedDeltaRule      com.microsoft::LinearAttention, gated_delta, with queries and keys repeated for the value heads
    SelectiveScan       com.microsoft::LinearAttention, gated: queries C, keys B, values dt * x, decay dt * A; and D * x

Each sequence of a chunk starts from a state of zeros. Padding follows a sequence's tokens, so none of them reads it.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ingot.passes.numerics.recurrences import L2_EPSILON
from ingot.passes.recurrent_ops import CONVOLUTION, DELTA_RULE, delta_rule_of, scan_of
from ingot.passes.rewriting import row_columns
from ingot.pipeline.calibrate.sequences import AddConstant, AddOp, FixedLayout


def expand_recurrent(
    node: ir.Node, inputs: list[ir.Value | None], layout: FixedLayout, add: AddOp, constant: AddConstant
) -> ir.Value:
    """Add the nodes; return the value that replaces the node's output, [tokens, columns]."""
    expansion = _Expansion(layout, add, constant)
    operands = [value for value in inputs if value is not None]
    if node.op_type == CONVOLUTION:
        result = expansion.convolution(node, operands)
    elif node.op_type == DELTA_RULE:
        result = expansion.delta_rule(node, operands)
    else:
        result = expansion.scan(node, operands)
    return layout.flat(result, row_columns(node.outputs[0]))


class _Expansion:
    """Makes the nodes of one op; its values are [B, S, columns]."""

    def __init__(self, layout: FixedLayout, add: AddOp, constant: AddConstant) -> None:
        self.layout, self.add, self.constant = layout, add, constant

    def convolution(self, node: ir.Node, operands: list[ir.Value]) -> ir.Value:
        x, weight, *bias = operands
        by_sequence = self.layout.shaped(x, row_columns(node.outputs[0]))
        taps = self.add("Unsqueeze", [weight, self._integers(1)])  # [channels, 1, width]
        activation = node.attributes["activation"].as_string() or "none"
        return self._with_state(
            "CausalConvWithState", [by_sequence, taps, *bias], channels_last=1, activation=activation
        )

    def delta_rule(self, node: ir.Node, operands: list[ir.Value]) -> ir.Value:
        q, k, v, decay, beta = operands
        rule = delta_rule_of(node)
        heads = rule.num_value_heads
        query, key = (self._repeated(x, rule.num_key_heads, heads, rule.key_dim, rule.normalize) for x in (q, k))
        value = self.layout.shaped(v, heads * rule.value_dim)
        gates = [self.layout.shaped(x, heads) for x in (decay, beta)]
        return self._attention([query, key, value, None, *gates], "gated_delta", heads, rule.scale)

    def scan(self, node: ir.Node, operands: list[ir.Value]) -> ir.Value:
        x, dt, b, c, a, d = operands
        of = scan_of(node)
        heads, dim = of.num_heads, of.head_dim
        query, key = (self._repeated(y, of.num_groups, heads, of.state_dim, False) for y in (c, b))
        by_head, step = self.layout.shaped(x, heads, dim), self.layout.shaped(dt, heads)
        wide = self.add("Unsqueeze", [step, self._integers(3)])  # [B, S, heads, 1]
        value = self._flat(self.add("Mul", [by_head, wide]), heads * dim)
        decay = self.add("Mul", [step, a])
        scanned = self._attention([query, key, value, None, decay], "gated", heads, 1.0)
        kept = self.add("Mul", [by_head, self.add("Unsqueeze", [d, self._integers(1)])])
        return self.add("Add", [scanned, self._flat(kept, heads * dim)])

    def _attention(self, inputs: list[ir.Value | None], rule: str, heads: int, scale: float) -> ir.Value:
        heads_of = {"q_num_heads": heads, "kv_num_heads": heads}
        return self._with_state("LinearAttention", inputs, update_rule=rule, scale=scale, **heads_of)

    def _with_state(self, op_type: str, inputs: Sequence[ir.Value | None], **attributes: int | float | str) -> ir.Value:
        """An operator whose second output, the state after the last token, is unused."""
        return self.add(op_type, inputs, domain="com.microsoft", num_outputs=2, **attributes)

    def _repeated(self, x: ir.Value, own: int, heads: int, dim: int, normalize: bool) -> ir.Value:
        """The vectors of `own` heads, each for the next of `heads`, divided by their lengths if wanted."""
        by_head = self.layout.shaped(x, own, dim)
        if normalize:
            squares = self.add("ReduceSumSquare", [by_head, self._integers(3)], keepdims=1)
            length = self.add("Sqrt", [self.add("Add", [squares, self.constant(np.array(L2_EPSILON, np.float32))])])
            by_head = self.add("Div", [by_head, length])
        sources = self.constant(np.arange(heads) // (heads // own))
        return self._flat(self.add("Gather", [by_head, sources], axis=2), heads * dim)

    def _flat(self, x: ir.Value, columns: int) -> ir.Value:
        return self.add("Reshape", [x, self._integers(0, 0, columns)])

    def _integers(self, *numbers: int) -> ir.Value:
        return self.constant(np.array(numbers, np.int64))
