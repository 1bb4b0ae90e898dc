"""Text models that multimodal models have within them, where no text model of the same kind is published alone."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ingot.pipeline.checkpoint.experts_config import ExpertRules
from ingot.pipeline.checkpoint.families import towers_defaults as defaults
from ingot.pipeline.checkpoint.families.family import Family
from ingot.pipeline.checkpoint.families.mixtures import MIXTURES, QWEN_EXPERTS
from ingot.pipeline.checkpoint.families.rms_norm import RMS_NORM

_QWEN2_VL: dict[str, Any] = {
    "qkv_bias": True,
    "output_bias": False,
    "windows": "from-max-window-layers",
    "fixed_head_dim": True,
    "mrope": True,
    "default_theta": 1_000_000.0,
}

TOWERS: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2_vl_text": Family(defaults.QWEN2_VL, **_QWEN2_VL),
        "qwen2_5_vl_text": Family(defaults.QWEN2_VL, **_QWEN2_VL),
        "qwen3_vl_text": Family(defaults.QWEN3_VL, qk_norm="head", mrope=True, default_theta=500_000.0),
        "glm4v_text": Family(
            defaults.GLM4V,
            names=RMS_NORM["glm4"].names,
            norm_place="around",
            qkv_bias=True,
            output_bias=False,
            fused_gate_up=True,
            interleaved_rope=True,
            partial_rotary=True,
            fixed_head_dim=True,
            mrope=True,
        ),
        "qwen3_vl_moe_text": Family(
            defaults.QWEN3_VL_MOE,
            qk_norm="head",
            mrope=True,
            default_theta=500_000.0,
            experts=ExpertRules(**QWEN_EXPERTS, may_be_transposed=True),
        ),
        "glm4v_moe_text": Family(
            defaults.GLM4V_MOE,
            output_bias=False,
            partial_rotary=True,
            rotary_fraction=0.5,
            mrope=True,
            buffers=r"^model\.layers\.(46|92)\.",  # layers after the last that predict further tokens
            experts=MIXTURES["glm4_moe"].experts,
        ),
    }
)
