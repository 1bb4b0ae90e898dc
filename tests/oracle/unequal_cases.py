"""Tiny checkpoints of the families with unequal layers. Data only.

Between them: heads that differ, keys that are the values, keys and values that layers share, wide feed-forwards, inputs
of each layer, experts next to a feed-forward, several residual streams, sparse gates; prompts longer than the windows.
"""

from tests.oracle.cases import WINDOW, Case

_SLIDING, _FULL = "sliding_attention", "full_attention"
_LAYERS = {"num_hidden_layers": 4, "layer_types": [_SLIDING, _FULL] * 2, "head_dim": 8, "sliding_window": WINDOW}
_INPUTS = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8}

UNEQUAL_CASES = (
    Case(
        "gemma4_text",
        "gemma4_text",
        {
            **_LAYERS,
            **_INPUTS,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    Case(
        "gemma4_text-experts",
        "gemma4_text",
        {
            **_LAYERS,
            "num_hidden_layers": 2,
            "layer_types": [_SLIDING, _FULL],
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
        dtype="bfloat16",
        rewrite={"per_layer_config": None, "global_head_dim": 16},
    ),
    Case(
        "gemma4_unified_text",
        "gemma4_unified_text",
        {**_LAYERS, "num_hidden_layers": 2, "layer_types": [_SLIDING, _FULL], "global_head_dim": 16},
    ),
    Case(
        "gemma3n_text",
        "gemma3n_text",
        {
            **_LAYERS,
            **_INPUTS,
            "vocab_size_per_layer_input": 120,
            "num_kv_shared_layers": 2,
            "laurel_rank": 4,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0],
            "intermediate_size": [48, 32, 48, 64],
        },
    ),
)
