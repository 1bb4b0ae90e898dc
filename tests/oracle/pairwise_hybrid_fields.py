"""Fields of the families with recurrent layers and with unequal layers (see pairwise_cases.py). Data only."""

from collections.abc import Mapping

from tests.oracle.pairwise_fields import Fields

_SWITCH = [False, True]
_LINEAR, _FULL, _SLIDING = "linear_attention", "full_attention", "sliding_attention"
_THETA = {"rope_type": "default", "rope_theta": 300.0}
_FACTOR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
_ROPE: Fields = {"rope": [{}, _THETA, _FACTOR], "spelling": ["new", "old"]}
_COMMON: Fields = {"heads": [(4, 2), (2, 1)], "tie_word_embeddings": _SWITCH, "attention_bias": _SWITCH}
_EXPERTS: Fields = {"experts": [(4, 1), (5, 3)], "is_fused": _SWITCH}

_DELTA: Fields = {
    **_COMMON,
    "linear_num_key_heads+linear_num_value_heads": [(1, 2), (2, 2), (2, 4)],
    "linear_key_head_dim": [8, 12],
    "linear_value_head_dim": [8, 12],
    "linear_conv_kernel_dim": [2, 4],
    "rms_norm_eps": [1e-3],
}
_PARTLY: Fields = {
    "head_dim": [8, 16],
    "rope": [{}, _THETA | {"partial_rotary_factor": 0.5}, _FACTOR | {"partial_rotary_factor": 1.0}],
    "spelling": ["new", "old"],
    "written": [
        ({"layer_types": [_FULL, _LINEAR]}, {}),
        ({"layer_types": [_LINEAR, _FULL]}, {"layer_types": None, "full_attention_interval": 2}),
    ],
}
_QWEN_EXPERTS: Fields = {
    **_EXPERTS,
    "moe_intermediate_size": [16],
    "shared_expert_intermediate_size": [16, 40],
}
_MAMBA: Fields = {
    **_COMMON,
    "mamba_expand+mamba_n_heads+mamba_d_head": [(2, 8, 8), (2, 4, "auto"), (1, 4, 8)],
    "mamba_n_groups": [1, 2],
    "mamba_d_state": [8, 12],
    "mamba_d_conv": [2, 4],
    "mamba_chunk_size": [8],
    "mamba_conv_bias": _SWITCH,
    "mamba_proj_bias": _SWITCH,
    "rms_norm_eps": [1e-3],
}
_TIME_LIMITS: Fields = {"time_step_limit": [[0.0, 5.0], [0.1, 0.9]]}
_SCAN = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 12, "chunk_size": 8}
_NEMOTRON_SIZES = [{**_SCAN, "n_groups": 2, "conv_kernel": 4}, {**_SCAN, "n_groups": 1, "conv_kernel": 3}]
_NEMOTRON_LAYERS = [_LINEAR, "moe", _FULL, "mlp"]
_OLDER_NEMOTRON = {
    "n_groups": None,
    "conv_kernel": None,
    "use_conv_bias": None,
    "time_step_min": None,
    "layers_block_type": None,
    "num_hidden_layers": 4,
    "mamba_n_groups": 1,
    "mamba_d_conv": 3,
    "mamba_conv_bias": False,
    "mamba_dt_min": 0.3,
    "hybrid_override_pattern": "ME*-",
}

