"""The tiny checkpoints of the parity tests: every family, and the variants where importers go wrong. Data only.

Each has random weights, norms and biases that are not trivial, a window of 8 where it has one, and prompts longer
than that. `config` is what transformers' configuration class is given; `rewrite` then changes config.json itself, to
spell it as older versions did (None removes a key). Reference logits are transformers' own, from the written folder.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

WINDOW = 8
LENGTHS = (9, 27, 20)

_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.5, 2.5, 4.0, 4.5],
    "original_max_position_embeddings": 32,
}
_PHI3_LONG = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.5,
    "sliding_window": WINDOW,
    "rope_parameters": _LONGROPE,
}


@dataclass(frozen=True)
class Case:
    """One tiny checkpoint and how it is run."""

    name: str
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: Literal["float32", "float16", "bfloat16"] = "float16"
    rewrite: Mapping[str, Any] = field(default_factory=dict)
    shard_bytes: int | None = None
    lengths: tuple[int, int, int] = LENGTHS
    context_tokens: int | None = None
    is_fused: bool = False

    @property
    def full_config(self) -> dict[str, Any]:
        """Keyword arguments of the configuration class."""
        return {**_COMMON, **self.config}


CASES = (
    Case("llama", "llama", dtype="float32"),
    Case(
        "llama-tied-biases",
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "eos_token_id": [2, 3]},
        dtype="bfloat16",
    ),
    Case(
        "llama-rope-llama3",
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    Case(
        "llama-rope-linear",
        "llama",
        {"hidden_act": "gelu", "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}},
    ),
    Case(
        "llama-rope-yarn",
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "beta_fast": 2.0,
                "beta_slow": 0.25,
                "original_max_position_embeddings": 16,
            }
        },
        dtype="bfloat16",
    ),
    Case("mimo", "mimo", dtype="bfloat16"),
    Case(
        "llama-old-spelling",
        "llama",
        rewrite={
            "rope_parameters": None,
            "rope_theta": 5000.0,
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "head_dim": None,
            "dtype": None,
            "torch_dtype": "float16",
        },
    ),
    Case("llama-sharded", "llama", {"num_key_value_heads": 4, "head_dim": 16}, shard_bytes=30_000),
    Case("mistral", "mistral", {"sliding_window": WINDOW}, dtype="float32"),
    Case("mistral-no-window", "mistral", {"sliding_window": None, "head_dim": 16}, dtype="bfloat16"),
    Case("qwen2", "qwen2", dtype="float32"),
    Case(
        "qwen2-max-window-layers",
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
        rewrite={"layer_types": None, "rope_parameters": None, "rope_theta": 2000.0},
    ),
    Case(
        "qwen2-rope-yarn",
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "mscale": 1.5,
                "mscale_all_dim": 0.5,
                "truncate": False,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    Case("qwen3", "qwen3", {"head_dim": 16}, dtype="float32"),
    Case(
        "qwen3-layer-types",
        "qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    Case("gemma2", "gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}, dtype="float32"),
    Case(
        "gemma2-tight-softcaps",
        "gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 3.0,
        },
        rewrite={"layer_types": None, "hidden_act": "gelu"},
    ),
    Case(
        "gemma3_text",
        "gemma3_text",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW, "num_hidden_layers": 6},
        dtype="float16",
    ),
    Case(
        "gemma3_text-scaled-global-rope",
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 40,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 2000.0, "factor": 4.0},
            },
        },
        dtype="float32",
    ),
    Case(
        "gemma3_text-old-spelling",
        "gemma3_text",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW},
        dtype="bfloat16",
        rewrite={
            "layer_types": None,
            "sliding_window_pattern": 2,
            "rope_parameters": None,
            "rope_theta": 5000.0,
            "rope_local_base_freq": 500.0,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
    ),
    Case("phi3", "phi3", {"original_max_position_embeddings": 64}, dtype="float32"),
    Case("phi3-partial-rotary", "phi3", {"head_dim": 16, "partial_rotary_factor": 0.75, "sliding_window": WINDOW}),
    Case(
        "phi3-longrope-short",
        "phi3",
        _PHI3_LONG,
        rewrite={
            "rope_parameters": None,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": _LONGROPE["short_factor"],
                "long_factor": _LONGROPE["long_factor"],
            },
        },
    ),
    Case("phi3-longrope-long", "phi3", _PHI3_LONG, lengths=(40, 36, 33), context_tokens=128),
    Case("smollm3", "smollm3", {"num_hidden_layers": 4}, dtype="float32"),
    Case(
        "smollm3-windows",
        "smollm3",
        {"use_sliding_window": True, "sliding_window": WINDOW, "no_rope_layers": [1, 0, 1]},
        rewrite={"layer_types": None},
    ),
    Case("olmo2", "olmo2", dtype="float32"),
    Case(
        "granite",
        "granite",
        {
            "embedding_multiplier": 12.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.125,
        },
        dtype="float32",
    ),
    Case(
        "granite-tied-biases",
        "granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
        },
        dtype="bfloat16",
    ),
)
