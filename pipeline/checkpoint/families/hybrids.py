"""Families with recurrent layers in place of attention, or next to it."""

from collections.abc import Mapping
from typing import Any

from ingot.pipeline.checkpoint.config.experts import ExpertRules
from ingot.pipeline.checkpoint.config.recurrent import RecurrentRules
from ingot.pipeline.checkpoint.families.family import NO_BIAS, Family, MtpRules, by_model_type
from ingot.pipeline.checkpoint.families.mixtures import (
    GATE_CORRECTION,
    GRANITE_EXPERTS,
    QWEN_EXPERTS,
    SHARED_MLP,
    SIGMOID_GROUPS,
)

_SILU: dict[str, Any] = {"only": {"hidden_act": ("silu", "other activations of recurrent layers are not supported")}}
_QWEN: dict[str, Any] = {
    "buffers": r"^mtp\.",
    "mtp": MtpRules(
        "mtp.layers.0",
        {
            "embedding_norm": "mtp.pre_fc_norm_embedding",
            "hidden_norm": "mtp.pre_fc_norm_hidden",
            "projection": "mtp.fc",
            "norm": "mtp.norm",
        },
    ),
    "norm_adds_one": True,
    "qk_norm": "head",
    "partial_rotary": True,
    "rotary_fraction": 0.25,
    "attention_gate": True,
    **_SILU,
}
_DELTA_RULE: dict[str, Any] = {"kind": "delta-rule", "layers": "interval", "keys": {"width": "linear_conv_kernel_dim"}}
_GATE_NORM = {"gate_norm": "norm"}
_SHARED: dict[str, Any] = {"shared": "shared_expert_intermediate_size", "shared_gate": True}
_LFM2: dict[str, Any] = {
    **NO_BIAS,
    "epsilon_key": "norm_eps",
    "qk_norm": "head",
}
_ACTIVATION = {"hidden_act": ("silu", "this model_type has SiLU always")}
_OLDER_TIE = {"tie_word_embeddings": "tie_embedding"}
_LFM2_NAMES = {
    "linear_attn": "conv",
    "conv1d": "conv",
    "o_proj": "out_proj",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "norm": "embedding_norm",
}
_MAMBA_KEYS = {
    "heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "state": "mamba_d_state",
    "groups": "mamba_n_groups",
    "width": "mamba_d_conv",
    "expand": "mamba_expand",
    "conv_bias": "mamba_conv_bias",
    "bias": "mamba_proj_bias",
    "out_bias": "mamba_proj_bias",
    "epsilon": "rms_norm_eps",
}
_MAMBA_NAMES = {
    "linear_attn": "mamba",
    "gate_norm": "norm",
    "mlp": "feed_forward",
    "post_attention_layernorm": "pre_ff_layernorm",
}

