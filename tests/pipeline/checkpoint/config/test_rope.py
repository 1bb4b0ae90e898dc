"""Rope parameters in config.json: old and new spellings mean the same; contradictions and unknowns are refused."""

from pathlib import Path
from typing import Any

import pytest

from ingot.errors import ConfigError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.model.rope import RopeParameters
from tests.each_case import each_case
from tests.pipeline.tiny_checkpoint import ABSENT, copy_fixture

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def ropes(folder: Path, name: str = "llama", **changes: Any) -> list[RopeParameters | None]:
    checkpoint = Checkpoint.open(copy_fixture(folder, name, **changes))
    return [layer.rope for layer in read_config(checkpoint).layers]


def rope(folder: Path, name: str = "llama", **changes: Any) -> RopeParameters:
    first = ropes(folder, name, **changes)[0]
    assert first is not None
    return first


def refusal(folder: Path, name: str = "llama", **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ropes(folder, name, **changes)
    return str(caught.value)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_scaling_with_rope_theta_means_rope_parameters(tmp_path: Path, key: str) -> None:
    old = rope(tmp_path / "old", rope_parameters=ABSENT, rope_theta=500.0, rope_scaling={key: "llama3", **LLAMA3})
    new = rope(tmp_path / "new", rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3})
    assert old == new
    assert (old.kind, old.theta, old.original_max_positions) == ("llama3", 500.0, 32)


def test_rope_type_goes_before_type(tmp_path: Path) -> None:
    scaling = {"type": "linear", "rope_type": "llama3", **LLAMA3}
    assert rope(tmp_path, rope_parameters=ABSENT, rope_scaling=scaling).kind == "llama3"


@pytest.mark.parametrize("value", [None, {}])
def test_without_parameters_the_default_theta_holds(tmp_path: Path, value: Any) -> None:
    assert rope(tmp_path, rope_parameters=value).theta == 10000.0


def test_smollm3_has_another_default_theta(tmp_path: Path) -> None:
    assert rope(tmp_path, "smollm3", rope_parameters=ABSENT).theta == 2_000_000.0


def test_gemma3_rotates_local_and_global_layers_differently(tmp_path: Path) -> None:
    local, *_, last = ropes(tmp_path, "gemma3_text", rope_parameters=ABSENT)
    assert local is not None
    assert last is not None
    assert (local.theta, last.theta) == (10_000.0, 1_000_000.0)


def test_gemma3_spells_the_local_theta_rope_local_base_freq(tmp_path: Path) -> None:
    local, *_, last = ropes(
        tmp_path,
        "gemma3_text",
        rope_parameters=ABSENT,
        rope_theta=5e5,
        rope_local_base_freq=7e3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert local is not None
    assert last is not None
    assert (local.kind, local.theta) == ("default", 7e3)
    assert (last.kind, last.theta, last.factor) == ("linear", 5e5, 8.0)


def test_gemma3_scaling_by_type_alone_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, "gemma3_text", rope_parameters=ABSENT, rope_scaling={"type": "linear", "factor": 8.0})
    assert "transformers would not scale" in message


def test_gemma3_with_flat_parameters_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, "gemma3_text", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert "rope_parameters holds ['rope_type', 'rope_theta']" in message


def test_nested_parameters_are_refused_where_all_layers_rotate_alike(tmp_path: Path) -> None:
    nested = {"full_attention": {"rope_type": "default"}}
    assert "rope_parameters holds ['full_attention']" in refusal(tmp_path, rope_parameters=nested)


MSCALED = {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 48}


