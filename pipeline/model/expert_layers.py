"""Mixtures of experts: a router, the experts' feed-forwards, each over the rows of its tokens, and their sum."""

from dataclasses import asdict
from functools import partial

import numpy as np
import onnx_ir as ir

from ingot.pipeline.checkpoint.config.experts import ExpertsConfig
from ingot.pipeline.model.activations import clamped_swiglu
from ingot.pipeline.model.decoder_parts import DecoderParts, width_of
from ingot.pipeline.model.graph_builder import Dims, dims


class ExpertLayers(DecoderParts):
    """Appends mixtures of experts, by `_experts`."""

    def _experts(self, path: str, x: ir.Value, routed_by: ir.Value, experts: ExpertsConfig) -> ir.Value:
        """A mixture of experts: each computes the rows of x of the tokens that are routed to it, N of T."""
        b, config, rules = self.builder, self.config, self.config.family.experts
        assert rules is not None
        hidden, width = config.hidden_size, experts.latent_size or config.hidden_size
        ids, weights = self._route(path, routed_by, experts)
        shapes: dict[str, Dims] = {
            f"{path}.experts.{expert}.rows": [f"{path}.N{expert}", width] for expert in range(experts.count)
        }
        read = self._linear(f"{path}.latent_in", x, width, config.mlp_bias) if experts.latent_size else x
        rows = b.multi_op("DispatchExperts", f"{path}.dispatch", [read, ids], shapes, "ingot")
        results = [self._expert(path, expert, of, experts) for expert, of in enumerate(rows)]
        routed = b.op("CombineExperts", f"{path}.combine", [ids, weights, *results], ["T", width], "ingot")
        if experts.latent_size:
            routed = self._linear(f"{path}.latent_out", routed, hidden, config.mlp_bias)
        if not experts.shared_size:
            return routed
        shared = self._feed_forward(f"{path}.shared_expert", x, experts.shared_size)
        if rules.shared_gate:
            gate = self._linear(f"{path}.shared_expert_gate", x, 1, False)
            open_by = b.op("Sigmoid", f"{path}.shared_expert_gate.sigmoid", [gate], ["T", 1])
            shared = b.op("Mul", f"{path}.shared_expert.gated_result", [shared, open_by], ["T", hidden])
        return b.op("Add", f"{path}.with_shared", [routed, shared], ["T", hidden])

    def _route(self, path: str, x: ir.Value, experts: ExpertsConfig) -> tuple[ir.Value, ir.Value]:
        """Numbers of the chosen experts of each token, and their weights, both [T, chosen]."""
        rules, routing = self.config.family.experts, experts.routing
        inputs = [self._linear(f"{path}.router", x, experts.count, rules is not None and rules.biases)]
        if rules is not None and rules.correction != "none":
            name = f"model.{path}.correction_bias"
            flat = partial(np.reshape, shape=(-1,))
            inputs.append(
                self._weight(name) if rules.correction == "vector" else self._weight(name, [experts.count], flat)
            )
        shapes: dict[str, Dims] = {
            f"{path}.expert_ids": ["T", routing.chosen],
            f"{path}.expert_weights": ["T", routing.chosen],
        }
        attributes = {name: int(value) if type(value) is bool else value for name, value in asdict(routing).items()}
        ids, weights = self.builder.multi_op("RouteExperts", f"{path}.route", inputs, shapes, "ingot", **attributes)
        ids.dtype = ir.DataType.INT64
        return ids, weights

    def _expert(self, path: str, expert: int, x: ir.Value, experts: ExpertsConfig) -> ir.Value:
        """down(act(gate(x)) * up(x)) of one expert's rows, or down(act(up(x)))."""
        own, width, inner = f"{path}.experts.{expert}", width_of(x), experts.inner_size
        if not self.config.family.gated:
            up = self._expert_linear(path, expert, "up_proj", x, inner, 0)
            return self._expert_linear(path, expert, "down_proj", self._activation(own, up), width, 0)
        gate, up = (
            self._expert_linear(path, expert, name, x, inner, start)
            for name, start in (("gate_proj", 0), ("up_proj", inner))
        )
        if experts.clamp is not None:
            gated = clamped_swiglu(self.builder, own, gate, up, *experts.clamp)
        else:
            gated = self.builder.op("Mul", f"{own}.gated", [self._activation(own, gate), up], [dims(x)[0], inner])
        return self._expert_linear(path, expert, "down_proj", gated, width, 0)

    def _expert_linear(self, path: str, expert: int, name: str, x: ir.Value, columns: int, start: int) -> ir.Value:
        """A linear layer of one expert; its weight may be rows of a tensor that holds those of all experts."""
        own = f"{path}.experts.{expert}.{name}"
        rules, is_down = self.config.family.experts, name == "down_proj"
        if rules is not None and rules.stacked:
            stored, rows = self.config.tensor_name(f"model.{path}.stacked.{name}"), width_of(x) if is_down else columns
            weight = self.builder.row_slice(stored, expert * rows, rows, f"model.{own}.weight", transposed=is_down)
            return self.builder.op("Gemm", own, [x, weight], [dims(x)[0], columns], transB=1)
        if not self.config.fused_experts:
            return self._linear(own, x, columns, False)
        fused = self.config.tensor_name(f"model.{path}.fused_{'down' if is_down else 'gate_up'}")
        if self.config.transposed_experts:
            chosen = range(start, start + columns)
            weight = self.builder.transposed_slice(fused, expert, chosen, f"model.{own}.weight")
        elif rules is not None and rules.in_turns:
            chosen = range(columns) if is_down else range(int(name == "up_proj"), 2 * columns, 2)
            weight = self.builder.transposed_slice(fused, expert, chosen, f"model.{own}.weight")
            biases = self.config.tensor_name(f"model.{path}.fused_{'down' if is_down else 'gate_up'}_bias")
            bias = self.builder.vector_slice(biases, expert, chosen, f"model.{own}.bias")
            return self.builder.op("Gemm", own, [x, weight, bias], [dims(x)[0], columns], transB=1)
        else:
            weight = self.builder.weight_slice(fused, expert, start, columns, f"model.{own}.weight")
        return self.builder.op("Gemm", own, [x, weight], [dims(x)[0], columns], transB=1)
