"""The dense decoder families: one row each, by config.json's model_type. Adding a family is adding a row.

`defaults` are the values that transformers uses for keys that config.json omits, which differ between families. They
are those of the `configuration_*.py` of transformers 5.23, and a test compares them. A key that is not among a row's
defaults is not read for that family.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

WindowRule = Literal["none", "all", "from-max-window-layers", "alternating", "pattern", "unrotated"]


@dataclass(frozen=True)
class Family:
    """How a family differs from Llama.

    norm_place           before: norms on the input of attention and feed-forward; after: on their output; around: both
    norm_adds_one        the norm multiplies by (1 + weight)
    qk_norm              head: queries and keys are normed per head; row: over all heads at once
    qkv_bias             always, never, or option: as attention_bias sets it. output_bias: the same for o_proj
    fused_projections    one qkv_proj and one gate_up_proj
    windows              layers that attend within sliding_window:
                         none; all; from-max-window-layers: layer max_window_layers and later, if use_sliding_window;
                         alternating: every other layer, starting with the first; pattern: all but every
                         sliding_window_pattern-th; unrotated: layers without rope, if use_sliding_window.
                         layer_types in config.json overrides the rule, except for none and all
    scale_key            key of the attention scale: query_pre_attn_scalar (its inverse square root) or
                         attention_multiplier (as it is); None: the inverse square root of head_dim
    attention_softcap    attn_logit_softcapping is applied (Gemma 3 has the key but does not apply it)
    scaled_embedding     embeddings are multiplied by the square root of hidden_size
    rope_by_layer_type   sliding and full layers have different rope parameters
    partial_rotary       partial_rotary_factor is read
    longrope_aliases     older names of the rope type longrope
    """

    defaults: Mapping[str, Any]
    norm_place: Literal["before", "after", "around"] = "before"
    norm_adds_one: bool = False
    qk_norm: Literal["none", "head", "row"] = "none"
    qkv_bias: Literal["always", "option", "never"] = "option"
    output_bias: Literal["option", "never"] = "option"
    fused_projections: bool = False
    windows: WindowRule = "none"
    scale_key: Literal["query_pre_attn_scalar", "attention_multiplier"] | None = None
    attention_softcap: bool = False
    scaled_embedding: bool = False
    rope_by_layer_type: bool = False
    partial_rotary: bool = False
    longrope_aliases: tuple[str, ...] = ()
    default_theta: float = 10_000.0


_ANY: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SILU = _ANY | {"hidden_act": "silu"}
_LLAMA = _SILU | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
}
_MISTRAL = _SILU | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN2 = _SILU | {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_QWEN3 = _QWEN2 | {"head_dim": 128, "attention_bias": False}
_GEMMA = _ANY | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_GEMMA2 = _GEMMA | {
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "use_bidirectional_attention": None,
}
_GEMMA3 = _GEMMA | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "sliding_window_pattern": 6,
}
_PHI3 = _SILU | {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32000,
    "sliding_window": None,
}
_SMOLLM3 = _SILU | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "use_sliding_window": False,
    "sliding_window": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "layer_types": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
}
_OLMO2 = _SILU | {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 50279,
    "attention_bias": False,
}
_GRANITE = _LLAMA | {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(_LLAMA),
        "mistral": Family(_MISTRAL, qkv_bias="never", output_bias="never", windows="all"),
        "qwen2": Family(_QWEN2, qkv_bias="always", output_bias="never", windows="from-max-window-layers"),
        "qwen3": Family(_QWEN3, qk_norm="head", windows="from-max-window-layers"),
        "gemma2": Family(
            _GEMMA2,
            norm_place="around",
            norm_adds_one=True,
            windows="alternating",
            scale_key="query_pre_attn_scalar",
            attention_softcap=True,
            scaled_embedding=True,
        ),
        "gemma3_text": Family(
            _GEMMA3,
            norm_place="around",
            norm_adds_one=True,
            qk_norm="head",
            windows="pattern",
            scale_key="query_pre_attn_scalar",
            scaled_embedding=True,
            rope_by_layer_type=True,
            default_theta=1_000_000.0,
        ),
        "phi3": Family(
            _PHI3,
            qkv_bias="never",
            output_bias="never",
            fused_projections=True,
            windows="all",
            partial_rotary=True,
            longrope_aliases=("su", "yarn"),
        ),
        "smollm3": Family(_SMOLLM3, windows="unrotated", default_theta=2_000_000.0),
        "olmo2": Family(_OLMO2, norm_place="after", qk_norm="row"),
        "granite": Family(_GRANITE, scale_key="attention_multiplier"),
    }
)