def test_phimoe_gives_the_factors_of_short_and_long_contexts(tmp_path: Path) -> None:
    scaling = {**MSCALED, "short_mscale": 1.1, "long_mscale": 1.3}
    found = rope(tmp_path / "long", "phimoe", rope_parameters=ABSENT, rope_scaling=scaling)
    assert (found.attention_factor, found.long_attention_factor) == (1.1, 1.3)
    assert rope(tmp_path / "plain", "phimoe", rope_parameters=ABSENT).long_attention_factor is None


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("phimoe", MSCALED, "short_mscale is missing; it must be a finite number above 0"),
        ("phimoe", {"rope_type": "linear", "factor": 2}, "rope_type is 'linear'; it must be 'default' or 'longrope'"),
        ("phi3", {**MSCALED, "long_mscale": 1.1}, "long_mscale is 1.1; it must be absent: this model_type does not"),
    ],
)
def test_factors_of_longrope_are_given_where_they_are_read(
    name: str, parameters: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        rope(tmp_path, name, rope_parameters=parameters)


@pytest.mark.parametrize("old_name", ["su", "yarn", "longrope"])
def test_phi3_had_older_names_for_longrope(tmp_path: Path, old_name: str) -> None:
    scaling = {"type": old_name, **LONG}
    found = rope(tmp_path, "phi3-longrope-short", rope_scaling=scaling)
    assert (found.kind, found.rotary_dim, found.original_max_positions) == ("longrope", 8, 32)
    assert found.long_factors == (2.0, 2.0, 2.0, 2.0)


def test_the_top_level_original_context_goes_before_the_nested_one(tmp_path: Path) -> None:
    parameters = {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}
    assert rope(tmp_path, rope_parameters=parameters, original_max_position_embeddings=16).original_max_positions == 16


def test_partial_rotary_factor_counts_the_rotated_dimensions(tmp_path: Path) -> None:
    assert rope(tmp_path, "phi3-partial-rotary").rotary_dim == 12


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_partial_rotary_is_refused_where_transformers_does_not_read_it(tmp_path: Path, name: str) -> None:
    assert "partial_rotary_factor is 0.5; it must be 1 or absent" in refusal(tmp_path, name, partial_rotary_factor=0.5)


def test_dynamic_scaling_is_refused_with_the_reason(tmp_path: Path) -> None:
    message = refusal(tmp_path, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    assert "rope_type is 'dynamic', which changes all keys of a sequence as it grows" in message


def test_an_unknown_kind_is_refused_with_the_nearest(tmp_path: Path) -> None:
    message = refusal(tmp_path, rope_parameters={"rope_type": "lama3", "factor": 2.0})
    assert "rope_type is 'lama3'. Did you mean 'llama3'?" in message


def test_an_unknown_key_is_refused_with_the_nearest(tmp_path: Path) -> None:
    message = refusal(tmp_path, rope_parameters={"rope_type": "linear", "factr": 2.0})
    assert "unknown key 'factr'" in message
    assert "Did you mean 'factor'?" in message


@each_case(
    ("parameters", "message"),
    [
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": "2"}, "factor is '2'"),
        ({"rope_type": "linear", "factor": True}, "factor is True"),
        ({"rope_type": "linear", "factor": 0}, "factor is 0"),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor is 1.0; it must be above"),
        ({"rope_type": "longrope", **LONG, "long_factor": [1.0]}, "a list of 4 numbers above 0"),
        ({"rope_type": "default", "rope_theta": 1.0}, "rope_theta is 1.0; it must be a number above 1"),
        ({"rope_type": "default", "rope_theta": float("nan")}, "rope_theta is nan"),
        ("default", "rope_parameters is 'default'; it must be an object or null"),
    ],
)
def test_wrong_values_are_refused_by_key(tmp_path: Path, parameters: Any, message: str) -> None:
    assert message in refusal(tmp_path, rope_parameters=parameters)


def test_spellings_that_contradict_are_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_theta=10000.0)
    assert "rope_scaling is" in message
    assert "remove the wrong one" in message
    message = refusal(tmp_path / "1", rope_scaling={"type": "linear", "factor": 2.0})
    assert "remove the wrong one" in message
    assert "rope_theta is 5000.0, but the rope parameters have 10000.0" in refusal(tmp_path / "2", rope_theta=5000.0)
