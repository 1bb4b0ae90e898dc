"""Dense families with RMS norms: Llama and those that differ from it in fields of the table."""

from collections.abc import Mapping
from typing import Any

from ingot.pipeline.checkpoint.config.experts import ExpertRules
from ingot.pipeline.checkpoint.families.family import NO_BIAS, USE_BIAS, Family, by_model_type

_GEMMA: dict[str, Any] = {
    "norm_place": "around",
    "norm_adds_one": True,
    "scale_key": "query_pre_attn_scalar",
    "scaled_embedding": True,
}
_UNEQUAL: dict[str, Any] = {
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
    **_UNEQUAL,
    "full_every": 6,
    "last_is_full": True,
    "partial_rotary": True,
    "more_defaults": {"global_head_dim": 512},
    "global_heads": True,
    "layer_scale": True,
}

RMS_NORM: Mapping[str, Family] = by_model_type(
    Family("llama", mlp_bias="mlp_bias"),
    Family("mistral", **NO_BIAS, windows="all"),
    Family("qwen2", qkv_bias=True, output_bias=False, windows="from-max-window-layers"),
    Family("qwen3", qk_norm="head", windows="from-max-window-layers"),
    Family("gemma", norm_adds_one=True, scaled_embedding=True, other_activations={"gelu": "gelu_pytorch_tanh"}),
    Family(
        "vaultgemma",
        names={"post_attention_layernorm": "pre_feedforward_layernorm"},
        norm_adds_one=True,
        scale_key="query_pre_attn_scalar",
        scaled_embedding=True,
        windows="alternating",
        attention_softcap=True,
    ),
    Family("gemma2", **_GEMMA, windows="alternating", attention_softcap=True),
    Family(
        "gemma3_text",
        more_defaults={"sliding_window_pattern": 6},
        **_GEMMA,
        qk_norm="head",
        windows="pattern",
        rope_by_layer_type=True,
        local_theta_key="rope_local_base_freq",
    ),
    Family(
        "phi3",
        **NO_BIAS,
        fused_qkv=True,
        fused_gate_up=True,
        windows="all",
        partial_rotary=True,
        longrope_aliases=("su", "yarn"),
    ),
    Family(
        "cwm",
        **NO_BIAS,
        mlp_bias="mlp_bias",
        windows="pattern",
        full_every=4,
        full_first=True,
    ),
    Family("ministral", **NO_BIAS, windows="listed-or-all"),
    Family("smollm3", mlp_bias="mlp_bias", windows="unrotated", rotated="listed"),
    Family("olmo2", norm_place="after", qk_norm="row"),
    Family("granite", mlp_bias="mlp_bias", scale_key="attention_multiplier"),
    Family(
        "hyperclovax",
        keys={"logit_scale": "logits_scaling"},
        only={"use_post_norm": (True, "layers without norms of their results are not supported")},
        names={
            "post_attention_layernorm": "post_norm1",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_norm2",
        },
        norm_place="around",
        mlp_bias="mlp_bias",
        scale_key="attention_multiplier",
    ),
    Family(
        "iquestcoder",
        only={"clip_qkv": (None, "clipped queries, keys and values are not supported")},
        mlp_bias="mlp_bias",
    ),
    Family(
        "granite_swa",
        mlp_bias="mlp_bias",
        windows="pattern",
        full_every=4,
        full_first=True,
        rotated="thetas",
        scale_key="attention_multiplier",
        sinks=True,
    ),
    Family(
        "ministral3",
        **NO_BIAS,
        windows="all",
        query_scale=True,
    ),
    Family(
        "olmo3",
        norm_place="after",
        qk_norm="row",
        windows="pattern",
        full_every=4,
        rope_by_layer_type=True,
    ),
    Family("seed_oss", output_bias="attention_out_bias", mlp_bias="mlp_bias"),
    Family(
        "apertus",
        names={"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"},
        qk_norm="head",
        gated=False,
    ),
    Family(
        "exaone4",
        **NO_BIAS,
        norm_place="after",
        qk_norm="head",
        windows="pattern-or-none",
        rotated="sliding-or-all",
    ),
    Family("arcee", mlp_bias="mlp_bias", gated=False),
    Family(
        "hunyuan_v1_dense",
        names={"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
        qk_norm="head",
        qk_norm_after_rope=True,
        ntk_alpha=True,
    ),
    Family(
        "glm4",
        names={
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
        norm_place="around",
        output_bias=False,
        fused_gate_up=True,
        interleaved_rope=True,
        partial_rotary=True,
        rotary_fraction=0.5,
    ),
    Family(
        "glm",
        output_bias=False,
        fused_gate_up=True,
        interleaved_rope=True,
        partial_rotary=True,
        rotary_fraction=0.5,
    ),
    Family("ernie4_5", **USE_BIAS, interleaved_rope=True),
    Family("helium", output_bias=False, mlp_bias="mlp_bias", interleaved_rope=True),
)

# Families whose layers have different shapes, share keys and values, or have inputs of their own.
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
        **_UNEQUAL,
        full_every=5,
        local_theta_key="rope_local_base_freq",
        altup=True,
    ),
)