HYBRIDS: Mapping[str, Family] = by_model_type(
    Family(
        "qwen3_next",
        **_QWEN,
        names=_GATE_NORM,
        experts=ExpertRules(**QWEN_EXPERTS, normalise="norm_topk_prob", **_SHARED),
        recurrent=RecurrentRules(**_DELTA_RULE, interleaved=True),
    ),
    Family("qwen3_5_text", **_QWEN, names=_GATE_NORM, mrope=True, recurrent=RecurrentRules(**_DELTA_RULE)),
    Family(
        "qwen3_5_moe_text",
        **_QWEN,
        names=_GATE_NORM,
        mrope=True,
        experts=ExpertRules(**{**QWEN_EXPERTS, "sparse": "all", "optional": False}, **_SHARED),
        recurrent=RecurrentRules(**_DELTA_RULE),
    ),
    Family(
        "lfm2",
        more_defaults={"hidden_act": "silu"},
        **_LFM2,
        older_keys=_OLDER_TIE | {"intermediate_size": "block_ff_dim"},
        only=_ACTIVATION,
        names=_LFM2_NAMES,
        recurrent=RecurrentRules("convolution", "not-full", {"width": "conv_L_cache"}),
    ),
    Family(
        "lfm2_moe",
        more_defaults={"hidden_act": "silu"},
        **_LFM2,
        keys={"first_k_dense_replace": "num_dense_layers"},
        older_keys=_OLDER_TIE,
        only={**_ACTIVATION, "use_expert_bias": (True, "routers without a bias for the choice are not supported")},
        names=_LFM2_NAMES,
        experts=ExpertRules(
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            other_keys={"num_experts": "num_local_experts"},
            sparse="after-dense",
            score="sigmoid",
            normalise="norm_topk_prob",
            least_sum=1e-6,  # transformers adds it to the sum, which is 0.5e-6 of the weights
            correction="vector",
            scaled=True,
            names=({"correction_bias": "expert_bias"},),
        ),
        recurrent=RecurrentRules("convolution", "missing", {"width": "conv_L_cache"}),
    ),
    Family(
        "granitemoehybrid",
        **_SILU,
        names={"linear_attn": "mamba", "gate_norm": "norm"},
        fused_gate_up=True,
        rotated="typed",
        scale_key="attention_multiplier",
        experts=ExpertRules(
            "num_local_experts",
            "num_experts_per_tok",
            "intermediate_size",
            shared="shared_intermediate_size",
            without={"mlp": "shared_mlp", **SHARED_MLP},
            names=(
                {
                    **GRANITE_EXPERTS,
                    "fused_gate_up": "input_linear.weight",
                    "fused_down": "output_linear.weight",
                    "router": "router.layer",
                },
                {**GRANITE_EXPERTS, "router": "router"},
            ),
        ),
        recurrent=RecurrentRules("scan", "all", _MAMBA_KEYS, gate_norm="after-gate"),
    ),
    Family(
        "bamba",
        **_SILU,
        names={**_MAMBA_NAMES, "norm": "final_layernorm"},
        mlp_bias="mlp_bias",
        partial_rotary=True,
        rotary_fraction=0.5,
        recurrent=RecurrentRules("scan", "indices", _MAMBA_KEYS, gate_norm="after-gate"),
    ),
    Family(
        "falcon_h1",
        **_SILU,
        keys={"logit_scale": "lm_head_multiplier"},
        names={**_MAMBA_NAMES, "norm": "final_layernorm"},
        mlp_bias="mlp_bias",
        branch_multipliers=True,
        recurrent=RecurrentRules(
            "scan",
            "both",
            {**_MAMBA_KEYS, "inner": "mamba_d_ssm", "out_bias": "projectors_bias"},
            gate_norm=("mamba_rms_norm", "mamba_norm_before_gate"),
            multiplied=True,
        ),
    ),
    Family(
        "nemotron_h",
        **NO_BIAS,
        keys={"hidden_act": "mlp_hidden_act"},
        older_keys={
            "n_groups": "mamba_n_groups",
            "conv_kernel": "mamba_d_conv",
            "use_conv_bias": "mamba_conv_bias",
            "time_step_min": "mamba_dt_min",
        },
        only={
            "mamba_hidden_act": ("silu", "other activations of recurrent layers are not supported"),
            "sliding_window": (None, "windows in a hybrid are not supported"),
        },
        names={
            "model": "backbone",
            "embed_tokens": "embeddings",
            "norm": "norm_f",
            "input_layernorm": "norm",
            "post_attention_layernorm": "norm",
            "gate_norm": "norm",
            "self_attn": "mixer",
            "linear_attn": "mixer",
            "mlp": "mixer",
        },
        epsilon_key="layer_norm_epsilon",
        mlp_bias="mlp_bias",
        gated=False,
        rotated="none",
        buffers=r"^mtp\.",
        experts=ExpertRules(
            **SIGMOID_GROUPS
            | {
                "sparse": "all",
                "shared": "moe_shared_expert_intermediate_size",
                "shared_count": False,
                "latent": "moe_latent_size",
                "names": (
                    {
                        "fused_gate_up": "experts.up_proj",
                        "latent_in": "fc1_latent_proj",
                        "latent_out": "fc2_latent_proj",
                        **GATE_CORRECTION,
                    },
                ),
            }
        ),
        recurrent=RecurrentRules(
            "scan",
            "pattern",
            {
                "heads": "mamba_num_heads",
                "head_dim": "mamba_head_dim",
                "state": "ssm_state_size",
                "groups": "n_groups",
                "width": "conv_kernel",
                "conv_bias": "use_conv_bias",
                "bias": "use_bias",
                "out_bias": "use_bias",
                "epsilon": "layer_norm_epsilon",
            },
            gate_norm="after-gate",
            least_time="time_step_min",
        ),
    ),
    Family(
        "olmo_hybrid",
        **_SILU,
        names={
            "gate_norm": "o_norm",
            "in_proj_z": "g_proj",
            "in_proj_b": "b_proj",
            "in_proj_a": "a_proj",
            "out_proj": "o_proj",
            "input_layernorm": "attention_layer_norm",
            "pre_feedforward_layernorm": "feedforward_layer_norm",
        },
        norm_place="after",
        qk_norm="row",
        rotated="given",
        recurrent=RecurrentRules(
            "delta-rule",
            "fourth",
            {"width": "linear_conv_kernel_dim"},
            separate=True,
            other_names={
                "input_layernorm": "input_layernorm",
                "pre_feedforward_layernorm": "post_attention_layernorm",
            },
            saved_names={"post_attention_layernorm": "feedforward_layer_norm"},
            negative="linear_allow_neg_eigval",
            norm_place="before",
            gate_epsilon=1e-5,
        ),
    ),
)
