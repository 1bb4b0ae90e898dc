"""Fields of the dense families, of mixtures of experts and of latent attention (see pairwise_cases.py). Data only."""

from collections.abc import Mapping, Sequence
from typing import Any

Fields = Mapping[str, Sequence[Any]]

_SWITCH = [False, True]
_HEADS = [(4, 2), (4, 4), (2, 1)]
_MULTI_HEADS = [(4, 4), (2, 2)]
_ACTIVATIONS = ["silu", "gelu_new", "relu", "relu2", "quick_gelu"]
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.25}
_ROPES: list[dict[str, Any]] = [
    {},
    {"rope_type": "default", "rope_theta": 300.0},
    {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    {**_LLAMA3, "rope_theta": 100.0, "original_max_position_embeddings": 32},
    {**_YARN, "rope_theta": 100.0, "original_max_position_embeddings": 16},
]
_PARTIAL = [{**rope, "partial_rotary_factor": part} for rope in _ROPES[1:4] for part in (0.5, 1.0)]
_GROWING = [
    {**rope, "rope_theta": 100.0, "original_max_position_embeddings": original, "llama_4_scaling_beta": beta}
    for rope in ({"rope_type": "default"}, {**_YARN, "mscale": 1.2, "mscale_all_dim": 0.7})
    for original, beta in ((8, 0.3), (64, 0.1))
]
_ALPHA = [{"rope_type": "dynamic", "rope_theta": 100.0, "factor": 1.0, "alpha": 30.0}, *_ROPES[:3]]
_ROPE: Fields = {"rope": _ROPES, "spelling": ["new", "old"]}
_PARTLY: Fields = {"rope": _PARTIAL, "spelling": ["new", "old"]}
_TIED: Fields = {"tie_word_embeddings": _SWITCH, "heads": _HEADS}
_GATED: Fields = {**_TIED, "hidden_act": ["silu", "gelu_pytorch_tanh", "gelu"]}
_PLAIN: Fields = {**_TIED, "hidden_act": _ACTIVATIONS}
_WINDOWS: Fields = {"sliding_window": [1, 5, 100]}

DENSE_FIELDS: Mapping[str, Fields] = {
    "arcee": {**_PLAIN, **_ROPE, "head_dim": [8, 16], "attention_bias": _SWITCH, "mlp_bias": _SWITCH},
    "seed_oss": {
        **_GATED,
        **_ROPE,
        "head_dim": [8, 16],
        "attention_bias": _SWITCH,
        "attention_out_bias": _SWITCH,
        "mlp_bias": _SWITCH,
    },
    "granite_swa": {
        **_GATED,
        **_WINDOWS,
        "rope": _ROPES,
        "head_dim": [8, 16],
        "attention_bias": _SWITCH,
        "mlp_bias": _SWITCH,
        "attention_multiplier": [0.1, 0.4],
        "layer_rope_theta": [None, [0.0, 50.0, 0.0, 1000.0]],
        "layers": ["named", "by rule"],
    },
    "ministral3": {**_GATED, "rope": _GROWING, "head_dim": [8, 16], "sliding_window": [None, 1, 5]},
    "olmo3": {**_GATED, **_WINDOWS, "rope": _ROPES, "attention_bias": _SWITCH, "layers": ["named", "by rule"]},
    "apertus": {**_PLAIN, **_ROPE, "attention_bias": _SWITCH, "hidden_act": ["xielu", "relu2", "silu"]},
    "exaone4": {**_GATED, **_ROPE, "sliding_window": [1, 5, None], "layers": ["named", "by rule"]},
    "hunyuan_v1_dense": {
        **_GATED,
        "rope": _ALPHA,
        "spelling": ["new", "old"],
        "head_dim": [8, 16],
        "attention_bias": _SWITCH,
    },
    "glm4": {**_GATED, **_PARTLY, "head_dim": [8, 16], "attention_bias": _SWITCH},
    "ernie4_5": {**_GATED, **_ROPE, "head_dim": [8, 16], "use_bias": _SWITCH},
    "hyperclovax": {
        **_GATED,
        **_ROPE,
        "head_dim": [8, 16],
        "attention_bias": _SWITCH,
        "mlp_bias": _SWITCH,
        "attention_multiplier": [None, 0.1],
        "embedding_multiplier": [1.0, 6.0],
        "residual_multiplier": [0.4, 1.0],
        "logits_scaling": [0.5, 2.0],
    },
    "iquestcoder": {**_GATED, **_ROPE, "head_dim": [8, 16], "attention_bias": _SWITCH, "mlp_bias": _SWITCH},
    "helium": {**_GATED, **_ROPE, "attention_bias": _SWITCH, "mlp_bias": _SWITCH},
    "cohere2": {
        **_GATED,
        **_ROPE,
        **_WINDOWS,
        "attention_bias": _SWITCH,
        "logit_scale": [0.0625, 2.0],
        "layers": ["named", "by rule", "by pattern"],
    },
    "gemma": {
        **_TIED,
        **_ROPE,
        "hidden_act": ["gelu", "gelu_pytorch_tanh"],
        "head_dim": [8, 16],
        "attention_bias": _SWITCH,
    },
    "vaultgemma": {
        **_TIED,
        **_ROPE,
        **_WINDOWS,
        "head_dim": [8, 16],
        "attention_bias": _SWITCH,
        "attn_logit_softcapping": [None, 20.0],
        "query_pre_attn_scalar": [8, 16],
        "layers": ["named", "by rule"],
    },
    "cwm": {**_GATED, "rope": _ROPES, **_WINDOWS, "head_dim": [8, 16], "layers": ["named", "by rule"]},
    "ministral": {
        **_GATED,
        **_ROPE,
        "head_dim": [8, 16],
        "sliding_window": [1, 5],
        "layers": ["named", "by rule"],
    },
    "glm": {**_GATED, **_PARTLY, "head_dim": [8, 16], "attention_bias": _SWITCH},
    "cohere": {**_GATED, **_ROPE, "attention_bias": _SWITCH, "logit_scale": [0.0625, 2.0]},
    "jais2": {**_PLAIN, **_ROPE, "attention_bias": _SWITCH, "mlp_bias": _SWITCH},
    "nemotron": {**_PLAIN, **_PARTLY, "head_dim": [8, 16], "attention_bias": _SWITCH, "mlp_bias": _SWITCH},
    "starcoder2": {**_PLAIN, **_ROPE, "sliding_window": [None, 1, 5], "use_bias": _SWITCH},
    "stablelm": {**_GATED, **_PARTLY, "use_qkv_bias": _SWITCH, "use_parallel_residual": _SWITCH},
    "phi": {**_PLAIN, **_PARTLY, "qk_layernorm": _SWITCH, "tie_word_embeddings": [False]},
    "gpt2": {
        "n_head": [2, 4],
        "n_inner": [None, 48],
        "activation_function": _ACTIVATIONS,
        "scale_attn_weights": _SWITCH,
        "tie_word_embeddings": _SWITCH,
    },
    "gpt_bigcode": {
        "n_head": [2, 4],
        "multi_query": _SWITCH,
        "n_inner": [None, 48],
        "activation_function": _ACTIVATIONS,
        "scale_attn_weights": _SWITCH,
        "tie_word_embeddings": _SWITCH,
    },
    "gptj": {
        "n_head": [2, 4],
        "n_inner": [None, 48],
        "activation_function": _ACTIVATIONS,
        "rotary_dim": [4, 8],
        "tie_word_embeddings": [False],
    },
    "gpt_neox": {
        **_PLAIN,
        **_PARTLY,
        "heads": _MULTI_HEADS,
        "attention_bias": _SWITCH,
        "use_parallel_residual": _SWITCH,
    },
    "gpt_neo": {
        "heads": _MULTI_HEADS,
        "intermediate_size": [None, 48],
        "activation_function": _ACTIVATIONS,
        "attention_types": [[[["global", "local"], 1]], [[["local"], 2]]],
        "window_size": [1, 5],
        "tie_word_embeddings": _SWITCH,
    },
    "falcon": {
        "num_attention_heads": [2, 4],
        "new_decoder_architecture+parallel_attn+num_ln_in_parallel_attn+num_kv_heads": [
            (False, False, None, None),
            (False, True, None, None),
            (True, True, None, 1),
            (True, True, 1, 2),
            (True, True, 2, 2),
        ],
        "multi_query": _SWITCH,
        "bias": _SWITCH,
        "activation": ["gelu", "relu"],
        "tie_word_embeddings": _SWITCH,
    },
    "olmo": {**_GATED, "attention_bias": _SWITCH, "clip_qkv": [None, 0.3]},
    "opt": {
        "heads": _MULTI_HEADS,
        "ffn_dim": [48, 64],
        "activation_function": ["relu", "gelu", "silu"],
        "enable_bias": _SWITCH,
        "do_layer_norm_before": _SWITCH,
        "_remove_final_layer_norm": _SWITCH,
        "word_embed_proj_dim": [16, 32],
        "tie_word_embeddings": _SWITCH,
    },
    "biogpt": {
        "heads": _MULTI_HEADS,
        "hidden_act": ["gelu", "relu"],
        "scale_embedding": _SWITCH,
        "tie_word_embeddings": _SWITCH,
    },
    "xglm": {
        "attention_heads": [2, 4],
        "ffn_dim": [48, 64],
        "activation_function": ["gelu", "relu"],
        "scale_embedding": _SWITCH,
        "tie_word_embeddings": _SWITCH,
    },
    "openai-gpt": {"n_head": [2, 4], "afn": ["gelu", "relu", "silu"], "tie_word_embeddings": _SWITCH},
    "codegen": {
        "n_head": [4],
        "n_inner": [None, 48],
        "activation_function": _ACTIVATIONS,
        "rotary_dim": [4, 8],
        "tie_word_embeddings": [False],
    },
    "persimmon": {**_PLAIN, **_PARTLY, "heads": _MULTI_HEADS, "qk_layernorm": _SWITCH},
    "nanochat": {
        "heads": _HEADS,
        "hidden_act": ["relu2", "gelu"],
        "rope": _ROPES[:2],
        "attention_bias": _SWITCH,
        "final_logit_softcapping": [None, 15.0],
        "tie_word_embeddings": _SWITCH,
    },
    "bitnet": {
        "heads": _HEADS,
        "hidden_act": ["relu2", "silu"],
        "rope": _ROPES[:2],
        "attention_bias": _SWITCH,
        "tie_word_embeddings": _SWITCH,
    },
    "internlm3": {
        **_GATED,
        **_ROPE,
        "head_dim": [8, 16],
        "attention_bias+mlp_bias": [(False, False), (True, True)],
    },
}
_PAIRS = [(4, 2), (2, 1)]
_MOE: Fields = {"heads": _PAIRS, "experts": [(4, 1), (5, 3)], "is_fused": _SWITCH, "hidden_act": ["silu", "gelu"]}
_SPARSE: Fields = {"decoder_sparse_step": [1, 2], "mlp_only_layers": [[], [0]], "norm_topk_prob": _SWITCH}
_SLIDING: Fields = {"use_sliding_window": _SWITCH, "sliding_window": [5]}

_MSCALED: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.5, 2.5, 4.0, 4.5],
    "short_mscale": 1.2,
    "long_mscale": 1.4,
    "original_max_position_embeddings": 48,
}

