"""The one decoder graph of all families: their differences are fields of DecoderConfig and Family.

T tokens of all sequences are packed end to end, without padding; R of them need logits. Hidden states are
[T, hidden_size].
"""

import onnx_ir as ir

from ingot.pipeline.checkpoint.config import DecoderConfig, LayerConfig
from ingot.pipeline.checkpoint.tensors import EMBEDDING, HEAD
from ingot.pipeline.model.graph_builder import Dims, GraphBuilder, dims
from ingot.pipeline.model.rope import RopeParameters, rope_tables


class DecoderBuilder:
    """Appends a decoder to a GraphBuilder, by `build`."""

    def __init__(self, builder: GraphBuilder, config: DecoderConfig, context_tokens: int) -> None:
        self.builder = builder
        self.config = config
        self.context_tokens = context_tokens
        self._tables: dict[RopeParameters, tuple[ir.Value, ir.Value]] = {}

    def build(self) -> None:
        """Append inputs, embedding, layers, head and output."""
        b = self.builder
        input_ids = b.input("input_ids", ir.DataType.INT64, ["T"])
        position_ids = b.input("position_ids", ir.DataType.INT64, ["T"])
        logits_indices = b.input("logits_indices", ir.DataType.INT64, ["R"])
        self._positions = b.op("Unsqueeze", "position_ids.row", [position_ids, b.integers(0)], [1, "T"])
        self._positions.dtype = ir.DataType.INT64
        hidden = self._embed(input_ids)
        for index, layer in enumerate(self.config.layers):
            hidden = self._layer(f"layers.{index}", index, layer, hidden)
        b.output(self._head(hidden, logits_indices))

    def _embed(self, input_ids: ir.Value) -> ir.Value:
        shape: Dims = ["T", self.config.hidden_size]
        embedding = self.builder.op(
            "Gather", "embed_tokens", [self.builder.weight(EMBEDDING), input_ids], shape, axis=0
        )
        return self._scaled("embed_tokens.scaled", embedding, self.config.embedding_multiplier)

    def _layer(self, path: str, index: int, layer: LayerConfig, hidden: ir.Value) -> ir.Value:
        """Append a layer; norms are on the input of both halves ("before"), their output ("after"), or both."""
        place = self.config.family.norm_place
        entry = {"before": "post_attention_layernorm", "around": "pre_feedforward_layernorm"}
        x = hidden if place == "after" else self._norm(f"{path}.input_layernorm", hidden)
        x = self._attention(f"{path}.self_attn", index, layer, x)
        if place != "before":
            x = self._norm(f"{path}.post_attention_layernorm", x)
        hidden = self._residual(f"{path}.self_attn", hidden, x)
        x = hidden if place == "after" else self._norm(f"{path}.{entry[place]}", hidden)
        x = self._feed_forward(f"{path}.mlp", x)
        if place != "before":
            x = self._norm(f"{path}.post_feedforward_layernorm", x)
        return self._residual(f"{path}.mlp", hidden, x)

    def _attention(self, path: str, index: int, layer: LayerConfig, x: ir.Value) -> ir.Value:
        config, width = self.config, self.config.num_heads * self.config.head_dim
        query, key, value = self._project_qkv(path, x)
        query, key = self._qk_norm(f"{path}.q_norm", query), self._qk_norm(f"{path}.k_norm", key)
        if layer.rope:
            query = self._rotate(f"{path}.q_rope", query, config.num_heads, layer.rope)
            key = self._rotate(f"{path}.k_rope", key, config.num_kv_heads, layer.rope)
        attended = self.builder.op(
            "PagedAttention",
            f"{path}.attention",
            [query, key, value],
            ["T", width],
            domain="ingot",
            layer=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            window=layer.window if layer.window < self.context_tokens else 0,  # a window as wide as the context is none
        )
        return self._linear(f"{path}.o_proj", attended, config.hidden_size, config.output_bias)

    def _project_qkv(self, path: str, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        config = self.config
        widths = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        names = [f"{path}.{name}_proj" for name in "qkv"]
        if config.family.fused_projections:
            fused = self._linear(f"{path}.qkv_proj", x, sum(widths), config.qkv_bias)
            query, key, value = self._split(f"{path}.qkv_split", fused, dict(zip(names, widths, strict=True)))
        else:
            query, key, value = (
                self._linear(name, x, width, config.qkv_bias) for name, width in zip(names, widths, strict=True)
            )
        return query, key, value

    def _qk_norm(self, path: str, x: ir.Value) -> ir.Value:
        """Normalize queries or keys [T, heads * head_dim] per head, over all heads at once, or not at all."""
        if self.config.family.qk_norm == "none":
            return x
        if self.config.family.qk_norm == "row":
            return self._norm(path, x)
        b, width, head_dim = self.builder, _columns(x), self.config.head_dim
        heads = width // head_dim
        split = b.op("Reshape", f"{path}.heads", [x, b.integers(0, heads, head_dim)], ["T", heads, head_dim])
        return b.op("Reshape", f"{path}.flat", [self._norm(path, split), b.integers(0, width)], ["T", width])

    def _rotate(self, path: str, x: ir.Value, heads: int, rope: RopeParameters) -> ir.Value:
        """Rotate x [T, heads * head_dim]; RotaryEmbedding needs a batch axis, so it reads and makes [1, T, ...]."""
        b, width = self.builder, _columns(x)
        cos, sin = self._rope_tables(rope)
        batched = b.op("Unsqueeze", f"{path}.batched", [x, b.integers(0)], [1, "T", width])
        partial = 0 if rope.rotary_dim == self.config.head_dim else rope.rotary_dim  # 0: the whole head
        inputs = [batched, cos, sin, self._positions]
        shape = dims(batched)
        rotated = b.op("RotaryEmbedding", path, inputs, shape, num_heads=heads, rotary_embedding_dim=partial)
        return b.op("Squeeze", f"{path}.flat", [rotated, b.integers(0)], ["T", width])

    def _rope_tables(self, rope: RopeParameters) -> tuple[ir.Value, ir.Value]:
        if rope not in self._tables:
            cos, sin = rope_tables(rope, self.context_tokens)
            path = f"rope.{len(self._tables)}"
            self._tables[rope] = self.builder.constant(f"{path}.cos", cos), self.builder.constant(f"{path}.sin", sin)
        return self._tables[rope]

    def _feed_forward(self, path: str, x: ir.Value) -> ir.Value:
        config, inner = self.config, self.config.intermediate_size
        names = [f"{path}.gate_proj", f"{path}.up_proj"]
        if config.family.fused_projections:
            fused = self._linear(f"{path}.gate_up_proj", x, 2 * inner, config.mlp_bias)
            gate, up = self._split(f"{path}.gate_up_split", fused, dict.fromkeys(names, inner))
        else:
            gate, up = (self._linear(name, x, inner, config.mlp_bias) for name in names)
        gated = self.builder.op("Mul", f"{path}.gated", [self._activation(path, gate), up], ["T", inner])
        return self._linear(f"{path}.down_proj", gated, config.hidden_size, config.mlp_bias)

    def _activation(self, path: str, x: ir.Value) -> ir.Value:
        b = self.builder
        shape = dims(x)
        if self.config.activation == "silu":
            sigmoid = b.op("Sigmoid", f"{path}.sigmoid", [x], shape)
            return b.op("Mul", f"{path}.activation", [x, sigmoid], shape)
        approximate = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}[self.config.activation]
        return b.op("Gelu", f"{path}.activation", [x], shape, approximate=approximate)

    def _head(self, hidden: ir.Value, logits_indices: ir.Value) -> ir.Value:
        """Select the rows that need logits before the last norm, so that norm and head compute no others."""
        b, config = self.builder, self.config
        wanted = b.op("Gather", "wanted", [hidden, logits_indices], ["R", config.hidden_size], axis=0)
        normed = self._norm("norm", wanted)
        weight = b.weight(EMBEDDING if config.tied_embeddings else HEAD)
        shape: Dims = ["R", config.vocab_size]
        cap = config.logit_softcap
        logits = b.op("Gemm", "lm_head", [normed, weight], shape, transB=1)
        if config.logits_divisor != 1.0:
            logits = b.op("Div", "lm_head.scaled", [logits, b.scalar(config.logits_divisor)], shape)
        if cap:
            logits = b.op("Div", "lm_head.softcap.div", [logits, b.scalar(cap)], shape)
            logits = b.op("Tanh", "lm_head.softcap.tanh", [logits], shape)
            logits = b.op("Mul", "lm_head.softcap.mul", [logits, b.scalar(cap)], shape)
        logits.name = "logits"
        return logits

    def _linear(self, path: str, x: ir.Value, columns: int, bias: bool) -> ir.Value:
        b = self.builder
        inputs = [x, b.weight(f"model.{path}.weight"), *([b.weight(f"model.{path}.bias")] if bias else [])]
        return b.op("Gemm", path, inputs, ["T", columns], transB=1)

    def _split(self, path: str, x: ir.Value, widths: dict[str, int]) -> tuple[ir.Value, ...]:
        outputs: dict[str, Dims] = {name: ["T", width] for name, width in widths.items()}
        return tuple(
            self.builder.multi_op("Split", path, [x, self.builder.integers(*widths.values())], outputs, axis=-1)
        )

    def _norm(self, path: str, x: ir.Value) -> ir.Value:
        weight = self.builder.weight(f"model.{path}.weight")
        if self.config.family.norm_adds_one:
            one = self.builder.scalar(1.0)
            weight = self.builder.op("Add", f"{path}.one_plus", [weight, one], dims(weight))
        epsilon = self.config.norm_epsilon
        return self.builder.op("RMSNormalization", path, [x, weight], dims(x), axis=-1, epsilon=epsilon)

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
