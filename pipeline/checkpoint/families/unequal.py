"""Families whose layers have different shapes, share keys and values, or have inputs of their own."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ingot.pipeline.checkpoint.experts_config import ExpertRules
from ingot.pipeline.checkpoint.families import unequal_defaults as defaults
from ingot.pipeline.checkpoint.families.family import Family

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
    "default_rope": defaults.GEMMA4_ROPE,
    "global_heads": True,
    "layer_scale": True,
}

UNEQUAL: Mapping[str, Family] = MappingProxyType(
    {
        "gemma4_text": Family(
            defaults.GEMMA4,
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
        "gemma4_unified_text": Family(defaults.GEMMA4_UNIFIED, **{**_GEMMA4, "layer_inputs": False}),
        "gemma3n_text": Family(
            defaults.GEMMA3N,
            **_BOTH,
            full_every=5,
            local_theta_key="rope_local_base_freq",
            default_theta=1_000_000.0,
            altup=True,
        ),
    }
)
