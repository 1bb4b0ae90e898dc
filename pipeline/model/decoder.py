"""The one decoder graph of all families: their differences are fields of DecoderConfig and Family.

T tokens of all sequences are packed end to end, without padding; R of them need logits. Hidden states are
[T, hidden_size].
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.pipeline.checkpoint.config import DecoderConfig
from ingot.pipeline.checkpoint.experts_config import ExpertsConfig
from ingot.pipeline.checkpoint.layers_config import LayerConfig
from ingot.pipeline.checkpoint.tensors import EMBEDDING, HEAD, HEAD_BIAS, POSITIONS
from ingot.pipeline.model.activations import activation, clamped_swiglu
from ingot.pipeline.model.graph_builder import Dims, GraphBuilder, Rewrite, dims
from ingot.pipeline.model.latent_attention import LatentAttention
from ingot.pipeline.model.recurrent_layers import RecurrentLayers, rows_of_gated_queries
from ingot.pipeline.model.rope import RopeParameters, query_scales, rope_tables

_Tables = tuple[ir.Value, ir.Value]


class DecoderBuilder:
    """Appends a decoder to a GraphBuilder, by `build`."""

    def __init__(self, builder: GraphBuilder, config: DecoderConfig, context_tokens: int) -> None:
        self.builder = builder
        self.config = config
        self.context_tokens = context_tokens
        self._tables: dict[tuple[RopeParameters, bool], _Tables] = {}
        self._recurrent = RecurrentLayers(builder, config)
        attending = (index for index, layer in enumerate(config.layers) if layer.attends)
        self._kv_layers = {
            index: number for number, index in enumerate(attending)
        }  # layer of the model -> of the cache
        self._keys_and_values: dict[int, tuple[ir.Value, ir.Value]] = {}  # of each layer that has its own

    def build(self) -> None:
        """Append inputs, embedding, layers, head and output."""
        b = self.builder
        input_ids = b.input("input_ids", ir.DataType.INT64, ["T"])
        position_ids = b.input("position_ids", ir.DataType.INT64, ["T"])
        logits_indices = b.input("logits_indices", ir.DataType.INT64, ["R"])
        hidden = self._embed(input_ids, position_ids)
        if any(layer.rope for layer in self.config.layers):
            self._positions = b.op("Unsqueeze", "position_ids.row", [position_ids, b.integers(0)], [1, "T"])
            self._positions.dtype = ir.DataType.INT64
        self._position_ids = position_ids
        b.output(self._head(self._layers(hidden, input_ids), logits_indices))

    def _layers(self, hidden: ir.Value, input_ids: ir.Value) -> ir.Value:
        for index, layer in enumerate(self.config.layers):
            hidden = self._layer(f"layers.{index}", index, layer, hidden)
        return hidden

    def _embed(self, input_ids: ir.Value, position_ids: ir.Value) -> ir.Value:
        b, config = self.builder, self.config
        shape: Dims = ["T", config.hidden_size]
        embedding = b.op("Gather", "embed_tokens", [self._weight(EMBEDDING), input_ids], shape, axis=0)
        embedding = self._scaled("embed_tokens.scaled", embedding, config.embedding_multiplier)
        if config.family.positions == "rope":
            return embedding
        offset = config.family.position_offset
        used: Dims = [config.max_positions, config.hidden_size]
        table = self._weight(POSITIONS, used, partial(_rows_from, offset)) if offset else self._weight(POSITIONS)
        positions = b.op("Gather", "embed_positions", [table, position_ids], shape, axis=0)
        return b.op("Add", "embed_tokens.positioned", [embedding, positions], shape)

    def _layer(self, path: str, index: int, layer: LayerConfig, hidden: ir.Value) -> ir.Value:
        """Append a layer; norms are on the input of both halves ("before"), their output ("after"), or both."""
        if self.config.parallel:
            return self._parallel_layer(path, index, layer, hidden)
        if layer.attends or layer.recurrent is not None:
            hidden = self._mixed(path, index, layer, hidden)
        return self._fed(path, layer, hidden) if layer.feeds else hidden

    def _mixed(self, path: str, index: int, layer: LayerConfig, hidden: ir.Value) -> ir.Value:
        """Append the half that mixes tokens: attention, a recurrent layer, or the sum of both."""
        place, multipliers = self.config.norm_place(layer), self.config.multipliers
        x = hidden if place == "after" else self._norm(f"{path}.input_layernorm", hidden)
        results = []
        if layer.recurrent is not None:
            results.append(self._recurrent.layer(f"{path}.linear_attn", index, layer.recurrent, x))
        if layer.attends:
            x = self._scaled(f"{path}.self_attn.in", x, multipliers.attention_in)
            x = self._attention(f"{path}.self_attn", index, layer, x)
            results.append(self._scaled(f"{path}.self_attn.out", x, multipliers.attention_out))
        x = results[0]
        if len(results) == 2:
            x = self.builder.op("Add", f"{path}.mixed", results, dims(hidden))
        if place != "before":
            x = self._norm(f"{path}.post_attention_layernorm", x)
        return self._residual(f"{path}.self_attn", hidden, x)

    def _fed(self, path: str, layer: LayerConfig, hidden: ir.Value) -> ir.Value:
        """Append the half that computes each token by itself: a feed-forward, or a mixture of experts."""
        place = self.config.norm_place(layer)
        x = hidden if place == "after" else self._norm(f"{path}.{self.config.feed_forward_norm(layer)}", hidden)
        x = self._mlp(path, layer, x, hidden)
        if place != "before":
            x = self._norm(f"{path}.post_feedforward_layernorm", x)
        return self._residual(f"{path}.mlp", hidden, x)

    def _parallel_layer(self, path: str, index: int, layer: LayerConfig, hidden: ir.Value) -> ir.Value:
        """Append a layer whose attention and feed-forward read the same hidden state, through one norm or two.

        The feed-forward's result is added first: where programs are cut at attention, one value passes the cut.
        """
        x = y = self._norm(f"{path}.input_layernorm", hidden)
        if self.config.family.parallel_norms == 2:
            y = self._norm(f"{path}.post_attention_layernorm", hidden)
        attended = self._attention(f"{path}.self_attn", index, layer, x)
        fed = self._mlp(path, layer, y, hidden)
        return self._residual(f"{path}.self_attn", self._residual(f"{path}.mlp", hidden, fed), attended)

    def _attention(self, path: str, index: int, layer: LayerConfig, x: ir.Value) -> ir.Value:
        config, shape = self.config, layer.shape
        if config.latent is not None:
            latent = LatentAttention(self.builder, config, self.context_tokens, self._rotate, self._rope_tables)
            return latent.append(path, index, layer, x, self._position_ids)
        if shape.shares is None:
            query, key, value = self._project_qkv(path, layer, x)
            query, key = self._with_positions(path, layer, {"q": query, "k": key})
            if config.family.value_norm:
                value = self._by_head(
                    f"{path}.v_norm", value, shape.head_dim, partial(self._plain_norm, f"{path}.v_norm")
                )
            self._keys_and_values[index] = key, value
        else:
            query = self._linear(f"{path}.q_proj", x, config.num_heads * shape.head_dim, config.qkv_bias)
            (query,) = self._with_positions(path, layer, {"q": query})
            key, value = self._keys_and_values[shape.shares]
        gate = self._query_gate(path, x) if config.family.attention_gate else None
        sharing = {} if shape.shares is None else {"shares": self._kv_layers[shape.shares]}
        sinks: list[ir.Value | None] = []
        if config.family.sinks:
            sinks = [None, None, self.builder.vector(config.tensor_name(f"model.{path}.sinks"))]
        attended = self.builder.op(
            "PagedAttention",
            f"{path}.attention",
            [query, key, value, *sinks],
            ["T", config.num_heads * shape.head_dim],
            domain="ingot",
            layer=self._kv_layers[index],
            num_heads=config.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            window=layer.window if layer.window < self.context_tokens else 0,  # a window as wide as the context is none
            **sharing,
        )
        if gate is not None:
            open_by = self.builder.op("Sigmoid", f"{path}.q_gate.sigmoid", [gate], dims(gate))
            attended = self.builder.op("Mul", f"{path}.gated", [attended, open_by], dims(gate))
        return self._linear(f"{path}.o_proj", attended, config.hidden_size, config.output_bias)

    def _query_gate(self, path: str, x: ir.Value) -> ir.Value:
        """The gates of attention's result, which q_proj has next to each head's query."""
        _, rows = rows_of_gated_queries(self.config.num_heads, self.config.head_dim)
        return self._rows_linear(f"{path}.q_gate", f"{path}.q_proj", rows, x)

    def _rows_linear(self, path: str, stored: str, rows: NDArray[np.intp], x: ir.Value) -> ir.Value:
        """The linear layer that some rows of a stored one make."""
        name = self.config.tensor_name(f"model.{stored}")
        inputs = [x, self.builder.weight_rows(f"{name}.weight", rows, f"model.{path}.weight")]
        if self.config.qkv_bias:
            inputs.append(self.builder.computed(f"model.{path}.bias", [f"{name}.bias"], lambda bias: bias[rows]))
        return self.builder.op("Gemm", path, inputs, ["T", len(rows)], transB=1)

    def _with_positions(self, path: str, layer: LayerConfig, given: Mapping[str, ir.Value]) -> list[ir.Value]:
        """Queries (q) and keys (k) after their norms and their rotations, in the family's order."""
        config, head_dim, values = self.config, layer.shape.head_dim, dict(given)
        for step in ("rope", "norm") if config.family.qk_norm_after_rope else ("norm", "rope"):
            for name, x in values.items():
                if step == "norm" and config.has_qk_norm:
                    values[name] = self._qk_norm(f"{path}.{name}_norm", x, head_dim)
                elif step == "rope" and layer.rope:
                    tables = self._rope_tables(layer.rope, of_query=name == "q")
                    values[name] = self._rotate(f"{path}.{name}_rope", x, head_dim, tables)
        return list(values.values())

    def _project_qkv(self, path: str, layer: LayerConfig, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        config, shape = self.config, layer.shape
        widths = [heads * shape.head_dim for heads in (config.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
        names = [f"{path}.{name}_proj" for name in "qkv"]
        if shape.values_are_keys:
            query, key = (
                self._linear(name, x, width, config.qkv_bias) for name, width in zip(names[:2], widths[:2], strict=True)
            )
            value = key
        elif config.family.fused_qkv:
            heads, dim = config.num_heads, config.head_dim
            by_head = partial(_projections_together, heads, dim) if config.family.heads_interleaved else None
            fused = self._linear(f"{path}.qkv_proj", x, sum(widths), config.qkv_bias, by_head)
            query, key, value = self._split(f"{path}.qkv_split", fused, dict(zip(names, widths, strict=True)))
        elif config.family.attention_gate:
            rows, _ = rows_of_gated_queries(config.num_heads, config.head_dim)
            query = self._rows_linear(names[0], names[0], rows, x)
            key, value = (self._linear(name, x, widths[1], config.qkv_bias) for name in names[1:])
        else:
            query, key, value = (
                self._linear(name, x, width, config.qkv_bias) for name, width in zip(names, widths, strict=True)
            )
        return query, key, value

    def _qk_norm(self, path: str, x: ir.Value, head_dim: int) -> ir.Value:
        """Normalize queries or keys [T, heads * head_dim] per head, or over all heads at once."""
        if self.config.family.qk_norm == "row":
            return self._norm(path, x)
        return self._by_head(path, x, head_dim, partial(self._norm, path))

    def _by_head(self, path: str, x: ir.Value, head_dim: int, change: Callable[[ir.Value], ir.Value]) -> ir.Value:
        """Change x [T, heads * head_dim] as [T, heads, head_dim]."""
        b, width = self.builder, _columns(x)
        heads = width // head_dim
        split = b.op("Reshape", f"{path}.heads", [x, b.integers(0, heads, head_dim)], ["T", heads, head_dim])
        return b.op("Reshape", f"{path}.flat", [change(split), b.integers(0, width)], ["T", width])

    def _rotate(self, path: str, x: ir.Value, head_dim: int, tables: _Tables) -> ir.Value:
        """Rotate x [T, heads * head_dim]; RotaryEmbedding needs a batch axis, so it reads and makes [1, T, ...]."""
        b, width = self.builder, _columns(x)
        cos, sin = tables
        batched = b.op("Unsqueeze", f"{path}.batched", [x, b.integers(0)], [1, "T", width])
        rotary_dim = 2 * _columns(cos)
        partly = 0 if rotary_dim == head_dim else rotary_dim  # 0: the whole head
        inputs = [batched, cos, sin, self._positions]
        shape = dims(batched)
        heads = width // head_dim
        rotated = b.op("RotaryEmbedding", path, inputs, shape, num_heads=heads, rotary_embedding_dim=partly)
        node = rotated.producer()
        latent = self.config.latent
        if node is not None and (latent.interleaved if latent else self.config.family.interleaved_rope):
            node.attributes["interleaved"] = ir.AttrInt64("interleaved", 1)
        return b.op("Squeeze", f"{path}.flat", [rotated, b.integers(0)], ["T", width])

    def _rope_tables(self, rope: RopeParameters, of_query: bool = False) -> _Tables:
        """Cos and sin [context_tokens, rotary_dim / 2]; those of queries differ where queries grow with position."""
        scales = query_scales(rope, self.context_tokens) if of_query else None
        key = rope, scales is not None
        if key not in self._tables:
            tables = rope_tables(rope, self.context_tokens)
            path = f"rope.{len(self._tables)}"
            cos, sin = tables if scales is None else [table * scales[:, None] for table in tables]
            self._tables[key] = self.builder.constant(f"{path}.cos", cos), self.builder.constant(f"{path}.sin", sin)
        return self._tables[key]

    def _mlp(self, path: str, layer: LayerConfig, x: ir.Value, hidden: ir.Value) -> ir.Value:
        """The layer's feed-forward of x, the normed hidden state."""
        if layer.experts is None:
            return self._feed_forward(f"{path}.mlp", x, layer.shape.intermediate_size)
        return self._experts(f"{path}.mlp", x, x, layer.experts)

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
        down = self._linear(f"{path}.down_proj", gated, config.hidden_size, config.mlp_bias)
        return self._scaled(f"{path}.down", down, config.multipliers.down)

    def _experts(self, path: str, x: ir.Value, routed_by: ir.Value, experts: ExpertsConfig) -> ir.Value:
        """A mixture of experts: each computes the rows of x of the tokens that are routed to it, N of T."""
        b, hidden, rules = self.builder, self.config.hidden_size, self.config.family.experts
        assert rules is not None
        ids, weights = self._route(path, routed_by, experts)
        shapes: dict[str, Dims] = {
            f"{path}.experts.{expert}.rows": [f"{path}.N{expert}", hidden] for expert in range(experts.count)
        }
        rows = b.multi_op("DispatchExperts", f"{path}.dispatch", [x, ids], shapes, "ingot")
        results = [self._expert(path, expert, of, experts) for expert, of in enumerate(rows)]
        routed = b.op("CombineExperts", f"{path}.combine", [ids, weights, *results], ["T", hidden], "ingot")
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
        """down(act(gate(x)) * up(x)) of one expert's rows."""
        own, hidden, inner = f"{path}.experts.{expert}", self.config.hidden_size, experts.inner_size
        gate, up = (
            self._expert_linear(path, expert, name, x, inner, start)
            for name, start in (("gate_proj", 0), ("up_proj", inner))
        )
        if experts.clamp is not None:
            gated = clamped_swiglu(self.builder, own, gate, up, *experts.clamp)
        else:
            gated = self.builder.op("Mul", f"{own}.gated", [self._activation(own, gate), up], [dims(x)[0], inner])
        return self._expert_linear(path, expert, "down_proj", gated, hidden, 0)

    def _expert_linear(self, path: str, expert: int, name: str, x: ir.Value, columns: int, start: int) -> ir.Value:
        """A linear layer of one expert; its weight may be rows of a tensor that holds those of all experts."""
        own = f"{path}.experts.{expert}.{name}"
        rules, is_down = self.config.family.experts, name == "down_proj"
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

    def _activation(self, path: str, x: ir.Value) -> ir.Value:
        return activation(
            self.builder, self.config.activation, path, x, lambda name: self._weight(f"model.{path}.{name}")
        )

    def _head(self, hidden: ir.Value, logits_indices: ir.Value) -> ir.Value:
        """Select the rows that need logits before the last norm, so that norm and head compute no others."""
        b, config = self.builder, self.config
        wanted = b.op("Gather", "wanted", [hidden, logits_indices], ["R", config.hidden_size], axis=0)
        normed = self._norm("norm", wanted)
        weight = self._weight(EMBEDDING if config.tied_embeddings else HEAD)
        bias = [self._weight(HEAD_BIAS)] if config.head_bias else []
        shape: Dims = ["R", config.vocab_size]
        cap = config.logit_softcap
        logits = b.op("Gemm", "lm_head", [normed, weight, *bias], shape, transB=1)
        logits = self._scaled("lm_head.multiplied", logits, config.logits_multiplier)
        if config.logits_divisor != 1.0:
            logits = b.op("Div", "lm_head.scaled", [logits, b.scalar(config.logits_divisor)], shape)
        if cap:
            logits = b.op("Div", "lm_head.softcap.div", [logits, b.scalar(cap)], shape)
            logits = b.op("Tanh", "lm_head.softcap.tanh", [logits], shape)
            logits = b.op("Mul", "lm_head.softcap.mul", [logits, b.scalar(cap)], shape)
        logits.name = "logits"
        return logits

    def _linear(self, path: str, x: ir.Value, columns: int, bias: bool, rows: Rewrite | None = None) -> ir.Value:
        """x @ W^T + b; `rows` puts the rows of the stored W and b in the order that they are computed in."""
        rewrite = np.transpose if self.config.family.transposed else rows
        weight = self._weight(f"model.{path}.weight", [columns, _columns(x)], rewrite)
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
        weight = self._weight(f"model.{path}.weight")
        return self._norm_by(path, x, weight)

    def _plain_norm(self, path: str, x: ir.Value) -> ir.Value:
        """A norm without a weight."""
        ones = self.builder.constant(f"ones.{_columns(x)}", np.ones(_columns(x), np.float32))
        return self.builder.op("RMSNormalization", path, [x, ones], dims(x), axis=-1, epsilon=self.config.norm_epsilon)

    def _norm_by(self, path: str, x: ir.Value, weight: ir.Value) -> ir.Value:
        if self.config.family.norm_adds_one:
            one = self.builder.scalar(1.0)
            weight = self.builder.op("Add", f"{path}.one_plus", [weight, one], dims(weight))
        kind, epsilon = self.config.family.norm, self.config.norm_epsilon
        inputs = [x, weight, *([self._weight(f"model.{path}.bias")] if kind == "layer-with-bias" else [])]
        op_type = "RMSNormalization" if kind == "rms" else "LayerNormalization"
        return self.builder.op(op_type, path, inputs, dims(x), axis=-1, epsilon=epsilon)

    def _residual(self, path: str, hidden: ir.Value, branch: ir.Value) -> ir.Value:
        scaled = self._scaled(f"{path}.scaled", branch, self.config.residual_multiplier)
        return self.builder.op("Add", f"{path}.residual", [hidden, scaled], ["T", self.config.hidden_size])

    def _scaled(self, path: str, x: ir.Value, factor: float) -> ir.Value:
        if factor == 1.0:
            return x
        return self.builder.op("Mul", path, [x, self.builder.scalar(factor)], dims(x))


def _columns(x: ir.Value) -> int:
    """Size of the last axis, which is never symbolic in a decoder."""
    size = dims(x)[-1]
    assert isinstance(size, int)
    return size


def _rows_from(start: int, table: NDArray[Any]) -> NDArray[Any]:
    return table[start:]


def _projections_together(heads: int, dim: int, rows: NDArray[Any]) -> NDArray[Any]:
    """Rows of each head's query, key and value -> those of all queries, all keys, all values."""
    by_head = rows.reshape(heads, 3, dim, *rows.shape[1:])
    return np.swapaxes(by_head, 0, 1).reshape(rows.shape)
