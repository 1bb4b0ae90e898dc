"""Families with mixtures of experts."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ingot.pipeline.checkpoint.experts_config import ExpertRules
from ingot.pipeline.checkpoint.families import mixtures_defaults as defaults
from ingot.pipeline.checkpoint.families.family import NO_BIAS, USE_BIAS, Family

QWEN_EXPERTS: dict[str, Any] = {
    "count": "num_experts",
    "chosen": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "other_keys": {"num_experts": "num_local_experts"},
    "sparse": "step",
    "optional": True,
}
_W = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_LINEARS = {"fused_gate_up": "input_linear.weight", "fused_down": "output_linear.weight", "router": "router.layer"}

MIXTURES: Mapping[str, Family] = MappingProxyType(
    {
        "mixtral": Family(
            defaults.MIXTRAL,
            **NO_BIAS,
            windows="all",
            default_theta=1_000_000.0,
            experts=ExpertRules(
                "num_local_experts",
                "num_experts_per_tok",
                "intermediate_size",
                other_keys={"num_local_experts": "num_experts"},
                names=({"mlp": "block_sparse_moe", **_W}, {}),
            ),
        ),
        "gpt_oss": Family(
            defaults.GPT_OSS,
            windows="alternating",
            sinks=True,
            default_rope=defaults.GPT_OSS_ROPE,
            default_theta=150_000.0,
            experts=ExpertRules(
                "num_local_experts",
                "num_experts_per_tok",
                "intermediate_size",
                other_keys={"num_local_experts": "num_experts"},
                biases=True,
                in_turns=True,
                clamp=("swiglu_alpha", "swiglu_limit"),
                names=({"router": "router"},),
            ),
        ),
        "qwen2_moe": Family(
            defaults.QWEN2_MOE,
            qkv_bias="qkv_bias",
            output_bias=False,
            windows="even-before-max-window-layers",
            experts=ExpertRules(
                **QWEN_EXPERTS,
                normalise="norm_topk_prob",
                shared="shared_expert_intermediate_size",
                shared_gate=True,
            ),
        ),
        "qwen3_moe": Family(
            defaults.QWEN3_MOE,
            qk_norm="head",
            windows="all",
            experts=ExpertRules(**QWEN_EXPERTS, normalise="norm_topk_prob"),
        ),
        "olmoe": Family(
            defaults.OLMOE,
            only={"clip_qkv": (None, "clipped queries, keys and values are not supported")},
            qk_norm="row",
            fixed_head_dim=True,
            experts=ExpertRules(
                "num_experts",
                "num_experts_per_tok",
                "intermediate_size",
                other_keys={"num_experts": "num_local_experts"},
                normalise="norm_topk_prob",
            ),
        ),
        "granitemoe": Family(
            defaults.GRANITE_MOE,
            scale_key="attention_multiplier",
            experts=ExpertRules(
                "num_local_experts",
                "num_experts_per_tok",
                "intermediate_size",
                names=(
                    {"mlp": "block_sparse_moe", **_LINEARS},
                    {"mlp": "block_sparse_moe", "router": "router"},
                ),
            ),
        ),
        "glm4_moe": Family(
            defaults.GLM4_MOE,
            qk_norm="head",
            qk_norm_key="use_qk_norm",
            output_bias=False,
            partial_rotary=True,
            rotary_fraction=0.5,
            extra_layers_key="num_nextn_predict_layers",
            experts=ExpertRules(
                "n_routed_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
                other_keys={"n_routed_experts": "num_local_experts"},
                sparse="after-dense",
                score="sigmoid",
                normalise="norm_topk_prob",
                least_sum=1e-20,
                correction="vector",
                groups=True,
                shared="n_shared_experts",
                shared_count=True,
                names=({"shared_expert": "shared_experts", "correction_bias": "gate.e_score_correction_bias"},),
            ),
        ),
        "ernie4_5_moe": Family(
            defaults.ERNIE45_MOE,
            **USE_BIAS,
            head_bias="use_bias",
            buffers=r"^model\.mtp_|^mtp\.",
            interleaved_rope=True,
            default_theta=500_000.0,
            experts=ExpertRules(
                "moe_num_experts",
                "moe_k",
                "moe_intermediate_size",
                other_keys={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
                sparse="range",
                least_sum="moe_norm_min",
                correction="row",
                shared="moe_num_shared_experts",
                shared_count=True,
                names=(
                    {"shared_expert": "shared_experts", "correction_bias": "moe_statics.e_score_correction_bias"},
                    {"shared_expert": "shared_experts", "correction_bias": "gate.moe_statics.e_score_correction_bias"},
                ),
            ),
        ),
        "hunyuan_v1_moe": Family(
            defaults.HUNYUAN_MOE,
            names={"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
            qk_norm="head",
            qk_norm_after_rope=True,
            ntk_alpha=True,
            experts=ExpertRules(
                "num_experts",
                "moe_topk",
                "intermediate_size",
                other_keys={"num_experts": "num_local_experts", "moe_topk": "num_experts_per_tok"},
                shared="intermediate_size",
                names=({"router": "gate.wg", "shared_expert": "shared_mlp"},),
            ),
        ),
    }
)
