"""Latent attention in config.json (DeepSeek-V2, arXiv 2405.04434): its ranks and dims, and the scale of its scores."""

from dataclasses import dataclass

from ingot.errors import ConfigError
from ingot.pipeline.checkpoint.json_files import ConfigReader
from ingot.pipeline.model.rope import RopeParameters, yarn_scale

# The norms of latents have this epsilon, not rms_norm_eps.
NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class LatentRules:
    """Rules of a family's latent attention.

    interleaved   rope rotates neighbours, not halves: always, never, or a key says so
    of_whole_head partial_rotary_factor is qk_rope_head_dim as a share of a query; else the factor must be 1
    """

    interleaved: bool | str
    of_whole_head: bool = False


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of latent attention: a token has one latent, of which a matrix for each head makes its key and its value.

    query_rank   dims of the latent of queries; 0: one linear layer makes them
    rank         dims of the latent of keys and values
    plain_dim    dims of a head's query and key that are not rotated
    rope_dim     those that are rotated; all heads share those of the key
    value_dim    dims of a head's value
    interleaved  rope rotates neighbours
    """

    query_rank: int
    rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool

    @property
    def query_dim(self) -> int:
        """Dims of a head's query."""
        return self.plain_dim + self.rope_dim

    @property
    def key_dim(self) -> int:
        """Dims of what the KV cache holds of a token: the rotated dims, then the latent."""
        return self.rope_dim + self.rank

    def attention_scale(self, rope: RopeParameters | None) -> float:
        """Factor of the scores; YaRN's mscale_all_dim is a part of it, squared, as queries and keys each have it."""
        scale = float(self.query_dim**-0.5)
        if rope is None or rope.kind == "default" or not rope.mscale_all_dim:
            return scale
        return scale * yarn_scale(rope.scaling, rope.mscale_all_dim) ** 2


def read_latent(reader: ConfigReader, rules: LatentRules | None) -> LatentConfig | None:
    """The sizes; None for a family without latent attention. ConfigError for wrong ones."""
    if rules is None:
        return None
    heads, key = reader.integer("num_attention_heads"), "num_key_value_heads"
    if reader.values.get(key, heads) not in (None, heads):
        raise reader.fail(key, f"num_attention_heads, {heads}: every head has its own keys and values")
    return LatentConfig(
        query_rank=reader.optional_integer("q_lora_rank") or 0,
        rank=reader.integer("kv_lora_rank"),
        plain_dim=reader.integer("qk_nope_head_dim"),
        rope_dim=reader.integer("qk_rope_head_dim", minimum=2),
        value_dim=reader.optional_integer("v_head_dim") or _share_of_hidden(reader, heads),
        interleaved=reader.boolean(rules.interleaved) if isinstance(rules.interleaved, str) else rules.interleaved,
    )


def _share_of_hidden(reader: ConfigReader, heads: int) -> int:
    hidden_size = reader.integer("hidden_size")
    if hidden_size % heads:
        raise ConfigError(
            f"{reader.place}: hidden_size is {hidden_size} and num_attention_heads is {heads}; without v_head_dim the "
            "first must be a multiple of the second"
        )
    return hidden_size // heads


def latent_tensors(sizes: LatentConfig, heads: int, hidden: int) -> dict[str, tuple[tuple[int, int], str]]:
    """Linear layers of an attention, by name: shape [out, in], and the keys of config.json that give it."""
    query = heads * sizes.query_dim
    of_query = "num_attention_heads, qk_nope_head_dim, qk_rope_head_dim"
    found = {"q_proj": ((query, hidden), f"{of_query}, hidden_size")}
    if sizes.query_rank:
        found = {
            "q_a_proj": ((sizes.query_rank, hidden), "q_lora_rank, hidden_size"),
            "q_b_proj": ((query, sizes.query_rank), f"{of_query}, q_lora_rank"),
        }
    rows = heads * (sizes.plain_dim + sizes.value_dim)
    return found | {
        "kv_a_proj_with_mqa": ((sizes.key_dim, hidden), "kv_lora_rank, qk_rope_head_dim, hidden_size"),
        "kv_b_proj": ((rows, sizes.rank), "num_attention_heads, qk_nope_head_dim, v_head_dim, kv_lora_rank"),
        "o_proj": ((hidden, heads * sizes.value_dim), "hidden_size, num_attention_heads, v_head_dim"),
    }
