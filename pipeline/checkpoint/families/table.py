"""The decoder families: one row each, by config.json's model_type. Adding a family is adding a row to a kind's table.

Each row is checked against transformers 5.23: logits, and the defaults, which are in defaults.json.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ingot.pipeline.checkpoint.config.experts import ExpertRules
from ingot.pipeline.checkpoint.families.family import Family, by_model_type
from ingot.pipeline.checkpoint.families.hybrids import HYBRIDS
from ingot.pipeline.checkpoint.families.latent import LATENT
from ingot.pipeline.checkpoint.families.layer_norm import LAYER_NORM
from ingot.pipeline.checkpoint.families.mixtures import MIXTURES, QWEN_EXPERTS
from ingot.pipeline.checkpoint.families.rms_norm import RMS_NORM, UNEQUAL

_QWEN2_VL: dict[str, Any] = {
    "qkv_bias": True,
    "output_bias": False,
    "windows": "from-max-window-layers",
    "fixed_head_dim": True,
    "mrope": True,
}

# Text models that multimodal models have within them, where no text model of the same kind is published alone.
TOWERS: Mapping[str, Family] = by_model_type(
    Family("qwen2_vl_text", **_QWEN2_VL),
    Family("qwen2_5_vl_text", **_QWEN2_VL),
    Family("qwen3_vl_text", qk_norm="head", mrope=True),
    Family(
        "glm4v_text",
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
    Family(
        "qwen3_vl_moe_text",
        qk_norm="head",
        mrope=True,
        experts=ExpertRules(**QWEN_EXPERTS, may_be_transposed=True),
    ),
    Family(
        "glm4v_moe_text",
        output_bias=False,
        partial_rotary=True,
        rotary_fraction=0.5,
        mrope=True,
        buffers=r"^model\.layers\.(46|92)\.",  # layers after the last that predict further tokens
        experts=MIXTURES["glm4_moe"].experts,
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {**RMS_NORM, **LAYER_NORM, **MIXTURES, **LATENT, **TOWERS, **HYBRIDS, **UNEQUAL}
)


def missing_feature(model_type: str) -> str | None:
    """Return the feature that keeps a model type from being imported; None for one that transformers lacks, too."""
    features: dict[str, str] = json.loads(Path(__file__).with_name("refused.json").read_text(encoding="utf-8"))
    return features.get(model_type)
