"""The recurrent layers of hybrids: gated short convolutions, gated delta rules, Mamba-2.

Each reads the normed hidden state [T, hidden_size] and makes what is added to the residual stream. What carries from
token to token are the recurrent ops of passes/recurrent_ops.py alone; all else is nodes over single tokens.
"""

from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.pipeline.checkpoint.config.decoder import DecoderConfig
from ingot.pipeline.checkpoint.config.recurrent import ConvolutionConfig, DeltaRuleConfig, RecurrentConfig, ScanConfig
from ingot.pipeline.model.graph_builder import Dims, GraphBuilder, dims

_Floats = NDArray[Any]


class RecurrentLayers:
    """Appends recurrent layers to a GraphBuilder, by `layer`."""

    def __init__(self, builder: GraphBuilder, config: DecoderConfig) -> None:
        self.builder = builder
        self.config = config

    def layer(self, path: str, index: int, recurrent: RecurrentConfig, x: ir.Value) -> ir.Value:
        """Append the recurrent layer of the model's layer `index`."""
        match recurrent:
            case ConvolutionConfig():
                return self._gated_convolution(path, index, recurrent, x)
            case DeltaRuleConfig():
                return self._delta_net(path, index, recurrent, x)
            case ScanConfig():
                return self._mamba(path, index, recurrent, x)

    def _gated_convolution(self, path: str, index: int, of: ConvolutionConfig, x: ir.Value) -> ir.Value:
        """out_proj(c * convolution(b * x)) of the thirds b, c, x of in_proj's result (LFM2)."""
        hidden = self.config.hidden_size
        parts = {f"{path}.{name}": hidden for name in ("b", "c", "x")}
        b, c, x = self._split(f"{path}.split", self._linear(f"{path}.in_proj", x, 3 * hidden, of.bias), parts)
        mixed = self._convolution(path, index, self._mul(f"{path}.opened", b, x), of.bias, "")
        return self._linear(f"{path}.out_proj", self._mul(f"{path}.gated", c, mixed), hidden, of.bias)

    def _delta_net(self, path: str, index: int, of: DeltaRuleConfig, x: ir.Value) -> ir.Value:
        """Gated DeltaNet (arXiv 2412.06464): out_proj(norm(rule(convolution(q, k, v))) * silu(z))."""
        b, heads, keys, values = self.builder, of.num_value_heads, of.key_columns, of.value_columns
        mixed, gate, beta, rate = self._projections(path, of, x)
        mixed = self._convolution(path, index, mixed, False, "silu", tuple(of.convolutions))
        widths = {f"{path}.query": keys, f"{path}.key": keys, f"{path}.value": values}
        query, key, value = self._split(f"{path}.mixed_split", mixed, widths)
        beta = b.op("Sigmoid", f"{path}.beta", [beta], ["T", heads])
        if of.beta_factor != 1.0:
            beta = self._mul(f"{path}.beta.scaled", beta, b.scalar(of.beta_factor))
        rate = b.op("Softplus", f"{path}.rate", [rate], ["T", heads])
        decay = self._mul(f"{path}.decay", rate, self._negative_exponential(path))
        result = b.op(
            "GatedDeltaRule",
            f"{path}.rule",
            [query, key, value, decay, beta],
            ["T", values],
            "ingot",
            layer=index,
            num_key_heads=of.num_key_heads,
            num_value_heads=heads,
            key_dim=of.key_dim,
            value_dim=of.value_dim,
            scale=of.key_dim**-0.5,
            normalize=1,
        )
        weight = b.weight(self._name(f"{path}.gate_norm.weight"))
        by_head = b.op(
            "Reshape", f"{path}.heads", [result, b.integers(0, heads, of.value_dim)], ["T", heads, of.value_dim]
        )
        normed = b.op(
            "RMSNormalization", f"{path}.gate_norm", [by_head, weight], dims(by_head), axis=-1, epsilon=of.norm_epsilon
        )
        normed = b.op("Reshape", f"{path}.flat", [normed, b.integers(0, values)], ["T", values])
        gated = self._mul(f"{path}.gated", normed, self._silu(f"{path}.gate", gate))
        return self._linear(f"{path}.out_proj", gated, self.config.hidden_size, False)

    def _projections(
        self, path: str, of: DeltaRuleConfig, x: ir.Value
    ) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
        """Queries, keys and values in one value; the gate z; b, before beta's sigmoid; a + dt_bias, before softplus."""
        rules, heads, keys, values = self.config.family.recurrent, of.num_value_heads, of.key_columns, of.value_columns
        assert rules is not None
        chosen: dict[str, tuple[str, NDArray[np.intp]]] = {}
        if rules.interleaved:
            chosen = _rows_of_interleaved(of)
        linear = partial(self._chosen_linear, path, chosen)
        if rules.separate:
            widths = {"q_proj": keys, "k_proj": keys, "v_proj": values}
            parts = [linear(name, x, width, []) for name, width in widths.items()]
            mixed = self.builder.op("Concat", f"{path}.in_proj_qkv", parts, ["T", 2 * keys + values], axis=-1)
        else:
            mixed = linear("in_proj_qkv", x, 2 * keys + values, [])
        bias = self._vector(f"{path}.dt_bias")
        gate, beta = linear("in_proj_z", x, values, []), linear("in_proj_b", x, heads, [])
        return mixed, gate, beta, linear("in_proj_a", x, heads, [bias])

    def _chosen_linear(
        self,
        path: str,
        chosen: dict[str, tuple[str, NDArray[np.intp]]],
        name: str,
        x: ir.Value,
        columns: int,
        bias: list[ir.Value],
    ) -> ir.Value:
        """The linear layer `name`, whose weight may be some rows of a stored one: (name of that, rows)."""
        own = f"{path}.{name}"
        if name in chosen:
            stored, rows = chosen[name]
            weight = self.builder.weight_rows(self._name(f"{path}.{stored}.weight"), rows, f"model.{own}.weight")
        else:
            weight = self.builder.weight(self._name(f"{own}.weight"))
        return self.builder.op("Gemm", own, [x, weight, *bias], ["T", columns], transB=1)

    def _mamba(self, path: str, index: int, of: ScanConfig, x: ir.Value) -> ir.Value:
        """Mamba-2 (arXiv 2405.21060): out_proj(norm(scan(convolution(x, B, C), dt) * silu(z)))."""
        b, heads, inner, shared, hidden = self.builder, of.num_heads, of.inner, of.shared, self.config.hidden_size
        m_in, *m_parts, m_out = of.multipliers
        mixed_width = inner + 2 * shared
        x = self._scaled(f"{path}.in", x, m_in)
        made = self._linear(f"{path}.in_proj", x, inner + mixed_width + heads, of.bias)
        made = self._parts_scaled(path, of, made, m_parts)
        widths = {f"{path}.gate": inner, f"{path}.mixed": mixed_width, f"{path}.dt": heads}
        gate, mixed, dt = self._split(f"{path}.split", made, widths)
        mixed = self._convolution(path, index, mixed, of.conv_bias, "silu")
        widths = {f"{path}.x": inner, f"{path}.B": shared, f"{path}.C": shared}
        parts = self._split(f"{path}.mixed_split", mixed, widths)
        dt = b.op("Add", f"{path}.dt.biased", [dt, self._vector(f"{path}.dt_bias")], ["T", heads])
        dt = b.op("Softplus", f"{path}.dt.positive", [dt], ["T", heads])
        dt = self._limited(f"{path}.dt", dt, *of.time_limits)
        result = b.op(
            "SelectiveScan",
            f"{path}.scan",
            [parts[0], dt, *parts[1:], self._negative_exponential(path), self._vector(f"{path}.D")],
            ["T", inner],
            "ingot",
            layer=index,
            num_heads=heads,
            head_dim=of.head_dim,
            state_dim=of.state_dim,
            num_groups=of.num_groups,
        )
        gate = self._silu(f"{path}.gate", gate)
        if of.gate_norm == "before-gate":
            result = self._group_norm(path, of, result)
        result = self._mul(f"{path}.gated", result, gate)
        if of.gate_norm == "after-gate":
            result = self._group_norm(path, of, result)
        return self._scaled(f"{path}.out", self._linear(f"{path}.out_proj", result, hidden, of.out_bias), m_out)

    def _limited(self, path: str, dt: ir.Value, least: float, most: float) -> ir.Value:
        """dt within the limits: least + relu(dt - least), then most - relu(most - dt): every engine has these nodes."""
        b, shape = self.builder, dims(dt)
        if least > 0:
            above = b.op("Add", f"{path}.above", [dt, b.scalar(-least)], shape)
            above = b.op("Relu", f"{path}.above.relu", [above], shape)
            dt = b.op("Add", f"{path}.at_least", [above, b.scalar(least)], shape)
        if np.isfinite(most):
            below = self._mul(f"{path}.negative", dt, b.scalar(-1.0))
            below = b.op("Add", f"{path}.below", [below, b.scalar(most)], shape)
            below = b.op("Relu", f"{path}.below.relu", [below], shape)
            below = self._mul(f"{path}.below.negative", below, b.scalar(-1.0))
            dt = b.op("Add", f"{path}.at_most", [below, b.scalar(most)], shape)
        return dt

    def _parts_scaled(self, path: str, of: ScanConfig, made: ir.Value, multipliers: list[float]) -> ir.Value:
        """The parts of in_proj's result, each times its multiplier."""
        if all(factor == 1.0 for factor in multipliers):
            return made
        widths = (of.inner, of.inner, of.shared, of.shared, of.num_heads)
        factors = np.repeat(np.array(multipliers, np.float32), widths)
        return self._mul(f"{path}.scaled", made, self.builder.constant(f"{path}.multipliers", factors))

    def _group_norm(self, path: str, of: ScanConfig, x: ir.Value) -> ir.Value:
        """RMS norm of each group of heads, times one weight of all columns."""
        b, groups, inner = self.builder, of.num_groups, of.inner
        weight = b.weight(self._name(f"{path}.gate_norm.weight"))
        if groups == 1:
            return b.op(
                "RMSNormalization", f"{path}.gate_norm", [x, weight], ["T", inner], axis=-1, epsilon=of.norm_epsilon
            )
        shape: Dims = ["T", groups, inner // groups]
        ones = b.constant(f"ones.{inner // groups}", np.ones(inner // groups, np.float32))
        by_group = b.op("Reshape", f"{path}.groups", [x, b.integers(0, groups, inner // groups)], shape)
        normed = b.op(
            "RMSNormalization", f"{path}.gate_norm", [by_group, ones], shape, axis=-1, epsilon=of.norm_epsilon
        )
        flat = b.op("Reshape", f"{path}.flat", [normed, b.integers(0, inner)], ["T", inner])
        return self._mul(f"{path}.gate_norm.weighted", flat, weight)

    def _convolution(
        self, path: str, index: int, x: ir.Value, bias: bool, activation: str, parts: tuple[str, ...] = ()
    ) -> ir.Value:
        """Convolve each channel with its last inputs; weights are stored as [channels, 1, width], by `parts`."""
        names = [self._name(f"{path}.{part}.weight") for part in ([f"{one}_conv1d" for one in parts] or ["conv1d"])]
        weight = self.builder.computed(f"model.{path}.conv1d.weight", names, _taps)
        inputs = [x, weight, *([self._vector(f"{path}.conv1d.bias")] if bias else [])]
        return self.builder.op(
            "ShortConvolution", f"{path}.conv1d", inputs, dims(x), "ingot", layer=index, activation=activation
        )

    def _negative_exponential(self, path: str) -> ir.Value:
        """A = -exp(A_log), [heads]."""
        return self.builder.computed(f"model.{path}.A", [self._name(f"{path}.A_log")], lambda log: -np.exp(log))

    def _silu(self, path: str, x: ir.Value) -> ir.Value:
        return self._mul(f"{path}.activation", x, self.builder.op("Sigmoid", f"{path}.sigmoid", [x], dims(x)))

    def _linear(self, path: str, x: ir.Value, columns: int, bias: bool) -> ir.Value:
        inputs = [x, self.builder.weight(self._name(f"{path}.weight"))]
        if bias:
            inputs.append(self.builder.weight(self._name(f"{path}.bias")))
        return self.builder.op("Gemm", path, inputs, ["T", columns], transB=1)

    def _split(self, path: str, x: ir.Value, widths: dict[str, int]) -> tuple[ir.Value, ...]:
        outputs: dict[str, Dims] = {name: ["T", width] for name, width in widths.items()}
        sizes = self.builder.integers(*widths.values())
        return tuple(self.builder.multi_op("Split", path, [x, sizes], outputs, axis=-1))

    def _mul(self, path: str, x: ir.Value, y: ir.Value) -> ir.Value:
        return self.builder.op("Mul", path, [x, y], dims(x))

    def _scaled(self, path: str, x: ir.Value, factor: float) -> ir.Value:
        return x if factor == 1.0 else self._mul(f"{path}.scaled", x, self.builder.scalar(factor))

    def _vector(self, path: str) -> ir.Value:
        return self.builder.vector(self._name(path))

    def _name(self, path: str) -> str:
        return self.config.tensor_name(f"model.{path}")


def _taps(*weights: _Floats) -> _Floats:
    """[channels, 1, width] of one or several convolutions -> [channels, width]."""
    return np.concatenate([weight[:, 0] for weight in weights])


def _rows_of_interleaved(of: DeltaRuleConfig) -> dict[str, tuple[str, NDArray[np.intp]]]:
    """Return each linear layer's rows of in_proj_qkvz and in_proj_ba, which are stored key head by key head."""
    heads, group = of.num_key_heads, of.num_value_heads // of.num_key_heads
    columns = group * of.value_dim
    query, key, value, gate = _by_head(heads, (of.key_dim, of.key_dim, columns, columns))
    b, a = _by_head(heads, (group, group))
    return {
        "in_proj_qkv": ("in_proj_qkvz", np.concatenate((query, key, value))),
        "in_proj_z": ("in_proj_qkvz", gate),
        "in_proj_b": ("in_proj_ba", b),
        "in_proj_a": ("in_proj_ba", a),
    }


def _by_head(heads: int, widths: tuple[int, ...]) -> list[NDArray[np.intp]]:
    """Rows of each part, where every head has rows of all parts one after another."""
    rows = np.arange(heads * sum(widths)).reshape(heads, -1)
    return [part.reshape(-1) for part in np.split(rows, np.cumsum(widths)[:-1], axis=1)]


def rows_of_gated_queries(heads: int, head_dim: int) -> list[NDArray[np.intp]]:
    """Rows of q_proj that make queries, and those that make their gates, where it has those of each head in turn."""
    return _by_head(heads, (head_dim, head_dim))
