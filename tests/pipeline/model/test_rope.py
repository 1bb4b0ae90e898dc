"""Rope tables: each kind against its formula; the fixtures compare the whole with transformers."""

from dataclasses import replace

import numpy as np
import pytest

from ingot.errors import UsageError
from ingot.pipeline.model.rope import RopeParameters, attention_factor, inverse_frequencies, rope_tables

PLAIN = RopeParameters(kind="default", theta=10000.0, rotary_dim=8, max_positions=128, original_max_positions=32)
LONG = replace(PLAIN, kind="longrope", short_factors=(1.0, 1.0, 1.0, 1.0), long_factors=(2.0, 2.0, 2.0, 2.0))


def test_frequencies_fall_from_one_by_powers_of_theta() -> None:
    np.testing.assert_allclose(inverse_frequencies(PLAIN, 1), [1, 0.1, 0.01, 0.001], rtol=1e-6)


def test_tables_hold_cos_and_sin_of_position_times_frequency() -> None:
    cos, sin = rope_tables(PLAIN, 100)
    assert cos.shape == sin.shape == (100, 4)
    assert cos.dtype == sin.dtype == np.float32
    assert cos[99, 2] == pytest.approx(np.cos(0.99), rel=1e-6)
    assert sin[99, 2] == pytest.approx(np.sin(0.99), rel=1e-6)


def test_linear_slows_every_frequency_by_the_factor() -> None:
    linear = replace(PLAIN, kind="linear", factor=4.0)
    np.testing.assert_array_equal(inverse_frequencies(linear, 1), inverse_frequencies(PLAIN, 1) / 4)


def test_llama3_keeps_short_waves_slows_long_ones_and_blends_between() -> None:
    scaled = replace(PLAIN, kind="llama3", theta=100.0, factor=8.0)
    plain = inverse_frequencies(replace(PLAIN, theta=100.0), 1)  # wavelengths 6.3, 19.9, 62.8, 199
    frequencies = inverse_frequencies(scaled, 1)
    assert frequencies[0] == plain[0]
    assert plain[1] / 8 < frequencies[1] < plain[1]
    np.testing.assert_array_equal(frequencies[2:], plain[2:] / 8)


def test_yarn_keeps_fast_dimensions_slows_slow_ones_and_scales_attention() -> None:
    yarn = replace(PLAIN, kind="yarn", theta=100.0, factor=4.0, beta_fast=2.0, beta_slow=0.25)
    plain = inverse_frequencies(replace(PLAIN, theta=100.0), 1)
    frequencies = inverse_frequencies(yarn, 1)
    assert frequencies[0] == plain[0]
    assert plain[3] / 4 <= frequencies[3] < plain[3]
    assert attention_factor(yarn) == pytest.approx(0.1 * np.log(4) + 1)


def test_yarn_without_a_factor_takes_the_ratio_of_the_contexts() -> None:
    yarn = replace(PLAIN, kind="yarn", theta=100.0)
    np.testing.assert_array_equal(inverse_frequencies(yarn, 1), inverse_frequencies(replace(yarn, factor=4.0), 1))


def test_yarn_scales_divide_when_both_are_given() -> None:
    yarn = replace(PLAIN, kind="yarn", factor=4.0, mscale=2.0, mscale_all_dim=1.0)
    assert attention_factor(yarn) == pytest.approx((0.2 * np.log(4) + 1) / (0.1 * np.log(4) + 1))


def test_an_explicit_attention_factor_decides() -> None:
    assert attention_factor(replace(PLAIN, kind="yarn", factor=4.0, attention_factor=1.5)) == 1.5


def test_longrope_is_short_up_to_the_original_context_and_long_beyond() -> None:
    plain = inverse_frequencies(PLAIN, 1)
    np.testing.assert_array_equal(inverse_frequencies(LONG, 32), plain)
    np.testing.assert_array_equal(inverse_frequencies(LONG, 33), plain / 2)


def test_longrope_scales_both_tables_alike() -> None:
    factor = np.sqrt(1 + np.log(4) / np.log(32))
    assert attention_factor(LONG) == pytest.approx(factor)
    assert rope_tables(LONG, 8)[0][0, 0] == pytest.approx(factor)
    assert attention_factor(replace(LONG, factor=1.0)) == 1.0


def test_longrope_may_have_a_factor_of_its_own_for_long_contexts() -> None:
    both = replace(LONG, attention_factor=1.2, long_attention_factor=1.4)
    assert [rope_tables(both, tokens)[0][0, 0] for tokens in (32, 33)] == pytest.approx([1.2, 1.4])


def test_longrope_defaults_to_the_original_context() -> None:
    assert LONG.default_context_tokens == 32
    assert PLAIN.default_context_tokens == 128


def test_tables_that_would_fill_the_memory_are_refused_before_they_are_made() -> None:
    endless = replace(PLAIN, max_positions=10**12)
    with pytest.raises(UsageError, match="give a smaller context_tokens"):
        rope_tables(endless, 10**12)


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(
        UsageError, match="context_tokens is 129; the model's max_position_embeddings allow at most 128"
    ):
        rope_tables(PLAIN, 129)
