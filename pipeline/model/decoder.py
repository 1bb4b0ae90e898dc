"""The one decoder graph of all families: their differences are fields of DecoderConfig and Family.

T tokens of all sequences are packed end to end, without padding; R of them need logits. Hidden states are
[T, hidden_size].
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.pipeline.checkpoint.config.decoder import DecoderConfig
from ingot.pipeline.checkpoint.config.layers import LayerConfig
from ingot.pipeline.checkpoint.tensors import EMBEDDING, HEAD, HEAD_BIAS, POSITIONS, PROJECTION_IN, PROJECTION_OUT
from ingot.pipeline.model.decoder_parts import width_of
from ingot.pipeline.model.expert_layers import ExpertLayers
from ingot.pipeline.model.graph_builder import Dims, GraphBuilder, Rewrite, dims
from ingot.pipeline.model.latent_attention import LatentAttention
from ingot.pipeline.model.recurrent_layers import RecurrentLayers, rows_of_gated_queries
from ingot.pipeline.model.rope import RopeParameters, query_scales, rope_tables

_Tables = tuple[ir.Value, ir.Value]


class DecoderBuilder(ExpertLayers):
    """Appends a decoder to a GraphBuilder, by `build`."""

    def __init__(self, builder: GraphBuilder, config: DecoderConfig, context_tokens: int) -> None:
        super().__init__(builder, config)
        self.context_tokens = context_tokens
        self._tables: dict[tuple[RopeParameters, bool], _Tables] = {}
        self._recurrent = RecurrentLayers(builder, config)
        attending = (index for index, layer in enumerate(config.layers) if layer.attends)
        self._kv_layers = {
            index: number for number, index in enumerate(attending)
        }  # layer of the model -> of the cache
        # Layers that share keys and values with an earlier one have no entry.
        self._keys_and_values: dict[int, tuple[ir.Value, ir.Value]] = {}

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
        width = config.embedding_size
        embedding = b.op("Gather", "embed_tokens", [self._weight(EMBEDDING), input_ids], ["T", width], axis=0)
        embedding = self._scaled("embed_tokens.scaled", embedding, config.embedding_multiplier)
        if width != config.hidden_size:
            embedding = self._linear(PROJECTION_IN.removeprefix("model."), embedding, config.hidden_size, False)
        if config.family.positions == "rope":
            return self._norm("embed_norm", embedding) if config.family.embedding_norm else embedding
        positions = b.op("Gather", "embed_positions", [self._position_table(), position_ids], shape, axis=0)
        return b.op("Add", "embed_tokens.positioned", [embedding, positions], shape)

    def _position_table(self) -> ir.Value:
        """Return what is added to the embeddings at each position, [max_positions, hidden_size]."""
        config, offset = self.config, self.config.family.position_offset
        if config.family.positions == "sinusoidal":
            table = sinusoidal_table(config.max_positions, offset, config.hidden_size)
            return self.builder.constant("embed_positions.table", table)
        used: Dims = [config.max_positions, config.hidden_size]
        return self._weight(POSITIONS, used, partial(_rows_from, offset)) if offset else self._weight(POSITIONS)

    def _layer(self, path: str, index: int, layer: LayerConfig, hidden: ir.Value) -> ir.Value:
        """Append a layer; norms are on the input of both halves ("before"), on their output ("after"), on both
        ("around"), or on the sum of either's output and the residual stream ("stream")."""
        if self.config.parallel:
            return self._parallel_layer(path, index, layer, hidden)
        if layer.attends or layer.recurrent is not None:
            hidden = self._mixed(path, index, layer, hidden)
        return self._fed(path, layer, hidden) if layer.feeds else hidden

    def _mixed(self, path: str, index: int, layer: LayerConfig, hidden: ir.Value) -> ir.Value:
        """Append the half that mixes tokens: attention, a recurrent layer, or the sum of both."""
        place, multipliers = self.config.norm_place(layer), self.config.multipliers
        x = hidden if place in ("after", "stream") else self._norm(f"{path}.input_layernorm", hidden)
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
        if place in ("after", "around"):
            x = self._norm(f"{path}.post_attention_layernorm", x)
        hidden = self._residual(f"{path}.self_attn", hidden, x)
        return self._norm(f"{path}.input_layernorm", hidden) if place == "stream" else hidden

    def _fed(self, path: str, layer: LayerConfig, hidden: ir.Value) -> ir.Value:
        """Append the half that computes each token by itself: a feed-forward, or a mixture of experts."""
        place = self.config.norm_place(layer)
        norm = f"{path}.{self.config.feed_forward_norm(layer)}"
        x = hidden if place in ("after", "stream") else self._norm(norm, hidden)
        x = self._mlp(path, layer, x, hidden)
        if place in ("after", "around"):
            x = self._norm(f"{path}.post_feedforward_layernorm", x)
        hidden = self._residual(f"{path}.mlp", hidden, x)
        return self._norm(norm, hidden) if place == "stream" else hidden

    def _parallel_layer(self, path: str, index: int, layer: LayerConfig, hidden: ir.Value) -> ir.Value:
        """Append a layer whose attention and feed-forward read the same hidden state, through one norm or two.

        The feed-forward's result is added first: where programs are cut at attention, one value passes the cut.
        """
        x = y = self._norm(f"{path}.input_layernorm", hidden)
        if self.config.parallel_norms == 2:
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
            value = self._clipped(f"{path}.v_proj", value)
            if config.family.value_norm:
                value = self._by_head(
                    f"{path}.v_norm", value, shape.head_dim, partial(self._plain_norm, f"{path}.v_norm")
                )
            self._keys_and_values[index] = key, value
        else:
            query = self._linear(f"{path}.q_proj", x, config.num_heads * shape.head_dim, config.qkv_bias)
            (query,) = self._with_positions(path, layer, {"q": query})
            key, value = self._keys_and_values[shape.shares]
        gate = self._gate(path, shape.head_dim, x)
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
        if config.family.inner_norms:
            attended = self._norm(f"{path}.attn_sub_norm", attended)
        return self._linear(f"{path}.o_proj", attended, config.hidden_size, config.output_bias)

    def _gate(self, path: str, head_dim: int, x: ir.Value) -> ir.Value | None:
        """The gates of attention's result: of a layer of their own, or next to each head's query in q_proj."""
        if self.config.family.gate_layer:
            return self._linear(f"{path}.attention_gate", x, self.config.num_heads * head_dim, False)
        if not self.config.family.attention_gate:
            return None
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
                if step == "norm":
                    normed = self._qk_norm(f"{path}.{name}_norm", x, head_dim) if config.has_qk_norm else x
                    values[name] = self._clipped(f"{path}.{name}_proj", normed)
                elif step == "rope" and layer.rope:
                    tables = self._rope_tables(layer.rope, of_query=name == "q")
                    values[name] = self._rotate(f"{path}.{name}_rope", x, head_dim, tables)
        return list(values.values())

    def _clipped(self, path: str, x: ir.Value) -> ir.Value:
        limit, b = self.config.clip_qkv, self.builder
        if not limit:
            return x
        return b.op("Clip", f"{path}.clipped", [x, b.scalar(-limit), b.scalar(limit)], dims(x))

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
            fused = self._linear(f"{path}.qkv_proj", x, sum(widths), config.qkv_bias, self._order_of_qkv())
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

    def _order_of_qkv(self) -> Rewrite | None:
        """Return a function that orders the rows of a stored qkv_proj: queries, keys, values; None if they are so."""
        config = self.config
        if config.family.qkv_blocks:
            return partial(_joined_blocks, config.family.qkv_blocks)
        if config.family.heads_interleaved and config.num_kv_heads > 1:
            return partial(_projections_together, config.num_kv_heads, config.head_dim)
        return None

    def _qk_norm(self, path: str, x: ir.Value, head_dim: int) -> ir.Value:
        """Normalize queries or keys [T, heads * head_dim] per head, or over all heads at once."""
        if self.config.family.qk_norm == "row":
            return self._norm(path, x)
        return self._by_head(path, x, head_dim, partial(self._norm, path))

    def _by_head(self, path: str, x: ir.Value, head_dim: int, change: Callable[[ir.Value], ir.Value]) -> ir.Value:
        """Change x [T, heads * head_dim] as [T, heads, head_dim]."""
        b, width = self.builder, width_of(x)
        heads = width // head_dim
        split = b.op("Reshape", f"{path}.heads", [x, b.integers(0, heads, head_dim)], ["T", heads, head_dim])
        return b.op("Reshape", f"{path}.flat", [change(split), b.integers(0, width)], ["T", width])

    def _rotate(self, path: str, x: ir.Value, head_dim: int, tables: _Tables) -> ir.Value:
        """Rotate x [T, heads * head_dim]; RotaryEmbedding needs a batch axis, so it reads and makes [1, T, ...]."""
        b, width = self.builder, width_of(x)
        cos, sin = tables
        batched = b.op("Unsqueeze", f"{path}.batched", [x, b.integers(0)], [1, "T", width])
        rotary_dim = 2 * width_of(cos)
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
            sin = -sin if self.config.family.backward_rope else sin
            self._tables[key] = self.builder.constant(f"{path}.cos", cos), self.builder.constant(f"{path}.sin", sin)
        return self._tables[key]

    def _mlp(self, path: str, layer: LayerConfig, x: ir.Value, hidden: ir.Value) -> ir.Value:
        """The layer's feed-forward of x, the normed hidden state."""
        if layer.experts is None:
            return self._feed_forward(f"{path}.mlp", x, layer.shape.intermediate_size)
        return self._experts(f"{path}.mlp", x, x, layer.experts)

    def _last_norm(self) -> str:
        return "norm"

    def _head(self, hidden: ir.Value, logits_indices: ir.Value) -> ir.Value:
        """Select the rows that need logits before the last norm, so that norm and head compute no others."""
        b, config = self.builder, self.config
        wanted = b.op("Gather", "wanted", [hidden, logits_indices], ["R", config.hidden_size], axis=0)
        normed = self._norm(self._last_norm(), wanted) if config.has_last_norm else wanted
        if config.embedding_size != config.hidden_size:
            path, inputs = PROJECTION_OUT.removeprefix("model."), [normed, self._weight(f"{PROJECTION_OUT}.weight")]
            normed = b.op("Gemm", path, inputs, ["R", config.embedding_size], transB=1)
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


