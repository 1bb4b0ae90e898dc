"""A tiny checkpoint of every family with recurrent layers. Data only.

Each has layers of both kinds, fewer key heads than value heads, fewer groups than heads, and sizes that differ.
"""

from tests.oracle.cases import Case

_SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_DELTA = {
    **_SIZES,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-3,
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_MAMBA = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}

_NEMOTRON_SIZES = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 12,
    "n_groups": 2,
    "chunk_size": 8,
}
_NEMOTRON_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}

HYBRID_CASES = (
    Case(
        "qwen3_next",
        "qwen3_next",
        {
            **_DELTA,
            **_EXPERTS,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    Case("qwen3_5_text", "qwen3_5_text", {**_DELTA, "attention_bias": True}, dtype="bfloat16"),
    Case(
        "qwen3_5_moe_text",
        "qwen3_5_moe_text",
        {
            **_DELTA,
            **_EXPERTS,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    Case(
        "lfm2",
        "lfm2",
        {"conv_bias": True, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16},
        dtype="bfloat16",
    ),
    Case(
        "lfm2_moe",
        "lfm2_moe",
        {
            "layer_types": ["conv", "conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.3,
        },
    ),
    Case(
        "granitemoehybrid",
        "granitemoehybrid",
        {
            **_MAMBA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "shared_intermediate_size": 40,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
            "time_step_limit": [0.1, 0.9],
        },
    ),
    Case(
        "granitemoehybrid-dense",
        "granitemoehybrid",
        {
            **_MAMBA,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 40,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
        },
        dtype="bfloat16",
    ),
    Case("bamba", "bamba", {**_MAMBA, "attn_layer_indices": [1], "mlp_bias": True}),
    Case(
        "falcon_h1",
        "falcon_h1",
        {
            **_MAMBA,
            "num_hidden_layers": 2,
            "mamba_d_ssm": 64,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.5,
            "mlp_multipliers": [0.7, 1.4],
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.8,
            "ssm_multipliers": [0.9, 0.8, 1.1, 1.2, 0.7],
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.9,
        },
        dtype="bfloat16",
    ),
    Case(
        "falcon_h1-normed",
        "falcon_h1",
        {
            **_MAMBA,
            "num_hidden_layers": 2,
            "mamba_d_ssm": 64,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "projectors_bias": True,
            "mamba_proj_bias": True,
        },
    ),
    Case(
        "nemotron_h",
        "nemotron_h",
        {
            **_SIZES,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
            **_NEMOTRON_SIZES,
            "num_hidden_layers": 5,
        },
    ),
    Case(
        "nemotron_h-experts",
        "nemotron_h",
        {
            **_SIZES,
            **_NEMOTRON_SIZES,
            **_NEMOTRON_EXPERTS,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "num_hidden_layers": 4,
            "mlp_bias": True,
        },
        dtype="bfloat16",
    ),
    Case(
        "nemotron_h-latent-experts",
        "nemotron_h",
        {
            **_SIZES,
            **_NEMOTRON_SIZES,
            **_NEMOTRON_EXPERTS,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "num_hidden_layers": 4,
            "moe_latent_size": 24,
        },
    ),
    Case(
        "olmo_hybrid",
        "olmo_hybrid",
        {**_DELTA, "num_hidden_layers": 2, "head_dim": 8, "linear_allow_neg_eigval": True},
        is_fused=True,
    ),
    Case("olmo_hybrid-as-saved", "olmo_hybrid", {**_DELTA, "num_hidden_layers": 2, "head_dim": 8}),
)
