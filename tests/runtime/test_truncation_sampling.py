"""The choice of a token against its definition in real numbers: weights, surviving tokens, cumulative distribution."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.forward_batch import FloatArray, Int64Array
from ingot.runtime.truncation_sampling import UNIT_BITS, TokenChoice, choose_token, surviving_tokens, token_weights
from tests.each_case import each_case

UNIT = 2.0**UNIT_BITS


def probabilities(scores: FloatArray, temperature: float, survivors: Int64Array) -> NDArray[np.float64]:
    """Softmax of scores / temperature over the survivors, in double precision; 0 for all others."""
    kept = np.zeros(len(scores))
    kept[survivors] = np.exp((scores[survivors].astype(np.float64) - float(scores.max())) / temperature)
    kept /= kept.sum()
    return kept


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 30.0])
def test_weights_are_exponentials_to_half_a_unit(temperature: float) -> None:
    scores = np.linspace(-40, 3, 20_001, dtype=np.float32)
    factor = TokenChoice.of(SamplingParams(temperature=temperature)).factor
    exact = np.exp((scores.astype(np.float64) - 3) / temperature) * UNIT
    assert np.abs(token_weights(scores, factor) - exact).max() <= 0.5 + 0.05, "rounding, and 3e-15 of the largest"
    assert token_weights(scores, factor).max() == UNIT


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 2**32),
    st.integers(1, 400),
    st.floats(0.05, 4),
    st.integers(0, 40),
    st.floats(0.01, 1),
    st.floats(0, 1),
)
def test_a_token_is_where_the_cumulative_distribution_passes_the_number(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    rng = np.random.default_rng(seed)
    scores = (np.round(rng.standard_normal(vocab) * 8) / 4).astype(np.float32)  # with ties
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    cumulative = probabilities(scores, temperature, surviving_tokens(scores, params)).cumsum()
    for uniform in (0.0, *rng.random(5), 1 - 2.0**-53):
        token = choose_token(scores, TokenChoice.of(params), uniform)
        assert token in surviving_tokens(scores, params)
        assert (cumulative[token - 1] if token else 0.0) - 1e-10 <= uniform <= cumulative[token] + 1e-10


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 400), st.floats(0.1, 4), st.floats(0.001, 0.999))
def test_top_p_keeps_the_first_tokens_by_likelihood_and_id_that_reach_it(
    seed: int, vocab: int, temperature: float, top_p: float
) -> None:
    scores = (np.random.default_rng(seed).integers(-6, 6, vocab) / 2).astype(np.float32)
    chances = probabilities(scores, temperature, np.arange(vocab))
    ranked = np.lexsort((np.arange(vocab), -scores))
    before = chances[ranked].cumsum() - chances[ranked]
    survivors = set(surviving_tokens(scores, SamplingParams(temperature=temperature, top_p=top_p)).tolist())
    assert set(ranked[before < top_p - 1e-9].tolist()) <= survivors <= set(ranked[before < top_p + 1e-9].tolist())


def test_greedy_takes_the_lowest_id_of_the_largest_and_zeros_of_both_signs_are_equal() -> None:
    assert choose_token(np.array([-1, -0.0, 0.0], np.float32), TokenChoice(0.0), 0.9) == 1
    assert choose_token(np.array([-1, 0.0, -0.0], np.float32), TokenChoice(0.0), 0.9) == 1


@each_case("temperature", [0.0, 1.0])
@each_case("bad", [[1, np.nan], [1, -np.nan], [1, np.inf], [-np.inf, -np.inf]])
def test_a_row_without_a_finite_maximum_has_no_token(bad: list[float], temperature: float) -> None:
    assert choose_token(np.array(bad, np.float32), TokenChoice.of(SamplingParams(temperature=temperature)), 0.5) == -1


def test_parameters_beyond_their_types_saturate() -> None:
    tiny = TokenChoice.of(SamplingParams(temperature=5e-324, top_p=5e-324, top_k=2**80, min_p=1.0))
    assert np.isfinite(tiny.factor)
    assert tiny.top_k == 2**63 - 1
    assert choose_token(np.array([1, 3, 3, 2], np.float32), tiny, 0.99) == 1
    huge = TokenChoice.of(SamplingParams(temperature=1.7e308))
    assert choose_token(np.array([3e38, -3e38], np.float32), huge, 0.5) == 1, "all tokens are as likely"
