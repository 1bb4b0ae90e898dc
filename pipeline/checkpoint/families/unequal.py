"""Families whose layers have different shapes, share keys and values, or have inputs of their own."""

from collections.abc import Mapping
from typing import Any

from ingot.pipeline.checkpoint.experts_config import ExpertRules
from ingot.pipeline.checkpoint.families.family import Family, by_model_type

_BOTH: dict[str, Any] = {
    "norm_place": "around",
    "scaled_embedding": True,
    "scale_key": "one",
    "qk_norm": "head",
    "value_norm": True,
    "windows": "pattern",
    "rope_by_layer_type": True,
    "layer_inputs": True,
    "shares_kv": True,
}
_GEMMA4: dict[str, Any] = {
    **_BOTH,
    "full_every": 6,
    "last_is_full": True,
    "partial_rotary": True,
    "more_defaults": {"global_head_dim": 512},
    "global_heads": True,
    "layer_scale": True,
}

UNEQUAL: Mapping[str, Family] = by_model_type(
    Family(
        "gemma4_text",
        **_GEMMA4,
        experts=ExpertRules(
            "num_experts",
            "top_k_experts",
            "moe_intermediate_size",
            switch="enable_moe_block",
            with_dense=True,
            names=(
                {
                    "moe": "",
                    "router": "router.proj",
                    "router_scale": "router.scale",
                    "per_expert_scale": "router.per_expert_scale",
                },
            ),
        ),
    ),
    Family("gemma4_unified_text", **{**_GEMMA4, "layer_inputs": False}),
    Family(
        "gemma3n_text",
        **_BOTH,
        full_every=5,
        local_theta_key="rope_local_base_freq",
        altup=True,
    ),
)
