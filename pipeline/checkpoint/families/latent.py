"""Families with latent attention, with mixtures of experts and without."""

from collections.abc import Mapping

from ingot.pipeline.checkpoint.config.experts import ExpertRules
from ingot.pipeline.checkpoint.config.latent import LatentRules
from ingot.pipeline.checkpoint.families.family import Family, by_model_type
from ingot.pipeline.checkpoint.families.mixtures import SIGMOID_GROUPS, SOFTMAX_GROUPS

_BY_KEY = LatentRules(interleaved="rope_interleave")

LATENT: Mapping[str, Family] = by_model_type(
    Family(
        "deepseek_v2",
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
        extra_layers_key="num_nextn_predict_layers",
        latent=_BY_KEY,
        experts=ExpertRules(**SIGMOID_GROUPS),
    ),
    Family(
        "glm4_moe_lite",
        more_defaults={"num_nextn_predict_layers": None},
        extra_layers_key="num_nextn_predict_layers",
        latent=_BY_KEY,
        experts=ExpertRules(**SIGMOID_GROUPS | {"sparse": "listed"}),
    ),
    Family(
        "mistral4",
        latent=LatentRules(interleaved="rope_interleave", of_whole_head=True),
        query_scale=True,
        experts=ExpertRules(**SOFTMAX_GROUPS, normalise="norm_topk_prob", least_sum=1e-20),
    ),
    Family("minicpm3", mlp_bias="mlp_bias", latent=LatentRules(interleaved=False)),
    Family("youtu", latent=_BY_KEY),
)
