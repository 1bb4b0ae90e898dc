"""Building blocks of a decoder's layers: linear layers, norms, activations, dense feed-forwards."""

import numpy as np
import onnx_ir as ir

from ingot.pipeline.checkpoint.config.decoder import DecoderConfig
from ingot.pipeline.model.activations import activation
from ingot.pipeline.model.graph_builder import Dims, GraphBuilder, Rewrite, dims


class DecoderParts:
    """Appends parts of layers to a GraphBuilder. A path is that of Llama's tensors, such as "layers.0.mlp"."""

    def __init__(self, builder: GraphBuilder, config: DecoderConfig) -> None:
        self.builder = builder
        self.config = config

    def _feed_forward(self, path: str, x: ir.Value, inner: int) -> ir.Value:
        config = self.config
        names = [f"{path}.gate_proj", f"{path}.up_proj"]
        if not config.family.gated:
            up = self._linear(names[1], x, inner, config.mlp_bias)
            return self._linear(f"{path}.down_proj", self._activation(path, up), config.hidden_size, config.mlp_bias)
        if config.family.fused_gate_up:
            fused = self._linear(f"{path}.gate_up_proj", x, 2 * inner, config.mlp_bias)
            gate, up = self._split(f"{path}.gate_up_split", fused, dict.fromkeys(names, inner))
        else:
            gate, up = (self._linear(name, x, inner, config.mlp_bias) for name in names)
        gate = self._scaled(f"{path}.gate", gate, config.multipliers.gate)
        gated = self.builder.op("Mul", f"{path}.gated", [self._activation(path, gate), up], ["T", inner])
        if config.family.inner_norms:
            gated = self._norm(f"{path}.ffn_sub_norm", gated)
        down = self._linear(f"{path}.down_proj", gated, config.hidden_size, config.mlp_bias)
        return self._scaled(f"{path}.down", down, config.multipliers.down)

    def _activation(self, path: str, x: ir.Value) -> ir.Value:
        return activation(
            self.builder, self.config.activation, path, x, lambda name: self._weight(f"model.{path}.{name}")
        )

    def _linear(self, path: str, x: ir.Value, columns: int, bias: bool, rows: Rewrite | None = None) -> ir.Value:
        """x @ W^T + b; `rows` puts the rows of the stored W and b in the order that they are computed in."""
        rewrite = np.transpose if self.config.family.transposed else rows
        weight = self._weight(f"model.{path}.weight", [columns, width_of(x)], rewrite)
        inputs = [x, weight, *([self._weight(f"model.{path}.bias", [columns], rows)] if bias else [])]
        return self.builder.op("Gemm", path, inputs, [dims(x)[0], columns], transB=1)

    def _weight(self, path: str, shape: Dims = (), rewrite: Rewrite | None = None) -> ir.Value:
        """The tensor that Llama calls `path`, rewritten to `shape` if it is stored in another arrangement."""
        name = self.config.tensor_name(path)
        return self.builder.rewritten_weight(name, shape, rewrite) if rewrite else self.builder.weight(name)

    def _split(self, path: str, x: ir.Value, widths: dict[str, int]) -> tuple[ir.Value, ...]:
        outputs: dict[str, Dims] = {name: ["T", width] for name, width in widths.items()}
        return tuple(
            self.builder.multi_op("Split", path, [x, self.builder.integers(*widths.values())], outputs, axis=-1)
        )

    def _norm(self, path: str, x: ir.Value) -> ir.Value:
        name = f"model.{path}.weight"
        # Ones of its own for each norm: passes may fold scales into them.
        if not self.config.family.norms_have_weights:
            return self._norm_by(path, x, self.builder.constant(name, np.ones(width_of(x), np.float32)))
        return self._norm_by(path, x, self._weight(name))

    def _plain_norm(self, path: str, x: ir.Value) -> ir.Value:
        """A norm without a weight."""
        ones = self.builder.constant(f"ones.{width_of(x)}", np.ones(width_of(x), np.float32))
        return self.builder.op("RMSNormalization", path, [x, ones], dims(x), axis=-1, epsilon=self.config.norm_epsilon)

    def _norm_by(self, path: str, x: ir.Value, weight: ir.Value) -> ir.Value:
        if self.config.family.norm_adds_one:
            one = self.builder.scalar(1.0)
            weight = self.builder.op("Add", f"{path}.one_plus", [weight, one], dims(weight))
        kind, epsilon = self.config.family.norm, self.config.norm_epsilon
        inputs = [x, weight, *([self._weight(f"model.{path}.bias")] if kind == "layer-with-bias" else [])]
        op_type = "RMSNormalization" if kind.startswith("rms") else "LayerNormalization"
        return self.builder.op(op_type, path, inputs, dims(x), axis=-1, epsilon=epsilon)

    def _residual(self, path: str, hidden: ir.Value, branch: ir.Value) -> ir.Value:
        scaled = self._scaled(f"{path}.scaled", branch, self.config.residual_multiplier)
        return self.builder.op("Add", f"{path}.residual", [hidden, scaled], ["T", self.config.hidden_size])

    def _scaled(self, path: str, x: ir.Value, factor: float) -> ir.Value:
        if factor == 1.0:
            return x
        return self.builder.op("Mul", path, [x, self.builder.scalar(factor)], dims(x))


def width_of(x: ir.Value) -> int:
    """Size of the last axis, which is never symbolic in a decoder."""
    size = dims(x)[-1]
    assert isinstance(size, int)
    return size