HYBRID_FIELDS: Mapping[str, Fields] = {
    "qwen3_next": {
        **_DELTA,
        **_PARTLY,
        **_QWEN_EXPERTS,
        "experts": [(0, 1), (4, 1), (5, 3)],
        "decoder_sparse_step": [1, 2],
        "mlp_only_layers": [[], [0]],
        "norm_topk_prob": _SWITCH,
    },
    "qwen3_5_text": {**_DELTA, **_PARTLY, "hidden_act": ["silu"]},
    "qwen3_5_moe_text": {**_DELTA, **_PARTLY, **_QWEN_EXPERTS},
    "olmo_hybrid": {
        **_DELTA,
        **_ROPE,
        "linear_num_key_heads+linear_num_value_heads": [(None, None), (2, 2), (2, 4)],
        "linear_allow_neg_eigval": _SWITCH,
        "is_fused": [True],  # transformers cuts the other form in equal thirds, and renames norms of attention
        "written": [
            ({"layer_types": [_FULL, _LINEAR]}, {}),
            ({"layer_types": [_LINEAR, _FULL]}, {"layer_types": None}),
        ],
    },
    "lfm2": {
        **_ROPE,
        "heads": _COMMON["heads"],
        "conv_bias": _SWITCH,
        "conv_L_cache": [2, 3, 4],
        "norm_eps": [1e-3],
        "block_auto_adjust_ff_dim": _SWITCH,
        "block_ffn_dim_multiplier": [1.0, 1.3],
        "block_multiple_of": [8, 16],
        "written": [
            ({"layer_types": ["conv", _FULL], "tie_word_embeddings": False}, {}),
            ({"tie_word_embeddings": False}, {"tie_word_embeddings": None, "tie_embedding": False}),
            (
                {"full_attn_idxs": [0], "intermediate_size": 60},
                {"layer_types": None, "intermediate_size": None, "block_ff_dim": 60},
            ),
        ],
    },
    "lfm2_moe": {
        **_ROPE,
        **_EXPERTS,
        "heads": _COMMON["heads"],
        "moe_intermediate_size": [16],
        "conv_bias": _SWITCH,
        "conv_L_cache": [2, 4],
        "norm_eps": [1e-3],
        "num_dense_layers": [0, 1],
        "norm_topk_prob": _SWITCH,
        "routed_scaling_factor": [1.0, 2.5],
        "layer_types": [["conv", _FULL]],
        "written": [
            ({"tie_word_embeddings": True}, {}),
            ({"tie_word_embeddings": False}, {"tie_word_embeddings": None, "tie_embedding": False}),
        ],
    },
    "granitemoehybrid": {
        **_MAMBA,
        **_ROPE,
        **_TIME_LIMITS,
        **_EXPERTS,
        "experts": [(0, 1), (4, 1), (5, 3)],
        "shared_intermediate_size": [24, 40],
        "position_embedding_type": [None, "rope"],
        "embedding_multiplier": [1.0, 6.0],
        "residual_multiplier": [0.4, 1.0],
        "attention_multiplier": [0.1, 0.4],
        "logits_scaling": [1.0, 2.0],
        "written": [
            ({"layer_types": [_FULL, _LINEAR]}, {}),
            ({"layer_types": [_LINEAR, _FULL]}, {"layer_types": None, "layers_block_type": ["mamba", "attention"]}),
        ],
    },
    "bamba": {**_MAMBA, **_ROPE, **_TIME_LIMITS, "attn_layer_indices": [[0], [0, 1], [1]], "mlp_bias": _SWITCH},
    "falcon_h1": {
        **_MAMBA,
        **_ROPE,
        **_TIME_LIMITS,
        "mamba_d_ssm": [None],
        "mamba_rms_norm": _SWITCH,
        "mamba_norm_before_gate": _SWITCH,
        "projectors_bias": _SWITCH,
        "mlp_bias": _SWITCH,
        "embedding_multiplier": [1.0, 3.0],
        "lm_head_multiplier": [0.5, 1.0],
        "mlp_multipliers": [None, [0.7, 1.4]],
        "key_multiplier": [0.6, 1.0],
        "attention_in_multiplier": [1.0, 1.2],
        "attention_out_multiplier": [0.8, 1.0],
        "ssm_multipliers": [None, [0.9, 0.8, 1.1, 1.2, 0.7]],
        "ssm_in_multiplier": [1.0, 1.1],
        "ssm_out_multiplier": [0.9, 1.0],
    },
    "nemotron_h": {
        **_COMMON,
        "tie_word_embeddings": [False],  # transformers ties none
        "head_dim": [8, 16],
        "mlp_hidden_act": ["relu2", "silu"],
        "mlp_bias": _SWITCH,
        "use_bias": _SWITCH,
        "experts": [(8, 1), (8, 4)],
        "groups": [(1, 1), (4, 2)],
        "is_fused": _SWITCH,
        "moe_intermediate_size": [16],
        "moe_shared_expert_intermediate_size": [16, 40],
        "moe_latent_size": [None, 24],
        "norm_topk_prob": _SWITCH,
        "routed_scaling_factor": [1.0, 2.5],
        "layer_norm_epsilon": [1e-3],
        "written": [
            ({**_NEMOTRON_SIZES[0], "layers_block_type": _NEMOTRON_LAYERS}, {}),
            (
                {**_NEMOTRON_SIZES[1], "layers_block_type": _NEMOTRON_LAYERS, "time_step_min": 0.3},
                {},
            ),
            (
                {
                    **_NEMOTRON_SIZES[1],
                    "layers_block_type": _NEMOTRON_LAYERS,
                    "time_step_min": 0.3,
                    "use_conv_bias": False,
                },
                _OLDER_NEMOTRON,
            ),
        ],
    },
}

