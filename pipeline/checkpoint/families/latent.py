"""Families with latent attention, with mixtures of experts and without."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ingot.pipeline.checkpoint.experts_config import ExpertRules
from ingot.pipeline.checkpoint.families import latent_defaults as defaults
from ingot.pipeline.checkpoint.families.family import Family
from ingot.pipeline.checkpoint.latent_config import LatentRules

_BY_KEY = LatentRules(interleaved="rope_interleave")
_SHARED: dict[str, Any] = {
    "count": "n_routed_experts",
    "chosen": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "other_keys": {"n_routed_experts": "num_local_experts"},
    "sparse": "after-dense",
    "groups": True,
    "shared": "n_shared_experts",
    "shared_count": True,
    "names": ({"shared_expert": "shared_experts"},),
}
_SIGMOID: dict[str, Any] = {
    **_SHARED,
    "score": "sigmoid",
    "normalise": "norm_topk_prob",
    "least_sum": 1e-20,
    "correction": "vector",
    "names": ({"shared_expert": "shared_experts", "correction_bias": "gate.e_score_correction_bias"},),
}

LATENT: Mapping[str, Family] = MappingProxyType(
    {
        "deepseek_v2": Family(
            defaults.DEEPSEEK_V2,
            only={"norm_topk_prob": (False, "weights of experts that are divided by their sum are not supported")},
            mlp_bias="mlp_bias",
            latent=LatentRules(interleaved=True),
            experts=ExpertRules(
                **_SHARED | {"other_keys": {"n_routed_experts": "num_experts"}},
                normalise=False,
                method_key="topk_method",
            ),
        ),
        "deepseek_v3": Family(
            defaults.DEEPSEEK_V3,
            extra_layers_key="num_nextn_predict_layers",
            latent=_BY_KEY,
            experts=ExpertRules(**_SIGMOID),
        ),
        "glm4_moe_lite": Family(
            defaults.GLM4_MOE_LITE,
            extra_layers_key="num_nextn_predict_layers",
            latent=_BY_KEY,
            experts=ExpertRules(**_SIGMOID | {"sparse": "listed"}),
        ),
        "mistral4": Family(
            defaults.MISTRAL4,
            latent=LatentRules(interleaved="rope_interleave", of_whole_head=True),
            query_scale=True,
            default_rope=defaults.MISTRAL4_ROPE,
            experts=ExpertRules(**_SHARED, normalise="norm_topk_prob", least_sum=1e-20),
        ),
        "minicpm3": Family(defaults.MINICPM3, mlp_bias="mlp_bias", latent=LatentRules(interleaved=False)),
        "youtu": Family(defaults.YOUTU, latent=_BY_KEY),
    }
)
