"""Dense families with LayerNorm: parallel blocks, plain feed-forwards, biases, learned positions."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ingot.pipeline.checkpoint.families import layer_norm_defaults as defaults
from ingot.pipeline.checkpoint.families.family import ALL_BIASES, NO_BIAS, USE_BIAS, Family

_GPT_NAMES = {
    "model": "transformer",
    "layers": "h",
    "embed_tokens": "wte",
    "self_attn": "attn",
    "input_layernorm": "ln_1",
    "norm": "ln_f",
}
_GPT_BUFFERS = r"\.attn\.(bias|masked_bias)$"
_NO_CROSS_ATTENTION = {"add_cross_attention": (False, "cross attention is not supported")}
_GPT2: dict[str, Any] = {
    **ALL_BIASES,
    "keys": defaults.GPT2_KEYS,
    "names": _GPT_NAMES
    | {
        "embed_positions": "wpe",
        "qkv_proj": "c_attn",
        "o_proj": "c_proj",
        "up_proj": "c_fc",
        "down_proj": "c_proj",
        "post_attention_layernorm": "ln_2",
    },
    "buffers": _GPT_BUFFERS,
    "norm": "layer-with-bias",
    "epsilon_key": "layer_norm_epsilon",
    "fused_qkv": True,
    "gated": False,
    "rotated": "none",
    "positions": "learned",
    "scale_key": "scale_attn_weights",
    "fixed_head_dim": True,
}

LAYER_NORM: Mapping[str, Family] = MappingProxyType(
    {
        "cohere": Family(
            defaults.COHERE,
            only={"use_qk_norm": (False, "norms of queries and keys with a weight of each head are not supported")},
            norm="layer",
            epsilon_key="layer_norm_eps",
            parallel=True,
            fixed_head_dim=True,
            interleaved_rope=True,
            default_theta=500_000.0,
        ),
        "cohere2": Family(
            defaults.COHERE2,
            norm="layer",
            epsilon_key="layer_norm_eps",
            parallel=True,
            windows="pattern",
            rotated="sliding",
            fixed_head_dim=True,
            interleaved_rope=True,
        ),
        "jais2": Family(
            defaults.JAIS2, norm="layer-with-bias", epsilon_key="layer_norm_eps", mlp_bias="mlp_bias", gated=False
        ),
        "nemotron": Family(
            defaults.NEMOTRON,
            norm="layer-with-bias",
            epsilon_key="norm_eps",
            norm_adds_one=True,
            mlp_bias="mlp_bias",
            gated=False,
            partial_rotary=True,
            rotary_fraction=0.5,
        ),
        "starcoder2": Family(
            defaults.STARCODER2,
            **USE_BIAS,
            names={"up_proj": "c_fc", "down_proj": "c_proj"},
            norm="layer-with-bias",
            epsilon_key="norm_epsilon",
            gated=False,
            windows="all",
        ),
        "stablelm": Family(
            defaults.STABLELM,
            only={"qk_layernorm": (False, "norms of queries and keys with a weight of each head are not supported")},
            norm="layer-with-bias",
            epsilon_key="layer_norm_eps",
            parallel="use_parallel_residual",
            qkv_bias="use_qkv_bias",
            output_bias=False,
            fixed_head_dim=True,
            partial_rotary=True,
            rotary_fraction=0.25,
        ),
        "phi": Family(
            defaults.PHI,
            **ALL_BIASES,
            names={
                "o_proj": "dense",
                "up_proj": "fc1",
                "down_proj": "fc2",
                "norm": "final_layernorm",
                "q_norm": "q_layernorm",
                "k_norm": "k_layernorm",
            },
            norm="layer-with-bias",
            epsilon_key="layer_norm_eps",
            parallel=True,
            qk_norm="head",
            qk_norm_key="qk_layernorm",
            head_bias=True,
            gated=False,
            partial_rotary=True,
            rotary_fraction=0.5,
        ),
        "gpt2": Family(
            defaults.GPT2,
            **_GPT2,
            only={
                "scale_attn_by_inverse_layer_idx": (
                    False,
                    "attention scales that differ between layers are not supported",
                ),
                **_NO_CROSS_ATTENTION,
            },
            transposed=True,
        ),
        "gpt_bigcode": Family(
            defaults.GPT_BIGCODE,
            **_GPT2,
            only={
                "multi_query": (True, "queries, keys and values fused head by head are not supported"),
                **_NO_CROSS_ATTENTION,
            },
        ),
        "gptj": Family(
            defaults.GPTJ,
            **NO_BIAS,
            keys=defaults.GPT2_KEYS,
            names=_GPT_NAMES | {"o_proj": "out_proj", "up_proj": "fc_in", "down_proj": "fc_out"},
            buffers=_GPT_BUFFERS,
            norm="layer-with-bias",
            epsilon_key="layer_norm_epsilon",
            parallel=True,
            mlp_bias=True,
            head_bias=True,
            gated=False,
            fixed_head_dim=True,
            interleaved_rope=True,
            partial_rotary=True,
        ),
        "gpt_neox": Family(
            defaults.GPT_NEOX,
            keys={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
            names={
                "model": "gpt_neox",
                "embed_tokens": "embed_in",
                "lm_head": "embed_out",
                "self_attn": "attention",
                "qkv_proj": "query_key_value",
                "o_proj": "dense",
                "up_proj": "dense_h_to_4h",
                "down_proj": "dense_4h_to_h",
                "norm": "final_layer_norm",
            },
            buffers=r"\.attention\.(bias|masked_bias)$",
            norm="layer-with-bias",
            epsilon_key="layer_norm_eps",
            parallel="use_parallel_residual",
            parallel_norms=2,
            mlp_bias=True,
            fused_qkv=True,
            gated=False,
            heads_interleaved=True,
            fixed_head_dim=True,
            partial_rotary=True,
            rotary_fraction=0.25,
        ),
        "opt": Family(
            defaults.OPT,
            keys={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
            only={
                "do_layer_norm_before": (True, "norms of the residual stream itself are not supported"),
                "_remove_final_layer_norm": (False, "a decoder without a last norm is not supported"),
                "layer_norm_elementwise_affine": (True, "norms without weights are not supported"),
            },
            names={
                "model": "model.decoder",
                "o_proj": "out_proj",
                "mlp": "",
                "up_proj": "fc1",
                "down_proj": "fc2",
                "input_layernorm": "self_attn_layer_norm",
                "post_attention_layernorm": "final_layer_norm",
                "norm": "final_layer_norm",
            },
            norm="layer-with-bias",
            epsilon_key="",
            qkv_bias="enable_bias",
            output_bias="enable_bias",
            mlp_bias="enable_bias",
            gated=False,
            rotated="none",
            positions="learned",
            position_offset=2,
            fixed_head_dim=True,
        ),
    }
)