_BY_KIND = {_SLIDING: {"rope_type": "default", "rope_theta": 50.0}}
_GEMMA: Fields = {
    "heads": _COMMON["heads"],
    "head_dim": [8, 16],
    "attention_bias": _SWITCH,
    "hidden_activation": ["gelu_pytorch_tanh", "silu"],
    "tie_word_embeddings": _SWITCH,
    "sliding_window": [1, 5],
    "num_hidden_layers": [4],
    "rms_norm_eps": [1e-3],
}
_GEMMA4_FULL_SIZES = [(8, False, None), (16, False, 1), (16, True, None), (16, True, 1)]
_SHARES = "layer_types+num_kv_shared_layers"
_GEMMA4_LAYERS = [  # and the width of each layer's inputs: transformers shares keys and values only with inputs
    ([_SLIDING, _SLIDING, _SLIDING, _FULL], 0, 0),
    ([_SLIDING, _FULL, _SLIDING, _FULL], 0, 8),
    ([_SLIDING, _FULL, _SLIDING, _FULL], 2, 8),
]
_GEMMA4: Fields = {
    **_GEMMA,
    "global_head_dim+attention_k_eq_v+num_global_key_value_heads": _GEMMA4_FULL_SIZES,
    "spelling": ["new", "old"],
    _SHARES: [(layer_types, shared) for layer_types, shared, _ in _GEMMA4_LAYERS],
    "use_double_wide_mlp": _SWITCH,
    "final_logit_softcapping": [None, 3.0],
    "rope_parameters": [
        None,
        {**_BY_KIND, _FULL: {"rope_type": "proportional", "rope_theta": 300.0, "partial_rotary_factor": 0.5}},
        {**_BY_KIND, _FULL: {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0}},
    ],
}

UNEQUAL_FIELDS: Mapping[str, Fields] = {
    "gemma4_text": {
        **{name: values for name, values in _GEMMA4.items() if name != _SHARES},
        "vocab_size_per_layer_input": [128],
        f"{_SHARES}+hidden_size_per_layer_input": _GEMMA4_LAYERS,
        "enable_moe_block+num_experts+top_k_experts+moe_intermediate_size": [
            (False, None, None, None),
            (True, 4, 1, 16),
            (True, 5, 3, 24),
        ],
    },
    "gemma4_unified_text": _GEMMA4,
    "gemma3n_text": {
        **_GEMMA,
        "hidden_size_per_layer_input+vocab_size_per_layer_input": [(4, 128), (8, 120)],
        "intermediate_size": [48, [48, 32, 48, 64]],
        "final_logit_softcapping": [3.0, 30.0],
        "laurel_rank": [4, 6],
        "altup_num_inputs+altup_active_idx": [(2, 0), (3, 1), (4, 3)],
        "altup_correct_scale": _SWITCH,
        "activation_sparsity_pattern": [None, [0.9, 0.0, 0.5, 0.0]],
        "written": [
            ({"layer_types": [_SLIDING, _FULL] * 2, "num_kv_shared_layers": 2}, {}),
            ({"layer_types": [_SLIDING] * 4, "num_kv_shared_layers": 2}, {"layer_types": None}),
            (
                {
                    "layer_types": [_SLIDING, _FULL, _FULL, _SLIDING],
                    "num_kv_shared_layers": 0,
                    "rope_parameters": {
                        _FULL: {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0},
                        _SLIDING: {"rope_type": "default", "rope_theta": 50.0},
                    },
                },
                {
                    "rope_parameters": None,
                    "rope_theta": 300.0,
                    "rope_local_base_freq": 50.0,
                    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
                },
            ),
        ],
    },
}