def _rows_from(start: int, table: NDArray[Any]) -> NDArray[Any]:
    return table[start:]


def _projections_together(kv_heads: int, dim: int, rows: NDArray[Any]) -> NDArray[Any]:
    """Rows of the queries, the key and the value of each KV head -> those of all queries, all keys, all values."""
    by_head = rows.reshape(kv_heads, -1, dim, *rows.shape[1:])
    parts = by_head[:, :-2], by_head[:, -2], by_head[:, -1]
    return np.concatenate([part.reshape(-1, *rows.shape[1:]) for part in parts])


def _joined_blocks(blocks: int, rows: NDArray[Any]) -> NDArray[Any]:
    """Rows of each block's queries, values and keys -> those of all queries, all keys, all values."""
    query, value, key = np.split(rows.reshape(blocks, -1, *rows.shape[1:]), 3, axis=1)
    return np.concatenate([part.reshape(-1, *rows.shape[1:]) for part in (query, key, value)])


def sinusoidal_table(rows: int, offset: int, width: int) -> NDArray[np.float32]:
    """Sines, then cosines, of the positions from offset on, [rows, width] (tensor2tensor; 0 in an odd last column)."""
    half = width // 2
    step = np.float32(-math.log(10000) / (half - 1))
    frequencies = np.exp((np.arange(half, dtype=np.float32) * step).astype(np.float64)).astype(np.float32)
    angles = np.outer(np.arange(offset, offset + rows, dtype=np.float32), frequencies)
    return np.concatenate([np.sin(angles), np.cos(angles), np.zeros((rows, width % 2), np.float32)], axis=1)
