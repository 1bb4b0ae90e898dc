"""A tiny checkpoint of every family with mixtures of experts. Data only.

Each switches on what its family adds: dense layers, shared experts, biases, groups. `fused` ones are stored as
transformers holds them: one tensor for all experts of a layer.
"""

from tests.oracle.cases import WINDOW, Case

_TWO_LAYERS = {"num_hidden_layers": 2}
_QWEN = {**_TWO_LAYERS, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_GLM = {"head_dim": 8, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "num_experts_per_tok": 3}
_ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2}
_ALPHA = {"rope_type": "dynamic", "alpha": 40.0, "factor": 1.0}

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
    "truncate": False,
    "original_max_position_embeddings": 16,
}

MOE_CASES = (
    Case("mixtral", "mixtral", {**_TWO_LAYERS, "num_local_experts": 4, "sliding_window": WINDOW}, dtype="bfloat16"),
    Case(
        "gpt_oss",
        "gpt_oss",
        {
            **_TWO_LAYERS,
            "head_dim": 16,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.4,
            "rope_parameters": _YARN,
        },
        dtype="bfloat16",
    ),
    Case(
        "phimoe",
        "phimoe",
        {
            **_TWO_LAYERS,
            "num_local_experts": 6,
            "router_jitter_noise": 0.3,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": WINDOW,
            "original_max_position_embeddings": 48,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "short_factor": [1.0, 1.1, 1.3, 1.7],
                "long_factor": [1.5, 2.5, 4.0, 4.5],
                "short_mscale": 1.2,
                "long_mscale": 1.4,
                "original_max_position_embeddings": 48,
            },
        },
        dtype="bfloat16",
    ),
    Case(
        "dbrx",
        "dbrx",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 100.0},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 5, "moe_top_k": 3},
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
        dtype="bfloat16",
    ),
    Case("mixtral-fused", "mixtral", {**_TWO_LAYERS, "num_local_experts": 4}, is_fused=True),
    Case(
        "qwen2_moe",
        "qwen2_moe",
        {
            **_QWEN,
            "num_hidden_layers": 3,
            "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
        dtype="bfloat16",
    ),
    Case("qwen3_moe", "qwen3_moe", {**_QWEN, "head_dim": 8, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    Case("olmoe", "olmoe", {**_TWO_LAYERS, "num_experts": 6, "num_experts_per_tok": 4, "attention_bias": True}),
    Case(
        "granitemoe",
        "granitemoe",
        {
            **_TWO_LAYERS,
            "num_local_experts": 5,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
        dtype="bfloat16",
    ),
    Case(
        "glm4_moe",
        "glm4_moe",
        {
            **_TWO_LAYERS,
            **_GLM,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    Case(
        "granitemoeshared",
        "granitemoeshared",
        {**_TWO_LAYERS, "num_local_experts": 4, "shared_intermediate_size": 40, "attention_multiplier": 0.3},
    ),
    Case(
        "granitemoe_swa",
        "granitemoe_swa",
        {
            **_TWO_LAYERS,
            "num_local_experts": 4,
            "sliding_window": WINDOW,
            "layer_rope_theta": [0.0, 100.0],
            "attention_multiplier": 0.3,
        },
    ),
    Case("flex_olmo", "flex_olmo", {**_TWO_LAYERS, "num_experts": 5, "num_experts_per_tok": 3}, dtype="bfloat16"),
    Case(
        "minimax_m2",
        "minimax_m2",
        {**_TWO_LAYERS, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 8},
        rewrite={"rope_parameters": None, "rope_theta": 5000000},
    ),
    Case(
        "hy_v3",
        "hy_v3",
        {
            **_TWO_LAYERS,
            "head_dim": 8,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "router_scaling_factor": 1.7,
        },
        dtype="bfloat16",
    ),
    Case(
        "mellum",
        "mellum",
        {
            **_QWEN,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense"],
        },
    ),
    Case(
        "exaone_moe",
        "exaone_moe",
        {
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "num_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "sliding_window": WINDOW,
        },
        dtype="bfloat16",
    ),
    Case(
        "dots1",
        "dots1",
        {
            **_TWO_LAYERS,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.7,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    Case(
        "solar_open",
        "solar_open",
        {
            **_TWO_LAYERS,
            "head_dim": 8,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
        },
    ),
    Case(
        "afmoe",
        "afmoe",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "route_scale": 1.7,
            "mup_enabled": True,
        },
    ),
    Case("ernie4_5_moe", "ernie4_5_moe", {**_TWO_LAYERS, **_ERNIE, "head_dim": 8, "use_bias": True}, dtype="bfloat16"),
    Case(
        "hunyuan_v1_moe",
        "hunyuan_v1_moe",
        {**_TWO_LAYERS, "head_dim": 8, "num_experts": 4, "moe_topk": 2, "rope_parameters": _ALPHA},
    ),
)
