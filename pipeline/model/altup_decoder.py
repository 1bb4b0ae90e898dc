"""Gemma 3n's decoder: several residual streams (AltUp), blocks next to attention (LAuReL), sparse gates.

AltUp (arXiv 2301.13310): S streams [T, H], m = tanh(router(norm(x)) / H) [T, S].

    predicted_i = stream_i + sum over j of P(m)_ij * stream_j          m of the active stream
    result      = the layer, of the active predicted stream
    corrected_i = predicted_i + (C(m)_i + 1) * (result - predicted_active)          m of the result

LAuReL (arXiv 2411.07501): x + norm(right(left(x))) of what attention reads, added to its result.
"""

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import onnx_ir as ir

from ingot.pipeline.checkpoint.config.layers import LayerConfig
from ingot.pipeline.checkpoint.config.unequal_layers import AltUp
from ingot.pipeline.model.graph_builder import dims
from ingot.pipeline.model.unequal_decoder import UnequalDecoderBuilder

_LEAST_MEAN_SQUARE = 1e-5


class AltUpDecoderBuilder(UnequalDecoderBuilder):
    """Layers that read one of several residual streams."""

    @property
    def _altup(self) -> AltUp:
        assert self.config.altup is not None
        return self.config.altup

    def _layers(self, hidden: ir.Value, input_ids: ir.Value) -> ir.Value:
        self._inputs = self._layer_inputs(hidden, input_ids)
        others = [
            self._as_large(path, self._linear(path, hidden, self.config.hidden_size, False), hidden)
            for path in self._paths("altup_projections")
        ]
        streams = [hidden, *others]
        for index, layer in enumerate(self.config.layers):
            streams = self._streams(f"layers.{index}", index, layer, streams)
        return self._mean(streams)

    def _paths(self, name: str) -> list[str]:
        return [f"{name}.{stream}" for stream in range(self._altup.streams - 1)]

    def _mean(self, streams: Sequence[ir.Value]) -> ir.Value:
        """The mean of all streams, each with the size of the first."""
        total, hidden = streams[0], self.config.hidden_size
        for path, stream in zip(self._paths("altup_unembed_projections"), streams[1:], strict=True):
            sized = self._as_large(path, self._linear(path, stream, hidden, False), streams[0])
            total = self.builder.op("Add", f"{path}.sum", [total, sized], dims(total))
        return self._scaled("altup_mean", total, 1 / len(streams))

    def _streams(self, path: str, index: int, layer: LayerConfig, streams: Sequence[ir.Value]) -> list[ir.Value]:
        """A layer: every stream after it."""
        predicted = self._predict(f"{path}.altup", streams)
        result = self._layer_of_one(path, index, layer, predicted[self._altup.active])
        corrected = self._correct(f"{path}.altup", predicted, result)
        first = corrected[self._altup.active]
        if self._altup.scales_correction:
            scale = self.builder.vector(self.config.tensor_name(f"model.{path}.altup.correct_output_scale"))
            first = self.builder.op("Mul", f"{path}.altup.scaled", [first, scale], dims(first))
        added = self._with_input(path, index, first)
        others = [
            self.builder.op("Add", f"{path}.inputs.{stream}", [value, added], dims(value))
            for stream, value in enumerate(corrected[1:], start=1)
        ]
        return [corrected[0], *others]

    def _layer_of_one(self, path: str, index: int, layer: LayerConfig, hidden: ir.Value) -> ir.Value:
        """Attention and LAuReL side by side, then the feed-forward."""
        b, shape = self.builder, dims(hidden)
        x = self._norm(f"{path}.input_layernorm", hidden)
        laurel = self._laurel(f"{path}.laurel", x)
        attended = self._attention(f"{path}.self_attn", index, layer, x)
        attended = self._residual(f"{path}.self_attn", hidden, self._norm(f"{path}.post_attention_layernorm", attended))
        both = b.op("Add", f"{path}.laurel.sum", [attended, laurel], shape)
        both = self._scaled(f"{path}.laurel.scaled", both, 2.0**-0.5)
        fed = self._mlp(path, layer, self._norm(f"{path}.pre_feedforward_layernorm", both), both)
        return self._residual(f"{path}.mlp", both, self._norm(f"{path}.post_feedforward_layernorm", fed))

    def _laurel(self, path: str, x: ir.Value) -> ir.Value:
        left = self._linear(f"{path}.linear_left", x, self._altup.laurel_rank, False)
        right = self._linear(f"{path}.linear_right", left, self.config.hidden_size, False)
        return self.builder.op("Add", f"{path}.block", [x, self._norm(f"{path}.post_laurel_norm", right)], dims(x))

    def _predict(self, path: str, streams: Sequence[ir.Value]) -> list[ir.Value]:
        count = len(streams)
        routed = self._routed(path, "predict", streams[self._altup.active])
        coefficients = self._linear(f"{path}.prediction_coefs", routed, count**2, False)
        columns = self._columns_of(f"{path}.prediction", coefficients)  # row by row of P
        return [
            self._weighted(f"{path}.predicted.{to}", stream, streams, columns[to * count : (to + 1) * count])
            for to, stream in enumerate(streams)
        ]

    def _correct(self, path: str, predicted: Sequence[ir.Value], result: ir.Value) -> list[ir.Value]:
        b, routed = self.builder, self._routed(path, "correct", result)
        coefficients = self._linear(f"{path}.correction_coefs", routed, len(predicted), False)
        raised = b.op("Add", f"{path}.correction_coefs.plus_one", [coefficients, b.scalar(1.0)], dims(coefficients))
        news = b.op("Sub", f"{path}.innovation", [result, predicted[self._altup.active]], dims(result))
        return [
            self._weighted(f"{path}.corrected.{to}", stream, [news], [column])
            for to, (stream, column) in enumerate(
                zip(predicted, self._columns_of(f"{path}.correction", raised), strict=True)
            )
        ]

    def _routed(self, path: str, step: str, x: ir.Value) -> ir.Value:
        """tanh(router(norm(x)) / H), [T, S]."""
        b, streams = self.builder, self._altup.streams
        weight, router = (self._weight(f"model.{path}.{name}.weight") for name in ("router_norm", "modality_router"))
        normed = self._norm_by(f"{path}.router_norm.{step}", x, weight)
        logits = b.op("Gemm", f"{path}.modality_router.{step}", [normed, router], ["T", streams], transB=1)
        scaled = self._scaled(f"{path}.modality_router.{step}.scaled", logits, 1 / self.config.hidden_size)
        return b.op("Tanh", f"{path}.modality_router.{step}.tanh", [scaled], ["T", streams])

    def _columns_of(self, path: str, x: ir.Value) -> tuple[ir.Value, ...]:
        """Each column of x, [T, 1]."""
        count = dims(x)[1]
        assert isinstance(count, int)
        return self._split(f"{path}.columns", x, {f"{path}.{column}": 1 for column in range(count)})

    def _weighted(
        self, path: str, start: ir.Value, values: Sequence[ir.Value], columns: Sequence[ir.Value]
    ) -> ir.Value:
        """start + the sum of each value times its column."""
        total = None
        for number, (value, column) in enumerate(zip(values, columns, strict=True)):
            term = self.builder.op("Mul", f"{path}.term.{number}", [value, column], dims(value))
            total = term if total is None else self.builder.op("Add", f"{path}.{number}", [total, term], dims(value))
        assert total is not None
        return self.builder.op("Add", path, [total, start], dims(start))

    def _as_large(self, path: str, x: ir.Value, like: ir.Value) -> ir.Value:
        """x with the root mean square of each row of `like`."""
        b = self.builder
        own = b.op(
            "Max", f"{path}.mean_square", [self._mean_square(f"{path}.own", x), b.scalar(_LEAST_MEAN_SQUARE)], ["T", 1]
        )
        sizes = [b.op("Sqrt", f"{path}.own.root", [own], ["T", 1])]
        sizes.append(b.op("Sqrt", f"{path}.like.root", [self._mean_square(f"{path}.like", like)], ["T", 1]))
        grown = b.op("Mul", f"{path}.grown", [x, sizes[1]], dims(x))
        return b.op("Div", f"{path}.sized", [grown, sizes[0]], dims(x))

    def _mean_square(self, path: str, x: ir.Value) -> ir.Value:
        squared = self.builder.op("Mul", f"{path}.squared", [x, x], dims(x))
        return self._row_mean(f"{path}.mean", squared)

    def _row_mean(self, path: str, x: ir.Value) -> ir.Value:
        return self.builder.op("ReduceMean", path, [x, self.builder.integers(-1)], [dims(x)[0], 1], keepdims=1)

    def _mlp(self, path: str, layer: LayerConfig, x: ir.Value, hidden: ir.Value) -> ir.Value:
        if not layer.shape.sparsity:
            return super()._mlp(path, layer, x, hidden)
        inner, own = layer.shape.intermediate_size, f"{path}.mlp"
        gate, up = (self._linear(f"{own}.{name}", x, inner, False) for name in ("gate_proj", "up_proj"))
        active = self._activation(own, self._sparse(f"{own}.sparse", gate, layer.shape.sparsity))
        gated = self.builder.op("Mul", f"{own}.gated", [active, up], dims(up))
        return self._linear(f"{own}.down_proj", gated, self.config.hidden_size, False)

    def _sparse(self, path: str, x: ir.Value, share: float) -> ir.Value:
        """relu(x - cutoff), the cutoff of a share of a normal distribution with the row's mean and deviation."""
        b, deviations = self.builder, NormalDist().inv_cdf(float(np.float32(share)))
        mean = self._row_mean(f"{path}.mean", x)
        centred = b.op("Sub", f"{path}.centred", [x, mean], dims(x))
        deviation = b.op("Sqrt", f"{path}.deviation", [self._mean_square(f"{path}.variance", centred)], ["T", 1])
        reach = self._scaled(f"{path}.reach", deviation, deviations)
        cutoff = b.op("Add", f"{path}.cutoff", [mean, reach], ["T", 1])
        return b.op("Relu", f"{path}.relu", [b.op("Sub", f"{path}.above", [x, cutoff], dims(x))], dims(x))
