"""Decoders whose layers have inputs and scales of their own, and experts next to a dense feed-forward.

Inputs of a layer, P of L * P columns (Gemma 3n and 4):

    inputs = (norm(projection(embedding) / sqrt(H)) + table[ids] * sqrt(P)) / sqrt(2)        [T, L * P]
    hidden = hidden + norm(up(act(down(hidden)) * inputs of the layer))
"""

from functools import partial

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.pipeline.checkpoint.config.layers import LayerConfig
from ingot.pipeline.checkpoint.tensors import LAYER_INPUTS, NORMS_BESIDE
from ingot.pipeline.model.decoder import DecoderBuilder
from ingot.pipeline.model.graph_builder import Dims, dims


class UnequalDecoderBuilder(DecoderBuilder):
    """Layers with inputs and scales of their own, and experts next to a dense feed-forward."""

    def _layers(self, hidden: ir.Value, input_ids: ir.Value) -> ir.Value:
        self._inputs = self._layer_inputs(hidden, input_ids)
        return super()._layers(hidden, input_ids)

    def _layer(self, path: str, index: int, layer: LayerConfig, hidden: ir.Value) -> ir.Value:
        hidden = super()._layer(path, index, layer, hidden)
        if self._inputs:
            hidden = self._residual(f"{path}.inputs", hidden, self._with_input(path, index, hidden))
        if not self.config.family.layer_scale:
            return hidden
        scale = self.builder.vector(self.config.tensor_name(f"model.{path}.layer_scalar"))
        return self.builder.op("Mul", f"{path}.layer_scalar", [hidden, scale], dims(hidden))

    def _layer_inputs(self, embedding: ir.Value, input_ids: ir.Value) -> tuple[ir.Value, ...]:
        """The inputs [T, P] of each layer; none if the family's layers have none."""
        b, config, inputs = self.builder, self.config, self.config.layer_inputs
        if inputs is None:
            return ()
        count, width = len(config.layers), inputs.width
        columns = count * width
        projected = self._linear("per_layer_model_projection", embedding, columns, False)
        scaled = self._scaled("per_layer_model_projection.scaled", projected, config.hidden_size**-0.5)
        normed = self._by_head(
            "per_layer_projection_norm", scaled, width, partial(self._norm, "per_layer_projection_norm")
        )
        rows: Dims = ["T", columns]
        found = b.op("Gather", "embed_tokens_per_layer", [self._table(), input_ids], rows, axis=0)
        found = self._scaled("embed_tokens_per_layer.scaled", found, width**0.5)
        both = b.op("Add", "per_layer_inputs.sum", [normed, found], rows)
        halved = self._scaled("per_layer_inputs", both, 2.0**-0.5)
        return self._split(
            "per_layer_inputs.split", halved, {f"layers.{layer}.inputs": width for layer in range(count)}
        )

    def _table(self) -> ir.Value:
        """The table of inputs; tokens beyond its rows have those of token 0."""
        config = self.config
        assert config.layer_inputs is not None
        missing = config.vocab_size - config.layer_inputs.vocab_size
        if missing <= 0:
            return self._weight(LAYER_INPUTS)
        shape: Dims = [config.vocab_size, len(config.layers) * config.layer_inputs.width]
        return self._weight(LAYER_INPUTS, shape, partial(_with_copies_of_first, missing))

    def _with_input(self, path: str, index: int, hidden: ir.Value) -> ir.Value:
        """Return the contribution of a layer's own input to the hidden state."""
        inputs, layer_inputs = self._inputs[index], self.config.layer_inputs
        assert layer_inputs is not None
        gate = self._linear(f"{path}.per_layer_input_gate", hidden, layer_inputs.width, False)
        active = self._activation(f"{path}.per_layer_input_gate", gate)
        gated = self.builder.op("Mul", f"{path}.per_layer_input_gate.gated", [active, inputs], dims(inputs))
        projected = self._linear(f"{path}.per_layer_projection", gated, self.config.hidden_size, False)
        return self._norm(f"{path}.post_per_layer_input_norm", projected)

    def _mlp(self, path: str, layer: LayerConfig, x: ir.Value, hidden: ir.Value) -> ir.Value:
        rules = self.config.family.experts
        if layer.experts is None or rules is None or not rules.with_dense:
            return super()._mlp(path, layer, x, hidden)
        dense = self._feed_forward(f"{path}.mlp", x, layer.shape.intermediate_size)
        after_dense, before, after = (f"{path}.{name}" for name in NORMS_BESIDE)
        routed_by = self._router_norm(f"{path}.moe", hidden)
        routed = self._experts(f"{path}.moe", self._norm(before, hidden), routed_by, layer.experts)
        both = [self._norm(after_dense, dense), self._norm(after, routed)]
        return self.builder.op("Add", f"{path}.moe.sum", both, dims(x))

    def _router_norm(self, path: str, hidden: ir.Value) -> ir.Value:
        """Return the router's input: normed, times a weight and the inverse square root of hidden_size."""
        name = self.config.tensor_name(f"model.{path}.router_scale")
        weight = self.builder.scaled(name, self.config.hidden_size**-0.5, f"model.{path}.router_norm.weight")
        return self._norm_by(f"{path}.router_norm", hidden, weight)

    def _expert_linear(self, path: str, expert: int, name: str, x: ir.Value, columns: int, start: int) -> ir.Value:
        """A linear layer of one expert; its last one has the factor of the expert's result in its weight."""
        rules = self.config.family.experts
        if rules is None or not rules.with_dense or name != "down_proj":
            return super()._expert_linear(path, expert, name, x, columns, start)
        own = f"{path}.experts.{expert}.{name}"
        names = [self.config.tensor_name(f"model.{path}.{part}") for part in ("fused_down", "per_expert_scale")]
        weight = self.builder.scaled_slice(names[0], expert, names[1], f"model.{own}.weight")
        return self.builder.op("Gemm", own, [x, weight], [dims(x)[0], columns], transB=1)


def _with_copies_of_first(count: int, table: NDArray[np.generic]) -> NDArray[np.generic]:
    return np.concatenate([table, np.repeat(table[:1], count, axis=0)])
