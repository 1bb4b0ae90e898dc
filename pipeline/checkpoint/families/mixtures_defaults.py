"""Defaults of the families with mixtures of experts, as in rms_norm_defaults.py."""

from typing import Any

from ingot.pipeline.checkpoint.families.rms_norm_defaults import (
    EXAONE4,
    GRANITE,
    HUNYUAN,
    MISTRAL,
    OLMO2,
    QWEN2,
    SILU,
)

MIXTRAL = MISTRAL | {
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
GPT_OSS = SILU | {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "sliding_window": 128,
    "layer_types": None,
    "attention_bias": True,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
QWEN2_MOE = QWEN2 | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "qkv_bias": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
}
QWEN3_MOE = SILU | {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "bos_token_id": None,
    "eos_token_id": None,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
OLMOE = OLMO2 | {
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "clip_qkv": None,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
GRANITE_MOE = {key: value for key, value in GRANITE.items() if key != "mlp_bias"} | {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
GRANITE_MOE_SHARED = GRANITE_MOE | {"shared_intermediate_size": 0}
GRANITE_MOE_SWA = GRANITE_MOE_SHARED | {"sliding_window": 128, "layer_types": None, "layer_rope_theta": None}
FLEX_OLMO = OLMO2 | {
    "vocab_size": 100352,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 100257,
    "num_experts": 7,
    "num_experts_per_tok": 5,
    "norm_topk_prob": False,
}
MINIMAX_M2 = SILU | {
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "bos_token_id": 200034,
    "eos_token_id": 200020,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "rotary_dim": None,
}
HY_V3 = SILU | {
    "vocab_size": 120832,
    "hidden_size": 4096,
    "intermediate_size": 13312,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "attention_bias": False,
    "mlp_bias": False,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "router_scaling_factor": 2.826,
    "mlp_layer_types": None,
}
MELLUM = SILU | {
    "vocab_size": 98304,
    "hidden_size": 2304,
    "intermediate_size": 7168,
    "num_hidden_layers": 28,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "bos_token_id": None,
    "eos_token_id": None,
    "attention_bias": False,
    "sliding_window": 1024,
    "layer_types": None,
    "mlp_layer_types": None,
    "moe_intermediate_size": 896,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
MELLUM_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
_GROUPED: dict[str, Any] = {
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
EXAONE_MOE = (
    EXAONE4
    | _GROUPED
    | {
        "bos_token_id": 1,
        "eos_token_id": 53,
        "mlp_layer_types": None,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }
)
DOTS1 = (
    SILU
    | _GROUPED
    | {
        "vocab_size": 152064,
        "hidden_size": 4608,
        "intermediate_size": 10944,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": None,
        "attention_bias": False,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "layer_types": None,
        "moe_intermediate_size": 1408,
        "n_shared_experts": None,
        "n_routed_experts": None,
        "num_experts_per_tok": None,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
    }
)
SOLAR_OPEN = (
    SILU
    | _GROUPED
    | {
        "vocab_size": 196608,
        "hidden_size": 4096,
        "intermediate_size": None,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": None,
        "attention_bias": False,
        "moe_intermediate_size": 1280,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    }
)
GLM4_MOE = SILU | {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "attention_bias": False,
    "use_qk_norm": False,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 1,
}
ERNIE45_MOE = SILU | {
    "vocab_size": 103424,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "use_bias": False,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
}
HUNYUAN_MOE = HUNYUAN | {"num_experts": 1, "moe_topk": 1}
