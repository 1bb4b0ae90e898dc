"""Defaults of the families with recurrent layers (see rms_norm_defaults.py)."""

from typing import Any

from ingot.pipeline.checkpoint.families.rms_norm_defaults import ANY, GRANITE, SILU

_DELTA_RULE: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
}
_QWEN = (
    SILU
    | _DELTA_RULE
    | {
        "vocab_size": 248320,
        "num_attention_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
)
QWEN3_NEXT = _QWEN | {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
}
QWEN35 = _QWEN | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
QWEN35_MOE = _QWEN | {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}
_LFM2 = {key: value for key, value in ANY.items() if key not in ("head_dim", "rms_norm_eps")} | {
    "hidden_act": "silu",
    "norm_eps": 1e-5,
    "vocab_size": 65536,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "layer_types": None,
}
LFM2 = _LFM2 | {
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": None,
}
LFM2_MOE = _LFM2 | {
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": (0.0, float("inf")),
}
GRANITE_HYBRID = (
    {key: value for key, value in GRANITE.items() if key != "mlp_bias"}
    | _MAMBA
    | {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "position_embedding_type": None,
        "layer_types": None,
    }
)
BAMBA = (
    SILU
    | _MAMBA
    | {
        "vocab_size": 128000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "attn_layer_indices": None,
        "attention_bias": False,
        "mlp_bias": False,
    }
)
FALCON_H1 = {key: value for key, value in BAMBA.items() if key != "attn_layer_indices"} | {
    "max_position_embeddings": 8192,
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "projectors_bias": False,
    "embedding_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "mlp_multipliers": None,
    "key_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_multipliers": None,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
}
NEMOTRON_H = {key: value for key, value in ANY.items() if key != "rms_norm_eps"} | {
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "mlp_bias": False,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "time_step_min": 0.001,
    "layers_block_type": None,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
OLMO_HYBRID = SILU | {
    "vocab_size": 100352,
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30,
    "max_position_embeddings": 65536,
    "bos_token_id": None,
    "eos_token_id": 100257,
    "attention_bias": False,
    "layer_types": None,
    "linear_num_key_heads": None,
    "linear_num_value_heads": None,
    "linear_key_head_dim": None,
    "linear_value_head_dim": None,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}
