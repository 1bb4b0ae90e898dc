"""Defaults of the families with unequal layers, as in rms_norm_defaults.py."""

from typing import Any

from ingot.pipeline.checkpoint.families.rms_norm_defaults import GEMMA

_BOTH: dict[str, Any] = {key: value for key, value in GEMMA.items() if key != "query_pre_attn_scalar"} | {
    "vocab_size": 262_144,
    "num_hidden_layers": 30,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "final_logit_softcapping": None,
    "num_kv_shared_layers": 0,
}
GEMMA4 = _BOTH | {
    "use_bidirectional_attention": None,
    "attention_k_eq_v": False,
    "per_layer_config": None,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "use_double_wide_mlp": False,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
}
_NOT_UNIFIED = (
    "vocab_size_per_layer_input",
    "hidden_size_per_layer_input",
    "enable_moe_block",
    "num_experts",
    "top_k_experts",
    "moe_intermediate_size",
)
GEMMA4_UNIFIED = {key: value for key, value in GEMMA4.items() if key not in _NOT_UNIFIED} | {
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
}
GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
GEMMA3N = _BOTH | {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "final_logit_softcapping": 30.0,
    "num_kv_shared_layers": 15,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
    "activation_sparsity_pattern": None,
}
