"""Latent attention (MLA; DeepSeek-V2, arXiv 2405.04434) in its absorbed form, as nodes of the IR.

    latent = norm(kv_a(x))             [T, rank]: what is kept of a token, with the part of its key that is rotated
    key of head h = [W_UK_h latent | rope(k)],  value of head h = W_UV_h latent

A query q times a key W_UK_h latent is (W_UK_h^T q) times the latent, and a sum of values W_UV_h latent is W_UV_h times
the sum of the latents. So the heads attend to one key, [rope(k) | latent], whose last dims are the value:

    query  = Concat(rope of head 0, Gemm(plain part of head 0, W_UK_0^T), rope of head 1, ...)  [T, H * (rope + rank)]
    a      = ingot::PagedAttention(RotaryEmbedding(query), RotaryEmbedding(Concat(k, latent)); value_dim=rank)
    output = o_proj(Concat(Gemm(a of head 0, W_UV_0), Gemm(a of head 1, W_UV_1), ...))

The rotated dims come first, because a partial rotary embedding rotates the first ones. The two matrices of a head are
linear layers of their own, as those of an expert are: passes calibrate and round them, and engines run them, as any
other. Prompts are computed in this form too, and not by expanded keys and values, which are cheaper where many queries
share a key but round otherwise: a token's result would depend on how its prompt is cut into chunks.
"""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ingot.errors import ConfigError
from ingot.pipeline.checkpoint.config.decoder import DecoderConfig
from ingot.pipeline.checkpoint.config.latent import NORM_EPSILON
from ingot.pipeline.checkpoint.config.layers import LayerConfig
from ingot.pipeline.model.graph_builder import Dims, GraphBuilder, dims
from ingot.pipeline.model.rope import RopeParameters, query_scales

Tables = tuple[ir.Value, ir.Value]


