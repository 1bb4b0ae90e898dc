"""config.json as typed facts: defaults of each family, and refusals that name key, value and what is allowed.

Windows and rotation per layer, from the keys that each family uses for them.
"""

from pathlib import Path
from typing import Any

import pytest

from ingot.errors import ConfigError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import DecoderConfig, read_config
from ingot.pipeline.checkpoint.families import FAMILIES
from tests.each_case import each_case
from tests.pipeline.tiny_checkpoint import ABSENT, copy_fixture, edit_json

GEMMAS = ("gemma2", "gemma3_text")


def read(folder: Path, name: str = "llama", **changes: Any) -> DecoderConfig:
    return read_config(Checkpoint.open(copy_fixture(folder, name, **changes)))


def refusal(folder: Path, name: str = "llama", **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, name, **changes)
    assert "config.json: " in str(caught.value)
    return str(caught.value)


def test_an_absent_head_dim_is_the_share_of_the_hidden_size(tmp_path: Path) -> None:
    assert read(tmp_path, head_dim=ABSENT).head_dim == 8
    assert read(tmp_path / "null", head_dim=None).head_dim == 8


def test_null_key_value_heads_mean_as_many_as_query_heads(tmp_path: Path) -> None:
    assert read(tmp_path, num_key_value_heads=None).num_kv_heads == 4


def test_absent_key_value_heads_take_the_familys_default(tmp_path: Path) -> None:
    assert read(tmp_path, "smollm3", num_key_value_heads=ABSENT).num_kv_heads == 4
    assert "num_key_value_heads is 8" in refusal(tmp_path, "mistral", num_key_value_heads=ABSENT)


def test_the_attention_scale_comes_from_the_familys_key(tmp_path: Path) -> None:
    assert read(tmp_path, "llama").attention_scale == pytest.approx(8**-0.5)
    assert read(tmp_path, "gemma3_text-scaled-global-rope").attention_scale == pytest.approx(40**-0.5)
    assert read(tmp_path, "granite").attention_scale == 0.125


def test_biases_follow_the_familys_rule(tmp_path: Path) -> None:
    qwen2 = read(tmp_path, "qwen2")
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias) == (True, False, False)
    llama = read(tmp_path, "llama-tied-biases")
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    mistral = read(tmp_path, "mistral", attention_bias=True)
    assert (mistral.qkv_bias, mistral.output_bias) == (False, False)


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path, eos_token_id=[7, 8])
    edit_json(folder / "generation_config.json", {"eos_token_id": [5, 6]})
    assert read_config(Checkpoint.open(folder)).eos_token_ids == (5, 6)
    edit_json(folder / "generation_config.json", {"eos_token_id": 5})
    assert read_config(Checkpoint.open(folder)).eos_token_ids == (5,)
    (folder / "generation_config.json").unlink()
    assert read_config(Checkpoint.open(folder)).eos_token_ids == (7, 8)


def test_null_end_tokens_are_none(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path, eos_token_id=None)
    (folder / "generation_config.json").unlink()
    assert read_config(Checkpoint.open(folder)).eos_token_ids == ()


def test_a_longrope_model_defaults_to_its_original_context(tmp_path: Path) -> None:
    assert read(tmp_path, "phi3-longrope-short").default_context_tokens == 32
    assert read(tmp_path).default_context_tokens == 64


def test_an_unknown_model_type_is_a_fact_with_the_list(tmp_path: Path) -> None:
    message = refusal(tmp_path, model_type="qwen33")
    assert "model_type is 'qwen33', which Ingot does not import: no version of Ingot knows that" in message
    assert "Did you mean" not in message
    lines = message.splitlines()[1:]
    assert [name for line in lines for name in line.split()] == sorted(FAMILIES)
    assert max(map(len, lines)) <= 100
    message = refusal(tmp_path / "other", model_type="falcon_mamba")
    assert "model_type is 'falcon_mamba', which Ingot does not import: it has Mamba-1 layers" in message


