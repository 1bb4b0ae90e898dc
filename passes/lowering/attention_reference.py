"""The pass attention-reference: ingot::PagedAttention in standard ONNX, so that plain onnxruntime runs a whole graph.

For tests against other implementations, and for debugging: it attends over every slot in the batch and masks, which is
correct and slow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.base import Pass, PassKind
from ingot.passes.lowering.expand_experts import expand_experts
from ingot.passes.rewriting import (
    add_constant,
    attention_operands,
    attention_sinks,
    attentions,
    head_counts,
    value_dim,
)

_FLOAT, _INT64 = ir.DataType.FLOAT, ir.DataType.INT64
_INPUTS = {
    "slot_mapping": "T",
    "query_sequences": "T",
    "kv_slots": "N",
    "kv_sequences": "N",
    "kv_positions": "N",
}


@dataclass(frozen=True)
class AttentionReference(Pass):
    """Expand every PagedAttention into scatter, gather, matmul and softmax.

    Matched       a = ingot::PagedAttention(q, k, v, , , sinks?)

    Replacement   key_cache_out.i   = ScatterND(key_cache.i, slot_mapping, k)           [slots, KV * D]
                  value_cache_out.i = ScatterND(value_cache.i, slot_mapping, v)
                  keys, values      = Gather(..., kv_slots)                             [N, KV * D]
                  values            = the last value_dim dims of keys, where v is missing: without a cache of their own
                  scores            = MatMul(q by head, keys by head) * scale           [KV, H / KV, T, N]
                  scores            = softcap * Tanh(scores / softcap)                  where there is a softcap
                  masked            = Where(visible, scores, -inf)
                  a                 = MatMul(Softmax(masked), values)
                  a                 = a * Sigmoid(ReduceLogSumExp(masked) - sinks)      where there are sinks

    visible [T, N] is true where a token's sequence is the slot's and the slot's position is at most the token's, and
    within the window where there is one.

    New graph inputs, all int64 but the caches; N counts the slots of all sequences, end to end in any order:
    slot_mapping [T]         slot that each token's key and value are written to
    query_sequences [T]      number of each token's sequence
    kv_slots [N]             slots of all sequences in the batch, this step's tokens included
    kv_sequences [N]         number of each slot's sequence
    kv_positions [N]         position of each slot
    key_cache.i, value_cache.i [slots, KV * D] float32; the outputs are key_cache_out.i, value_cache_out.i

    Refuses: a model without PagedAttention; two attentions of one layer; attentions that fuse-rotary-attention lowered.
    """

    name: ClassVar[str] = "attention-reference"
    kind: ClassVar[PassKind] = "lowering"
    summary: ClassVar[str] = "Expands paged attention into standard ONNX, to run the whole graph in plain onnxruntime."

    def requires(self, model: ir.Model) -> None:
        """There is an attention to expand, no two have the same layer, and none is lowered."""
        layers = [_int(node, "layer") for node in attentions(model.graph)]
        if not layers:
            raise PassError(f"{self.name}: the model has no ingot::PagedAttention; run this pass once, after import")
        if len(set(layers)) != len(layers):
            raise PassError(f"{self.name}: two PagedAttention nodes have the same layer: {sorted(layers)}")
        for node in attentions(model.graph):
            if any(attention_operands(node)[3:5]) or "query_column" in node.attributes:
                raise PassError(
                    f"{self.name}: {node.name!r} was lowered by fuse-rotary-attention; run {self.name} instead"
                )

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Expand every attention, and mixtures of experts."""
        expand_experts(model.graph)
        expansion = _Expansion(model.graph)
        for node in attentions(model.graph):
            expansion.expand(node)
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        """No PagedAttention is left."""
        if left := attentions(model.graph):
            raise PassError(f"{self.name}: {left[0].name} was not expanded")


def _int(node: ir.Node, attribute: str) -> int:
    return int(node.attributes[attribute].as_int())