class LatentAttention:
    """Appends the latent attention of a layer, by `append`.

    rotate    rotates the first dims of each head: path, value, dims of a head, tables
    tables    cos and sin of a rope
    """

    def __init__(
        self,
        builder: GraphBuilder,
        config: DecoderConfig,
        context_tokens: int,
        rotate: Callable[[str, ir.Value, int, Tables], ir.Value],
        tables: Callable[[RopeParameters], Tables],
    ) -> None:
        assert config.latent is not None
        self.builder, self.config, self.sizes = builder, config, config.latent
        self.context_tokens, self.rotate, self.tables = context_tokens, rotate, tables

    def append(self, path: str, index: int, layer: LayerConfig, x: ir.Value, position_ids: ir.Value) -> ir.Value:
        """Append the attention of layer `index` to x [T, hidden]; the result is as wide."""
        b, heads, sizes = self.builder, self.config.num_heads, self.sizes
        assert layer.rope is not None
        query = self._grown(path, self._query(path, x), layer.rope, position_ids)
        key = self._key(path, x)
        weights = _HeadWeights(b, self.config, path)
        plain_and_rope = self._split(f"{path}.heads", query, [sizes.plain_dim, sizes.rope_dim] * heads)
        parts: list[ir.Value] = []
        for head in range(heads):
            plain, rope = plain_and_rope[2 * head : 2 * head + 2]
            parts += [rope, self._gemm(f"{path}.key_up.{head}", plain, weights.key_up(head), sizes.rank)]
        tables = self.tables(layer.rope)
        query = self.rotate(f"{path}.q_rope", self._concat(f"{path}.query", parts), sizes.key_dim, tables)
        key = self.rotate(f"{path}.k_rope", key, sizes.key_dim, tables)
        shape: Dims = ["T", heads * sizes.rank]
        attended = b.op(
            "PagedAttention",
            f"{path}.attention",
            [query, key, None],
            shape,
            domain="ingot",
            layer=index,
            num_heads=heads,
            num_kv_heads=1,
            head_dim=sizes.key_dim,
            value_dim=sizes.rank,
            scale=self.config.attention_scale,
            softcap=0.0,
            window=0,
        )
        latents = self._split(f"{path}.latents", attended, [sizes.rank] * heads)
        values = [
            self._gemm(f"{path}.value_up.{head}", latent, weights.value_up(head), sizes.value_dim)
            for head, latent in enumerate(latents)
        ]
        return self._linear(
            f"{path}.o_proj", self._concat(f"{path}.values", values), self.config.hidden_size, self.config.output_bias
        )

    def _query(self, path: str, x: ir.Value) -> ir.Value:
        """All heads' queries [T, H * (plain + rope)], by way of a latent where there is one."""
        width = self.config.num_heads * self.sizes.query_dim
        if not self.sizes.query_rank:
            return self._linear(f"{path}.q_proj", x, width, False)
        latent = self._linear(f"{path}.q_a_proj", x, self.sizes.query_rank, self.config.qkv_bias)
        return self._linear(f"{path}.q_b_proj", self._norm(f"{path}.q_a_layernorm", latent), width, False)

    def _grown(self, path: str, query: ir.Value, rope: RopeParameters, position_ids: ir.Value) -> ir.Value:
        """Queries times their position's factor, where they have one."""
        scales = query_scales(rope, self.context_tokens)
        if scales is None:
            return query
        table = self.builder.constant("query_scales", scales[:, None])  # [context, 1]
        factors = self.builder.op("Gather", f"{path}.query_scales", [table, position_ids], ["T", 1], axis=0)
        return self.builder.op("Mul", f"{path}.grown", [query, factors], dims(query))

    def _key(self, path: str, x: ir.Value) -> ir.Value:
        """The part of the key that will be rotated, then the latent: [T, rope + rank]."""
        sizes = self.sizes
        both = self._linear(f"{path}.kv_a_proj_with_mqa", x, sizes.key_dim, self.config.qkv_bias)
        latent, rope = self._split(f"{path}.kv_split", both, [sizes.rank, sizes.rope_dim])
        return self._concat(f"{path}.key", [rope, self._norm(f"{path}.kv_a_layernorm", latent)])

    def _linear(self, path: str, x: ir.Value, columns: int, bias: bool) -> ir.Value:
        name = self.config.tensor_name(f"model.{path}")
        inputs = [self.builder.weight(f"{name}.weight"), *([self.builder.weight(f"{name}.bias")] if bias else [])]
        return self.builder.op("Gemm", path, [x, *inputs], ["T", columns], transB=1)

    def _gemm(self, path: str, x: ir.Value, weight: ir.Value, columns: int) -> ir.Value:
        return self.builder.op("Gemm", path, [x, weight], ["T", columns], transB=1)

    def _norm(self, path: str, x: ir.Value) -> ir.Value:
        weight = self.builder.weight(self.config.tensor_name(f"model.{path}.weight"))
        return self.builder.op("RMSNormalization", path, [x, weight], dims(x), axis=-1, epsilon=NORM_EPSILON)

    def _split(self, path: str, x: ir.Value, widths: list[int]) -> list[ir.Value]:
        outputs: dict[str, Dims] = {f"{path}.{number}": ["T", width] for number, width in enumerate(widths)}
        sizes = self.builder.constant(f"sizes.{widths[0]}.{widths[-1]}.{len(widths)}", np.array(widths, np.int64))
        return list(self.builder.multi_op("Split", path, [x, sizes], outputs, axis=-1))

    def _concat(self, path: str, parts: list[ir.Value]) -> ir.Value:
        width = sum(part.shape[-1] for part in parts if part.shape is not None and isinstance(part.shape[-1], int))
        return self.builder.op("Concat", path, parts, ["T", width], axis=-1)


class _HeadWeights:
    """The matrices of each head in kv_b_proj [H * (plain + value), rank].

    ConfigError for a quantized one, whose blocks are not cut by head.
    """

    def __init__(self, builder: GraphBuilder, config: DecoderConfig, path: str) -> None:
        assert config.latent is not None
        self.builder, self.path, self.sizes = builder, path, config.latent
        self.name = config.tensor_name(f"model.{path}.kv_b_proj.weight")
        if self.name in builder.checkpoint.encoded:
            raise ConfigError(
                f"{builder.checkpoint.config_file}: {self.name} is quantized, and attention reads its rows and columns "
                "head by head in 16 or 32 bits: import the model that it was made from"
            )

    def key_up(self, head: int) -> ir.Value:
        """W_UK^T of a head, [rank, plain]: from a query to what multiplies latents."""
        part = f"model.{self.path}.key_up.{head}.weight"
        return self.builder.row_slice(self.name, head * self._rows, self.sizes.plain_dim, part, transposed=True)

    def value_up(self, head: int) -> ir.Value:
        """W_UV of a head, [value, rank]: from a latent to a value."""
        part = f"model.{self.path}.value_up.{head}.weight"
        return self.builder.row_slice(self.name, head * self._rows + self.sizes.plain_dim, self.sizes.value_dim, part)

    @property
    def _rows(self) -> int:
        return self.sizes.plain_dim + self.sizes.value_dim
