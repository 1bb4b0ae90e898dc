"""The decoder families: one row each, by config.json's model_type. Adding a family is adding a row to a kind's table.

Each row is checked against transformers 5.23: logits, and the defaults, which are in defaults.json.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ingot.pipeline.checkpoint.config.experts import ExpertRules
from ingot.pipeline.checkpoint.config.latent import LatentRules
from ingot.pipeline.checkpoint.families.family import NEXTN, USE_BIAS, Family, by_model_type
from ingot.pipeline.checkpoint.families.hybrids import HYBRIDS
from ingot.pipeline.checkpoint.families.layer_norm import LAYER_NORM
from ingot.pipeline.checkpoint.families.mixtures import MIXTURES, QWEN_EXPERTS, SIGMOID_GROUPS, SOFTMAX_GROUPS
from ingot.pipeline.checkpoint.families.rms_norm import RMS_NORM, UNEQUAL

_BY_KEY = LatentRules(interleaved="rope_interleave")

# Families with latent attention, with mixtures of experts and without.
LATENT: Mapping[str, Family] = by_model_type(
    Family(
        "deepseek_v2",
        heads_divide_width=True,
        only={"norm_topk_prob": (False, "weights of experts that are divided by their sum are not supported")},
        mlp_bias="mlp_bias",
        latent=LatentRules(interleaved=True),
        experts=ExpertRules(
            **SOFTMAX_GROUPS | {"other_keys": {"n_routed_experts": "num_experts"}},
            normalise=False,
            method_key="topk_method",
        ),
    ),
    Family(
        "deepseek_v3",
        more_defaults={"num_nextn_predict_layers": 1},
        mtp=NEXTN,
        latent=_BY_KEY,
        experts=ExpertRules(**SIGMOID_GROUPS),
    ),
    Family(
        "glm4_moe_lite",
        more_defaults={"num_nextn_predict_layers": None},
        mtp=NEXTN,
        latent=_BY_KEY,
        experts=ExpertRules(**SIGMOID_GROUPS | {"sparse": "listed"}),
    ),
    Family(
        "mistral4",
        latent=LatentRules(interleaved="rope_interleave", of_whole_head=True),
        query_scale=True,
        experts=ExpertRules(**SOFTMAX_GROUPS, normalise="norm_topk_prob", least_sum=1e-20),
    ),
    Family("minicpm3", mlp_bias="mlp_bias", heads_divide_width=True, latent=LatentRules(interleaved=False)),
    Family("youtu", latent=_BY_KEY),
)


_QWEN2_VL: dict[str, Any] = {
    "qkv_bias": True,
    "output_bias": False,
    "windows": "from-max-window-layers",
    "fixed_head_dim": True,
    "mrope": True,
}

_GLM4V: dict[str, Any] = {
    "names": RMS_NORM["glm4"].names,
    "norm_place": "around",
    "qkv_bias": True,
    "output_bias": False,
    "fused_gate_up": True,
    "interleaved_rope": True,
    "partial_rotary": True,
    "mrope": True,
}

# Text models that multimodal models have within them, where no text model of the same kind is published alone.
TOWERS: Mapping[str, Family] = by_model_type(
    Family("qwen2_vl_text", **_QWEN2_VL),
    Family("qwen2_5_vl_text", **_QWEN2_VL),
    Family("qwen2_5_omni_text", **_QWEN2_VL),
    Family("qwen3_vl_text", qk_norm="head", mrope=True),
    Family("paddleocr_vl_text", **USE_BIAS, mrope=True),
    Family("glm4v_text", **_GLM4V, fixed_head_dim=True),
    Family("glm_ocr_text", **_GLM4V | {"qkv_bias": False}),
    *(
        Family(name, qk_norm="head", mrope=True, experts=ExpertRules(**QWEN_EXPERTS, may_be_transposed=True))
        for name in ("qwen3_vl_moe_text", "qwen3_omni_moe_text")
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
    return _listed("refused.json").get(model_type)


def text_model_of(model_type: str) -> str | None:
    """Return the family that a model type of transformers has as its text_config; None for one without."""
    return _listed("around.json").get(model_type)


def _listed(name: str) -> dict[str, str]:
    listed: dict[str, str] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return listed
