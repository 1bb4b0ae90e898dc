"""Shapes of models with latent attention (MLA) and mixtures of experts, as GLM-4.7-Flash: glm4_moe_lite."""

from dataclasses import dataclass

Shapes = dict[str, tuple[int, ...]]
_EPSILON, _THETA = 1e-5, 1e6


@dataclass(frozen=True)
class LatentShape:
    """A model whose first layer has a dense feed-forward and all others experts; head and embedding are not tied.

    query_rank, latent_rank             of what queries, and of what keys and values are made from
    plain_dim, rope_dim, value_dim      of a head: not rotated, rotated, and of its values
    shared_experts                      as one feed-forward that every token has, of so many experts' size
    """

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    query_rank: int
    latent_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    intermediate_size: int
    expert_size: int
    num_experts: int
    chosen_experts: int
    shared_experts: int
    vocab_size: int

    def config(self, context_tokens: int) -> dict[str, object]:
        """The config.json."""
        return {
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "model_type": "glm4_moe_lite",
            "attention_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "kv_lora_rank": self.latent_rank,
            "max_position_embeddings": context_tokens,
            "mlp_layer_types": ["dense", *["sparse"] * (self.num_layers - 1)],
            "moe_intermediate_size": self.expert_size,
            "n_group": 1,
            "n_routed_experts": self.num_experts,
            "n_shared_experts": self.shared_experts,
            "norm_topk_prob": True,
            "num_attention_heads": self.num_heads,
            "num_experts_per_tok": self.chosen_experts,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_heads,
            "q_lora_rank": self.query_rank,
            "qk_nope_head_dim": self.plain_dim,
            "qk_rope_head_dim": self.rope_dim,
            "rms_norm_eps": _EPSILON,
            "rope_interleave": True,
            "rope_parameters": {"rope_theta": _THETA, "rope_type": "default"},
            "routed_scaling_factor": 1.8,
            "tie_word_embeddings": False,
            "topk_group": 1,
            "torch_dtype": "float16",
            "v_head_dim": self.value_dim,
            "vocab_size": self.vocab_size,
        }

    def tensors(self) -> Shapes:
        """Name and shape of every tensor, in file order."""
        hidden = self.hidden_size
        shapes: Shapes = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            feed_forward = self._experts() if layer else _gated("mlp", hidden, self.intermediate_size)
            norms = {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
            own = self._attention() | feed_forward | norms
            shapes |= {f"model.layers.{layer}.{name}": dims for name, dims in own.items()}
        return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (self.vocab_size, hidden)}

    def _attention(self) -> Shapes:
        hidden, heads, rank = self.hidden_size, self.num_heads, self.latent_rank
        shapes: Shapes = {
            "q_a_proj.weight": (self.query_rank, hidden),
            "q_a_layernorm.weight": (self.query_rank,),
            "q_b_proj.weight": (heads * (self.plain_dim + self.rope_dim), self.query_rank),
            "kv_a_proj_with_mqa.weight": (rank + self.rope_dim, hidden),
            "kv_a_layernorm.weight": (rank,),
            "kv_b_proj.weight": (heads * (self.plain_dim + self.value_dim), rank),
            "o_proj.weight": (hidden, heads * self.value_dim),
        }
        return {f"self_attn.{name}": dims for name, dims in shapes.items()}

    def _experts(self) -> Shapes:
        hidden, count = self.hidden_size, self.num_experts
        shapes: Shapes = {"mlp.gate.weight": (count, hidden), "mlp.gate.e_score_correction_bias": (count,)}
        for expert in range(count):
            shapes |= _gated(f"mlp.experts.{expert}", hidden, self.expert_size)
        return shapes | _gated("mlp.shared_experts", hidden, self.shared_experts * self.expert_size)


def _gated(prefix: str, hidden: int, ffn: int) -> Shapes:
    up: Shapes = {f"{prefix}.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
    return up | {f"{prefix}.down_proj.weight": (hidden, ffn)}