class _Expansion:
    """Expands the attentions of one graph, which share the new inputs, constants and one mask per window."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.inputs = {name: self._input(name, _INT64, [dim]) for name, dim in _INPUTS.items()}
        self.positions = next(value for value in graph.inputs if value.name == "position_ids")
        self.slots: ir.Value | None = None
        self.masks: dict[int, ir.Value] = {}

    def expand(self, node: ir.Node) -> None:
        """Replace the attention by standard nodes."""
        self.anchor, self.path = node, f"{node.name}.reference"
        layer, (heads, kv_heads, head_dim) = _int(node, "layer"), head_counts(node)
        query, key, own_value, *_ = attention_operands(node)
        query, key = self._present(query, node), self._present(key, node)
        keys = self._cached("key", layer, key, kv_heads * head_dim)  # [N, KV * D]
        by_head = self._by_head("query", query, kv_heads, heads // kv_heads, head_dim, (1, 2, 0, 3))  # [KV, H/KV, T, D]
        keys = self._by_head("keys", keys, kv_heads, 1, head_dim, (1, 2, 3, 0))  # [KV, 1, D, N]
        values = self._values(node, own_value, keys)  # [KV, 1, N, V]
        scores = self._scores(by_head, keys, node)  # [KV, H/KV, T, N]
        masked = self._op("Where", "masked", [self._visible(_int(node, "window")), scores, self._scalar(-np.inf)])
        weights = self._op("Softmax", "weights", [masked], axis=-1)
        attended = self._op("MatMul", "attended", [weights, values])  # [KV, H/KV, T, V]
        if (sinks := attention_sinks(node)) is not None:
            by_query = self._op("Reshape", "sinks.by_head", [sinks, self._integers(kv_heads, heads // kv_heads, 1, 1)])
            everything = self._op("ReduceLogSumExp", "sinks.others", [masked, self._integers(-1)])
            others = self._op("Sigmoid", "sinks.share", [self._op("Sub", "sinks.distance", [everything, by_query])])
            attended = self._op("Mul", "sinks.attended", [attended, others])
        by_token = self._op("Transpose", "by_token", [attended], perm=(2, 0, 1, 3))
        flat = self._op("Reshape", "flat", [by_token, self._integers(0, heads * value_dim(node))])  # [T, H * V]
        self._replace(node, flat)

    def _values(self, node: ir.Node, own_value: ir.Value | None, keys: ir.Value) -> ir.Value:
        """Values [KV, 1, N, V]: those of the cache, or the last dims of the keys [KV, 1, D, N]."""
        (_, kv_heads, head_dim), dim, layer = head_counts(node), value_dim(node), _int(node, "layer")
        if own_value is None:
            bounds = [self._integers(head_dim - dim), self._integers(head_dim), self._integers(2)]
            latents = self._op("Slice", "latents", [keys, *bounds])  # [KV, 1, V, N]
            return self._op("Transpose", "values", [latents], perm=(0, 1, 3, 2))
        values = self._cached("value", layer, own_value, kv_heads * dim)
        return self._by_head("values", values, kv_heads, 1, dim, (1, 2, 0, 3))

    def _scores(self, query: ir.Value, keys: ir.Value, node: ir.Node) -> ir.Value:
        raw = self._op("MatMul", "product", [query, keys])
        scores = self._op("Mul", "scores", [raw, self._scalar(node.attributes["scale"].as_float())])
        softcap = node.attributes["softcap"].as_float()
        if not softcap:
            return scores
        divided = self._op("Div", "softcap.div", [scores, self._scalar(softcap)])
        return self._op("Mul", "softcap.mul", [self._op("Tanh", "softcap.tanh", [divided]), self._scalar(softcap)])

    def _visible(self, window: int) -> ir.Value:
        """The mask [T, N] bool of a window, made once, before its first reader."""
        if window not in self.masks:
            path, self.path = self.path, f"attention.window_{window}" if window else "attention.full"
            queries, keys = self._integers(1), self._integers(0)
            sequence = self._op("Unsqueeze", "sequence", [self.inputs["query_sequences"], queries])  # [T, 1]
            position = self._op("Unsqueeze", "position", [self.positions, queries])
            kv_sequence = self._op("Unsqueeze", "kv_sequence", [self.inputs["kv_sequences"], keys])  # [1, N]
            kv_position = self._op("Unsqueeze", "kv_position", [self.inputs["kv_positions"], keys])
            same = self._op("Equal", "same_sequence", [sequence, kv_sequence])
            past = self._op("LessOrEqual", "not_future", [kv_position, position])
            visible = self._op("And", "visible", [same, past])
            if window:
                distance = self._op("Sub", "distance", [position, kv_position])
                near = self._op("Less", "near", [distance, self._integers(window)])
                visible = self._op("And", "visible_near", [visible, near])
            self.masks[window], self.path = visible, path
        return self.masks[window]

    def _cached(self, kind: str, layer: int, fresh: ir.Value, columns: int) -> ir.Value:
        """Write this step's rows into the cache, then gather the rows of all sequences: [N, columns]."""
        cache = self._input(f"{kind}_cache.{layer}", _FLOAT, ["slots", columns])
        if self.slots is None:
            self.slots = self._op("Unsqueeze", "slots", [self.inputs["slot_mapping"], self._integers(1)])  # [T, 1]
        updated = self._op("ScatterND", f"{kind}.updated", [cache, self.slots, fresh])
        updated.name = f"{kind}_cache_out.{layer}"
        updated.type, updated.shape = ir.TensorType(_FLOAT), ir.Shape(["slots", columns])
        self.graph.outputs.append(updated)
        return self._op("Gather", f"{kind}.gathered", [updated, self.inputs["kv_slots"]], axis=0)

    def _by_head(
        self, what: str, x: ir.Value, kv_heads: int, group: int, head_dim: int, perm: tuple[int, ...]
    ) -> ir.Value:
        split = self._op("Reshape", f"{what}.split", [x, self._integers(0, kv_heads, group, head_dim)])
        return self._op("Transpose", f"{what}.by_head", [split], perm=perm)

    def _replace(self, node: ir.Node, result: ir.Value) -> None:
        old = node.outputs[0]
        result.type, result.shape = old.type, old.shape
        ir.convenience.replace_all_uses_with(old, result)
        self.graph.remove(node, safe=True)

    def _present(self, value: ir.Value | None, node: ir.Node) -> ir.Value:
        if value is None:
            raise PassError(f"{AttentionReference.name}: {node.name} has an empty input; it needs query, key and value")
        return value

    def _input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.graph.inputs.append(value)
        return value

    def _op(
        self, op_type: str, name: str, inputs: Sequence[ir.Value], **attributes: int | float | tuple[int, ...]
    ) -> ir.Value:
        node = ir.node(op_type, inputs, attributes, name=f"{self.path}.{name}")
        node.outputs[0].name = node.name
        node.metadata_props["ingot.pass"] = AttentionReference.name
        self.graph.insert_before(self.anchor, node)
        return node.outputs[0]

    def _integers(self, *numbers: int) -> ir.Value:
        name = "attention.integers." + ".".join(map(str, numbers))
        return add_constant(self.graph, name, np.array(numbers, np.int64))

    def _scalar(self, number: float) -> ir.Value:
        return add_constant(self.graph, f"attention.scalar.{number!r}", np.array(number, np.float32))