@pytest.mark.parametrize("value", [ABSENT, None, 3])
def test_a_model_type_that_is_not_a_name_is_refused(tmp_path: Path, value: Any) -> None:
    assert "model_type is" in refusal(tmp_path, model_type=value)


def test_an_unknown_activation_is_refused_with_the_nearest(tmp_path: Path) -> None:
    message = refusal(tmp_path, hidden_act="silo")
    assert "hidden_act is 'silo'; it must be one of gelu, gelu_new, gelu_pytorch_tanh" in message
    assert message.endswith("xielu. Did you mean 'silu'?")


@pytest.mark.parametrize("name", GEMMAS)
def test_gemma_reads_hidden_activation_and_not_hidden_act(tmp_path: Path, name: str) -> None:
    assert read(tmp_path, name, hidden_act="gelu").activation == "gelu_pytorch_tanh"
    message = refusal(tmp_path / "alone", name, hidden_act="gelu", hidden_activation=ABSENT)
    assert "hidden_act is 'gelu', but this model_type reads hidden_activation" in message


def test_a_soft_cap_that_the_family_would_ignore_is_refused(tmp_path: Path) -> None:
    assert "attn_logit_softcapping is 50.0; it must be null" in refusal(
        tmp_path, "gemma3_text", attn_logit_softcapping=50.0
    )


def test_null_soft_caps_switch_them_off(tmp_path: Path) -> None:
    config = read(tmp_path, "gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (config.attention_softcap, config.logit_softcap) == (0.0, 0.0)


def test_absent_soft_caps_take_gemma2s_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, "gemma2", attn_logit_softcapping=ABSENT, final_logit_softcapping=ABSENT)
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)


@each_case(
    ("changes", "message"),
    [
        ({"hidden_size": "32"}, "hidden_size is '32'; it must be a whole number from 1 up"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but the checkpoint holds 30 tensors"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be a finite number above 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"bos_token_id": -1}, "bos_token_id is -1; it must be a whole number from 0 up"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4 and num_key_value_heads is 3"),
        ({"head_dim": None, "num_attention_heads": 5}, "num_attention_heads is 5"),
        ({"head_dim": None, "hidden_size": 34}, "hidden_size is 34 and num_attention_heads is 4"),
        ({"head_dim": 7}, "head_dim 7 times partial_rotary_factor 1.0 rotates 7 dimensions"),
        ({"quantization_config": {"quant_method": "eetq"}}, "quant_method is 'eetq'"),
    ],
)
def test_wrong_values_are_refused_by_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = copy_fixture(tmp_path, **changes)
    (folder / "generation_config.json").unlink()
    with pytest.raises(ConfigError) as caught:
        read_config(Checkpoint.open(folder))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", GEMMAS)
def test_bidirectional_attention_is_refused(tmp_path: Path, name: str) -> None:
    assert "use_bidirectional_attention is true" in refusal(tmp_path, name, use_bidirectional_attention=True)


def test_a_default_in_a_message_is_called_one(tmp_path: Path) -> None:
    message = refusal(tmp_path, "qwen2", num_attention_heads=ABSENT, num_key_value_heads=3)
    assert "num_attention_heads is 32 and num_key_value_heads is 3" in message


FULL, SLIDING = "full_attention", "sliding_attention"


def windows(folder: Path, name: str, **changes: Any) -> list[int]:
    config = read_config(Checkpoint.open(copy_fixture(folder, name, **changes)))
    return [layer.window for layer in config.layers]


