"""config.json of hybrids: which layers are recurrent, in every spelling, and what contradicts itself."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from ingot.errors import ConfigError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import DecoderConfig, read_config
from tests.each_case import each_case
from tests.parity import CHECKPOINTS


def _read(name: str, changes: Mapping[str, Any]) -> DecoderConfig:
    """The configuration of a fixture with other values; None removes a key."""
    source = Checkpoint.open(CHECKPOINTS / name)
    config = {key: value for key, value in {**source.config, **changes}.items() if value is not None}
    return read_config(Checkpoint(source.path, config, source.generation_config, source.tensors))


def _kinds(config: DecoderConfig) -> str:
    """A letter for each layer: a attention, r recurrent, b both, f feed-forward alone."""
    return "".join(
        "b" if layer.attends and layer.recurrent else "a" if layer.attends else "r" if layer.recurrent else "f"
        for layer in config.layers
    )


@each_case(
    ("name", "changes", "kinds"),
    [
        ("qwen3_5_text", {"layer_types": None, "full_attention_interval": None}, "rrra"),
        ("qwen3_5_text", {"layer_types": None, "full_attention_interval": 2}, "rara"),
        ("qwen3_5_text", {"layer_types": ["attention", "mamba", "conv", "full_attention"]}, "arra"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [0, 2]}, "ara"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": None}, "aaa"),
        ("bamba", {"attn_layer_indices": [0, 2]}, "ara"),
        ("falcon_h1", {}, "bb"),
        ("olmo_hybrid", {"layer_types": None}, "ra"),
        ("nemotron_h", {"layers_block_type": None, "layer_types": None, "hybrid_override_pattern": "M-*M"}, "rfar"),
    ],
)
def test_layers_are_recurrent_by_each_rule(name: str, changes: dict[str, Any], kinds: str) -> None:
    assert _kinds(_read(name, changes)) == kinds


def test_only_layers_with_attention_have_rope_and_a_cache() -> None:
    layers = _read("qwen3_5_text", {}).layers
    assert [layer.rope is not None for layer in layers] == [layer.attends for layer in layers]


@each_case(
    ("name", "changes", "message"),
    [
        ("qwen3_5_text", {"layer_types": ["conv"] * 4}, "no layer has attention"),
        ("qwen3_5_text", {"layer_types": ["sliding_attention"] * 4}, "layer_types is ['sliding_attention', 'sliding_"),
        ("qwen3_5_text", {"layer_types": None, "full_attention_interval": 0}, "full_attention_interval is 0"),
        ("qwen3_5_text", {"linear_num_key_heads": 3}, "linear_num_value_heads is 4 and linear_num_key_heads is 3"),
        ("lfm2_moe", {"layer_types": None}, "layer_types is missing; it must be a list of 3 values"),
        ("lfm2_moe", {"use_expert_bias": False}, "routers without a bias for the choice are not supported"),
        ("bamba", {"mamba_n_heads": 7}, "mamba_n_heads (7) times mamba_d_head (8) must be mamba_expand * hidden_size"),
        ("bamba", {"mamba_n_groups": 3}, "mamba_n_heads is 8 and mamba_n_groups is 3; the first must be a multiple"),
        ("bamba", {"time_step_limit": [0.5, 0.1]}, "time_step_limit is [0.5, 0.1]; it must be a list of two numbers"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers is [1.0]; it must be a list of 5 numbers above 0"),
        (
            "falcon_h1",
            {"hidden_act": "gelu"},
            "hidden_act is 'gelu'; it must be 'silu': other activations of",
        ),
        ("nemotron_h", {"mamba_n_groups": 3}, "mamba_num_heads is 8 and n_groups is 3; the first must be a multiple"),
        ("nemotron_h", {"hybrid_override_pattern": "M?*"}, "hybrid_override_pattern is 'M?*'; it must be letters"),
    ],
)
def test_what_contradicts_itself_is_refused_by_its_key(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        _read(name, changes)
