"""Dense families with RMS norms: Llama and those that differ from it in fields of the table."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ingot.pipeline.checkpoint.families import rms_norm_defaults as defaults
from ingot.pipeline.checkpoint.families.family import NO_BIAS, USE_BIAS, Family

_GEMMA: dict[str, Any] = {
    "norm_place": "around",
    "norm_adds_one": True,
    "scale_key": "query_pre_attn_scalar",
    "scaled_embedding": True,
}

RMS_NORM: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(defaults.LLAMA, mlp_bias="mlp_bias"),
        "mistral": Family(defaults.MISTRAL, **NO_BIAS, windows="all"),
        "qwen2": Family(defaults.QWEN2, qkv_bias=True, output_bias=False, windows="from-max-window-layers"),
        "qwen3": Family(defaults.QWEN3, qk_norm="head", windows="from-max-window-layers"),
        "gemma": Family(
            defaults.GEMMA1, norm_adds_one=True, scaled_embedding=True, other_activations={"gelu": "gelu_pytorch_tanh"}
        ),
        "vaultgemma": Family(
            defaults.VAULT_GEMMA,
            names={"post_attention_layernorm": "pre_feedforward_layernorm"},
            norm_adds_one=True,
            scale_key="query_pre_attn_scalar",
            scaled_embedding=True,
            windows="alternating",
            attention_softcap=True,
        ),
        "gemma2": Family(defaults.GEMMA2, **_GEMMA, windows="alternating", attention_softcap=True),
        "gemma3_text": Family(
            defaults.GEMMA3,
            **_GEMMA,
            qk_norm="head",
            windows="pattern",
            rope_by_layer_type=True,
            local_theta_key="rope_local_base_freq",
            default_theta=1_000_000.0,
        ),
        "phi3": Family(
            defaults.PHI3,
            **NO_BIAS,
            fused_qkv=True,
            fused_gate_up=True,
            windows="all",
            partial_rotary=True,
            longrope_aliases=("su", "yarn"),
        ),
        "cwm": Family(
            defaults.CWM,
            **NO_BIAS,
            mlp_bias="mlp_bias",
            windows="pattern",
            full_every=4,
            full_first=True,
            default_rope=defaults.CWM_ROPE,
            default_theta=1_000_000.0,
        ),
        "ministral": Family(defaults.MINISTRAL, **NO_BIAS, windows="listed-or-all"),
        "smollm3": Family(
            defaults.SMOLLM3, mlp_bias="mlp_bias", windows="unrotated", rotated="listed", default_theta=2_000_000.0
        ),
        "olmo2": Family(defaults.OLMO2, norm_place="after", qk_norm="row"),
        "granite": Family(defaults.GRANITE, mlp_bias="mlp_bias", scale_key="attention_multiplier"),
        "hyperclovax": Family(
            defaults.HYPERCLOVAX,
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
        "iquestcoder": Family(
            defaults.IQUEST_CODER,
            only={"clip_qkv": (None, "clipped queries, keys and values are not supported")},
            mlp_bias="mlp_bias",
        ),
        "granite_swa": Family(
            defaults.GRANITE_SWA,
            mlp_bias="mlp_bias",
            windows="pattern",
            full_every=4,
            full_first=True,
            rotated="thetas",
            scale_key="attention_multiplier",
            sinks=True,
        ),
        "ministral3": Family(
            defaults.MINISTRAL3,
            **NO_BIAS,
            windows="all",
            query_scale=True,
            default_rope=defaults.MINISTRAL3_ROPE,
            default_theta=10_000.0,
        ),
        "olmo3": Family(
            defaults.OLMO3,
            norm_place="after",
            qk_norm="row",
            windows="pattern",
            full_every=4,
            rope_by_layer_type=True,
            local_theta=500_000.0,
            default_theta=500_000.0,
        ),
        "seed_oss": Family(defaults.SEED_OSS, output_bias="attention_out_bias", mlp_bias="mlp_bias"),
        "apertus": Family(
            defaults.APERTUS,
            names={"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"},
            qk_norm="head",
            gated=False,
            default_rope=defaults.APERTUS_ROPE,
            default_theta=12_000_000.0,
        ),
        "exaone4": Family(
            defaults.EXAONE4,
            **NO_BIAS,
            norm_place="after",
            qk_norm="head",
            windows="pattern-or-none",
            rotated="sliding-or-all",
        ),
        "arcee": Family(defaults.ARCEE, mlp_bias="mlp_bias", gated=False),
        "hunyuan_v1_dense": Family(
            defaults.HUNYUAN,
            names={"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
            qk_norm="head",
            qk_norm_after_rope=True,
            ntk_alpha=True,
        ),
        "glm4": Family(
            defaults.GLM4,
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
        "glm": Family(
            defaults.GLM4,
            output_bias=False,
            fused_gate_up=True,
            interleaved_rope=True,
            partial_rotary=True,
            rotary_fraction=0.5,
        ),
        "ernie4_5": Family(defaults.ERNIE45, **USE_BIAS, interleaved_rope=True, default_theta=500_000.0),
        "helium": Family(
            defaults.HELIUM, output_bias=False, mlp_bias="mlp_bias", interleaved_rope=True, default_theta=100_000.0
        ),
    }
)