def refusal_of_layers(folder: Path, name: str, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        windows(folder, name, **changes)
    return str(caught.value)


@each_case(
    ("name", "changes", "expected"),
    [
        ("llama", {}, [0, 0, 0]),
        ("llama", {"sliding_window": None, "layer_types": [FULL] * 3}, [0, 0, 0]),
        ("mistral", {}, [8, 8, 8]),
        ("mistral", {"sliding_window": None}, [0, 0, 0]),
        ("mistral", {"sliding_window": ABSENT}, [4096, 4096, 4096]),
        ("phi3", {"sliding_window": 5}, [5, 5, 5]),
        ("phi3", {"sliding_window": ABSENT}, [0, 0, 0]),
        (
            "qwen2",
            {"layer_types": None, "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 8},
            [0, 0, 8],
        ),
        ("qwen2", {"layer_types": None, "use_sliding_window": False, "max_window_layers": 0}, [0, 0, 0]),
        ("qwen2", {"layer_types": None, "use_sliding_window": True, "max_window_layers": ABSENT}, [0, 0, 0]),
        ("qwen3-layer-types", {}, [8, 0, 8]),
        ("gemma2", {"layer_types": ABSENT}, [8, 0, 8]),
        ("gemma2", {"layer_types": [FULL, SLIDING, FULL]}, [0, 8, 0]),
        ("gemma2", {"layer_types": ABSENT, "sliding_window": ABSENT}, [4096, 0, 4096]),
        ("gemma3_text", {"layer_types": ABSENT}, [8, 8, 8, 8, 8, 0]),
        ("gemma3_text", {"layer_types": ABSENT, "sliding_window_pattern": 2}, [8, 0, 8, 0, 8, 0]),
        ("gemma3_text", {"layer_types": [FULL] * 6, "sliding_window": None}, [0] * 6),
        ("smollm3-windows", {}, [0, 8, 0]),
        ("smollm3-windows", {"use_sliding_window": False}, [0, 0, 0]),
        ("olmo2", {}, [0, 0, 0]),
        ("gpt_neo", {}, [0, 8]),
        ("gpt_neo", {"attention_layers": ["local", "global"]}, [8, 0]),
        ("gpt_neo", {"attention_layers": ABSENT}, [0, 8]),
    ],
)
def test_windows_follow_the_familys_keys(
    tmp_path: Path, name: str, changes: dict[str, Any], expected: list[int]
) -> None:
    assert windows(tmp_path, name, **changes) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"no_rope_layers": [1, 0, 0, 1]}, [True, False, False, True]),
        ({"no_rope_layers": [1, 0, 0, 1, 1, 1]}, [True, False, False, True]),
        ({"no_rope_layers": None}, [True, True, True, False]),
        ({"no_rope_layers": ABSENT, "no_rope_layer_interval": 2}, [True, False, True, False]),
    ],
)
def test_smollm3_leaves_some_layers_unrotated(tmp_path: Path, changes: dict[str, Any], expected: list[bool]) -> None:
    config = read_config(Checkpoint.open(copy_fixture(tmp_path, "smollm3", **changes)))
    assert [layer.rope is not None for layer in config.layers] == expected


@each_case(
    ("name", "changes", "message"),
    [
        ("llama", {"sliding_window": 8}, "sliding_window is 8; it must be absent or null"),
        ("gpt_neo", {"attention_layers": ["local"]}, '"global" or "local" for each of 2 layers, or absent'),
        ("llama", {"layer_types": [SLIDING] * 3}, "layer_types is"),
        ("mistral", {"layer_types": [SLIDING, FULL, SLIDING]}, "this model_type gives all layers the same window"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0; it must be a whole number from 1 up"),
        ("gemma2", {"sliding_window": None}, "some layers are sliding_attention, but sliding_window is None"),
        ("gemma2", {"layer_types": [SLIDING] * 2}, "a list of 3 values, each 'full_attention' or 'sliding_attention'"),
        ("gemma2", {"layer_types": [SLIDING, FULL, "chunked_attention"]}, "chunked_attention"),
        ("gemma3_text", {"layer_types": ABSENT, "sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ("qwen3-layer-types", {"use_sliding_window": False}, "and use_sliding_window is False"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "a list of at least 4 values, each 0 or 1"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "a list of at least 4 values, each 0 or 1"),
        ("granite_swa", {"layer_rope_theta": [0, 100.0]}, "a list of 4 numbers, each 0 or above 1, or null"),
        ("granite_swa", {"layer_rope_theta": [0, 100.0, 0.5, 1e4]}, "a list of 4 numbers, each 0 or above 1, or null"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    assert message in refusal_of_layers(tmp_path, name, **changes)