MOE_FIELDS: Mapping[str, Fields] = {
    "mixtral": {**_MOE, "rope": _ROPES[:2], "sliding_window": [None, 5], "tie_word_embeddings": _SWITCH},
    "phimoe": {
        **_MOE,
        "heads": [(4, 2), (4, 1)],
        "experts": [(4, 2), (6, 2)],
        "rope": [_ROPES[0], _MSCALED],
        "spelling": ["new", "old"],
        "sliding_window": [None, 5],
        "router_jitter_noise": [0.0, 0.01, 0.3],
        "attention_bias+lm_head_bias": [(False, False), (True, False), (False, True)],
    },
    "dbrx": {
        "d_model+n_layers+max_seq_len": [(32, 2, 64)],
        "n_heads": [2, 4],
        "attn_config+rope_parameters": [
            (
                {"kv_n_heads": heads, "clip_qkv": limit, "rope_theta": theta},
                {"rope_type": "default", "rope_theta": theta},
            )
            for heads, limit, theta in ((2, 1.5, 50.0), (1, 0.7, 300.0), (2, 0.3, 10000.0))
        ],
        "ffn_config": [
            {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 1, "moe_normalize_expert_weights": None},
            {"ffn_hidden_size": 16, "moe_num_experts": 5, "moe_top_k": 3, "ffn_act_fn": {"name": "gelu"}},
            {"ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 2, "moe_normalize_expert_weights": None},
        ],
        "written": [({}, {}), ({}, {"rope_parameters": None, "rope_theta": 300.0})],
    },
    "qwen2_moe": {
        **_MOE,
        **_SPARSE,
        **_SLIDING,
        "moe_intermediate_size": [24],
        "shared_expert_intermediate_size": [16, 40],
        "max_window_layers": [1, 5],
        "qkv_bias": _SWITCH,
    },
    "qwen3_moe": {**_MOE, **_SPARSE, **_SLIDING, "moe_intermediate_size": [16, 24], "attention_bias": _SWITCH},
    "olmoe": {
        **_MOE,
        "clip_qkv": [None, 0.3],
        "rope": _ROPES[:2],
        "norm_topk_prob": _SWITCH,
        "attention_bias": _SWITCH,
    },
    "granitemoe": {
        **_MOE,
        "attention_bias": _SWITCH,
        "residual_multiplier": [0.4, 1.0],
        "attention_multiplier": [0.2, 0.5],
        "logits_scaling": [1.0, 2.0],
    },
    "glm4_moe": {
        **_MOE,
        "experts": [(8, 1), (8, 4)],
        "groups": [(1, 1), (2, 1), (4, 2)],
        "rope": _PARTIAL[:2],
        "moe_intermediate_size": [16],
        "norm_topk_prob": _SWITCH,
        "routed_scaling_factor": [1.0, 2.5],
        "n_shared_experts": [1, 2],
        "first_k_dense_replace": [0, 1],
        "use_qk_norm": _SWITCH,
        "attention_bias": _SWITCH,
    },
    "granitemoeshared": {**_MOE, "shared_intermediate_size": [0, 40], "attention_bias": _SWITCH},
    "granitemoe_swa": {
        **_MOE,
        "shared_intermediate_size": [0, 40],
        "sliding_window": [1, 5],
        "layer_rope_theta": [None, [0.0, 50.0]],
        "attention_multiplier": [0.1, 0.4],
    },
    "flex_olmo": {**_MOE, "rope": _ROPES[:2], "norm_topk_prob": _SWITCH, "attention_bias": _SWITCH},
    "minimax_m2": {**_MOE, "head_dim": [8, 16], "rope": _PARTIAL[:4], "spelling": ["new", "old"]},
    "hy_v3": {
        **_MOE,
        "moe_intermediate_size": [16],
        "num_shared_experts": [1, 2],
        "router_scaling_factor": [1.0, 2.5],
        "mlp_layer_types": [None, ["sparse", "dense"]],
        "attention_bias": _SWITCH,
    },
    "afmoe": {
        **_MOE,
        "head_dim": [8, 16],
        "rope": _ROPES[:3],
        "moe_intermediate_size": [16],
        "num_shared_experts": [1, 2],
        "num_dense_layers": [0, 1],
        "route_scale": [1.0, 2.5],
        "mup_enabled": _SWITCH,
        "sliding_window": [1, 5],
        "global_attn_every_n_layers": [2],
        "layer_types": [None, ["full_attention", "sliding_attention"]],
        "attention_bias": _SWITCH,
    },
    "mellum": {
        **_MOE,
        "head_dim": [8, 16],
        "moe_intermediate_size": [16],
        "sliding_window": [1, 5],
        "layer_types": [None, ["sliding_attention", "full_attention"]],
        "mlp_layer_types": [None, ["sparse", "dense"]],
        "norm_topk_prob": _SWITCH,
    },
    "exaone_moe": {
        **_MOE,
        "experts": [(8, 1), (8, 4)],
        "groups": [(1, 1), (4, 2)],
        "moe_intermediate_size": [16],
        "num_shared_experts": [1, 2],
        "mlp_layer_types": [None, ["sparse", "dense"]],
        "first_k_dense_replace": [0, 1],
        "sliding_window": [1, 5],
        "norm_topk_prob": _SWITCH,
    },
    "dots1": {
        **_MOE,
        "experts": [(8, 1), (8, 4)],
        "groups": [(1, 1), (4, 2)],
        "moe_intermediate_size": [16],
        "n_shared_experts": [1, 2],
        "first_k_dense_replace": [0, 1],
        "sliding_window": [5, None],
        "max_window_layers": [0, 1],
        "norm_topk_prob": _SWITCH,
    },
    "solar_open": {
        **_MOE,
        "head_dim": [8, 16],
        "experts": [(8, 1), (8, 4)],
        "groups": [(1, 1), (4, 2)],
        "moe_intermediate_size": [16],
        "n_shared_experts": [1, 2],
        "rope": _ROPES[:3],
        "attention_bias": _SWITCH,
    },
    "ernie4_5_moe": {
        **_MOE,
        "moe_intermediate_size": [16],
        "moe_num_shared_experts": [0, 2],
        "moe_layer_start_index": [0, 1],
        "moe_layer_interval": [1, 2],
        "use_bias": _SWITCH,
    },
    "gpt_oss": {
        "heads": _PAIRS,
        "experts": [(4, 1), (5, 3)],
        "head_dim": [8, 16],
        "rope": [_ROPES[1], _ROPES[4]],
        "sliding_window": [1, 5],
        "layers": ["named", "by rule"],
        "attention_bias": _SWITCH,
        "swiglu_alpha": [1.0, 1.702],
        "swiglu_limit": [0.4, 7.0],
    },
    "hunyuan_v1_moe": {**_MOE, "experts": [(4, 1), (5, [1, 3])], "rope": _ALPHA[:2], "head_dim": [8, 16]},
}
_LATENT: Fields = {
    "heads": [(4, 4), (2, 2)],
    "kv_lora_rank": [16, 24],
    "q_lora_rank": [None, 12],
    "qk_nope_head_dim": [8, 10],
    "qk_rope_head_dim": [4, 8],
    "v_head_dim": [8, 12],
    "attention_bias": _SWITCH,
}
_MSCALE = {**_YARN, "rope_theta": 100.0, "original_max_position_embeddings": 16, "mscale": 1.2, "mscale_all_dim": 0.7}
_LATENT_ROPE: Fields = {"rope": [{}, _ROPES[2], _ROPES[4], _MSCALE], "spelling": ["new", "old"]}
_LATENT_MOE: Fields = {
    **_LATENT,
    "is_fused": _SWITCH,
    "experts": [(8, 1), (8, 4)],
    "groups": [(1, 1), (4, 2)],
    "moe_intermediate_size": [16],
    "routed_scaling_factor": [1.0, 2.5],
    "n_shared_experts": [1, 2],
}

LATENT_FIELDS: Mapping[str, Fields] = {
    "deepseek_v2": {
        **_LATENT_MOE,
        **_LATENT_ROPE,
        "first_k_dense_replace": [0, 1],
        "topk_method": ["greedy", "group_limited_greedy"],
    },
    "deepseek_v3": {
        **_LATENT_MOE,
        **_LATENT_ROPE,
        "first_k_dense_replace": [0, 1],
        "norm_topk_prob": _SWITCH,
        "rope_interleave": _SWITCH,
    },
    "glm4_moe_lite": {
        **_LATENT_MOE,
        "rope": [_ROPES[1], _MSCALE],
        "mlp_layer_types": [None, ["sparse", "dense"]],
        "norm_topk_prob": _SWITCH,
        "rope_interleave": _SWITCH,
    },
    "mistral4": {
        **_LATENT_MOE,
        "qk_nope_head_dim": [4, 8],  # transformers rounds the share of 10 + 8 dims that it rotates down
        "rope": [{**_MSCALE, "llama_4_scaling_beta": beta} for beta in (0.1, 0.4)],
        "first_k_dense_replace": [0, 1],
        "norm_topk_prob": _SWITCH,
        "rope_interleave": _SWITCH,
    },
    "minicpm3": {
        **_LATENT,
        **_LATENT_ROPE,
        "v_head_dim": [None, 12],
        "scale_emb": [1, 3],
        "scale_depth": [None, 0.9],
        "dim_model_base": [None, 16],
        "tie_word_embeddings": _SWITCH,
    },
    "youtu": {**_LATENT, **_LATENT_ROPE, "rope_interleave": _SWITCH, "tie_word_embeddings": [False]},
}
