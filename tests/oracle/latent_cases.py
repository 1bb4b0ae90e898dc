"""A tiny checkpoint of every family with latent attention. Data only.

Ranks and dims of queries, keys and values all differ.
"""

from typing import Any

from tests.oracle.cases import Case

_LATENT: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
    "mscale": 0.9,
    "mscale_all_dim": 0.6,
    "original_max_position_embeddings": 16,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.5, 2.5, 4.0, 4.5],
    "original_max_position_embeddings": 32,
}

LATENT_CASES = (
    Case(
        "deepseek_v2",
        "deepseek_v2",
        {
            **_LATENT,
            **_EXPERTS,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": _YARN,
        },
        dtype="bfloat16",
    ),
    Case(
        "deepseek_v3",
        "deepseek_v3",
        {
            **_LATENT,
            **_EXPERTS,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "rope_parameters": _YARN,
        },
        dtype="bfloat16",
    ),
    Case(
        "glm4_moe_lite",
        "glm4_moe_lite",
        {**_LATENT, **_EXPERTS, "mlp_layer_types": ["sparse", "dense"], "rope_interleave": False},
    ),
    Case(
        "mistral4",
        "mistral4",
        {**_LATENT, **_EXPERTS, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.3}},
        dtype="bfloat16",
    ),
    Case(
        "minicpm3",
        "minicpm3",
        {**_LATENT, "scale_emb": 4, "scale_depth": 0.9, "dim_model_base": 16, "rope_parameters": _LONGROPE},
        context_tokens=32,
    ),
    # Without a padding token: transformers sets its row of the embeddings to 0 when it loads a model.
    Case("youtu", "youtu", {**_LATENT, "tie_word_embeddings": True, "pad_token_id": None}),
)
