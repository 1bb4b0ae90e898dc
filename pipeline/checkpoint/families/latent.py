"""Families with latent attention, with mixtures of experts and without."""

from collections.abc import Mapping
from types import MappingProxyType

from ingot.pipeline.checkpoint.experts_config import ExpertRules
from ingot.pipeline.checkpoint.families import latent_defaults as defaults
from ingot.pipeline.checkpoint.families.family import Family
from ingot.pipeline.checkpoint.families.mixtures import SIGMOID_GROUPS, SOFTMAX_GROUPS
from ingot.pipeline.checkpoint.latent_config import LatentRules

_BY_KEY = LatentRules(interleaved="rope_interleave")

LATENT: Mapping[str, Family] = MappingProxyType(
    {
        "deepseek_v2": Family(
            defaults.DEEPSEEK_V2,
            only={"norm_topk_prob": (False, "weights of experts that are divided by their sum are not supported")},
            mlp_bias="mlp_bias",
            latent=LatentRules(interleaved=True),
            experts=ExpertRules(
                **SOFTMAX_GROUPS | {"other_keys": {"n_routed_experts": "num_experts"}},
                normalise=False,
                method_key="topk_method",
            ),
        ),
        "deepseek_v3": Family(
            defaults.DEEPSEEK_V3,
            extra_layers_key="num_nextn_predict_layers",
            latent=_BY_KEY,
            experts=ExpertRules(**SIGMOID_GROUPS),
        ),
        "glm4_moe_lite": Family(
            defaults.GLM4_MOE_LITE,
            extra_layers_key="num_nextn_predict_layers",
            latent=_BY_KEY,
            experts=ExpertRules(**SIGMOID_GROUPS | {"sparse": "listed"}),
        ),
        "mistral4": Family(
            defaults.MISTRAL4,
            latent=LatentRules(interleaved="rope_interleave", of_whole_head=True),
            query_scale=True,
            default_rope=defaults.MISTRAL4_ROPE,
            experts=ExpertRules(**SOFTMAX_GROUPS, normalise="norm_topk_prob", least_sum=1e-20),
        ),
        "minicpm3": Family(defaults.MINICPM3, mlp_bias="mlp_bias", latent=LatentRules(interleaved=False)),
        "youtu": Family(defaults.YOUTU, latent=_BY_KEY),
    }
)
