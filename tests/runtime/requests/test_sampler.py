"""Sampler: greedy, warpers, penalties, log-probabilities, seeds; and the arrays from which a device samples."""

import math
import subprocess
import sys
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.errors import EngineError
from ingot.runtime.asking.sampling_params import MAX_SEED, SamplingParams
from ingot.runtime.forward_batch import FloatArray
from ingot.runtime.requests.sampler import Sampler, sampled_on_device, sampling_arrays
from ingot.runtime.truncation_sampling import surviving_tokens
from tests.each_case import each_case


def row(*values: float) -> FloatArray:
    return np.array(values, dtype=np.float32)


def random_row(seed: int, vocab: int, scale: float = 3.0) -> FloatArray:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def samples(logits: FloatArray, count: int, **given: Any) -> list[int]:
    sampler = Sampler(SamplingParams(**given), [])
    return [sampler.sample(logits, range(index)).token_id for index in range(count)]


def test_greedy_takes_the_most_likely_token_and_the_lowest_id_of_a_tie() -> None:
    sampler = Sampler(SamplingParams(), [])
    assert sampler.sample(row(1, 5, 2), []).token_id == 1
    assert sampler.sample(row(1, 5, 5), []).token_id == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_not_finite_raises(bad: float, temperature: float) -> None:
    with pytest.raises(EngineError, match=r"logit of token 2 is (nan|inf)"):
        Sampler(SamplingParams(temperature=temperature), []).sample(row(1, 9, bad), [])
    with pytest.raises(EngineError, match="finite"):
        Sampler(SamplingParams(), []).sample(row(-np.inf, -np.inf), [])


def test_a_forbidden_token_is_never_sampled() -> None:
    assert set(samples(row(-np.inf, 0, -np.inf, 0, -np.inf), 300, temperature=1.0, seed=1)) == {1, 3}


def test_end_tokens_are_sampled_from_min_tokens_on() -> None:
    sampler = Sampler(SamplingParams(min_tokens=2, logit_bias={1: 50}), [], end_tokens=[1])
    assert [sampler.sample(row(0, 9, 3), generated).token_id for generated in ([], [2], [2, 2])] == [2, 2, 1]


def test_a_token_that_is_allowed_may_be_one_that_the_model_forbids() -> None:
    sampler = Sampler(SamplingParams(allowed_token_ids=[0, 2]), [])
    assert sampler.sample(row(0, 9, 3), []).token_id == 2
    with pytest.raises(EngineError, match="allowed_token_ids and min_tokens leave"):
        sampler.sample(row(-np.inf, 9, -np.inf), [])


def test_samples_follow_the_distribution() -> None:
    """Chi-square against softmax(logits / temperature): 99.99 % of correct samplers stay below the limit."""
    logits, temperature, count = row(0.3, -1.0, 1.4, 0.0, 2.0, -0.5), 0.7, 20_000
    expected = np.exp(logits.astype(np.float64) / temperature)
    expected *= count / expected.sum()
    counted = np.bincount(samples(logits, count, temperature=temperature, seed=11), minlength=6)
    assert ((counted - expected) ** 2 / expected).sum() < 25.7  # chi-square, 5 degrees of freedom, p = 1e-4


def test_samples_of_many_seeds_at_one_position_follow_the_distribution() -> None:
    logits, count = row(0, 1, 2), 5_000
    expected = np.exp(np.arange(3.0))
    expected *= count / expected.sum()
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(count)]
    counted = np.bincount([Sampler(p, []).sample(logits, []).token_id for p in params], minlength=3)
    assert ((counted - expected) ** 2 / expected).sum() < 18.5  # 2 degrees of freedom, p = 1e-4


def test_a_sample_depends_on_seed_and_position_only() -> None:
    logits = random_row(0, 100)
    params = SamplingParams(temperature=1.5, seed=5)
    straight = samples(logits, 20, temperature=1.5, seed=5)
    backwards = Sampler(params, [])
    assert [backwards.sample(logits, [0] * index).token_id for index in reversed(range(20))] == straight[::-1]
    assert samples(logits, 20, temperature=1.5, seed=6) != straight
    assert len(set(straight)) > 1


def test_the_samples_of_a_seed_never_change_between_versions() -> None:
    logits = np.sin(np.arange(1000)).astype(np.float32)
    assert samples(logits, 8, temperature=1.0, seed=2**64 - 1) == [234, 348, 54, 102, 58, 461, 729, 686]


def test_without_a_seed_a_random_one_is_recorded() -> None:
    first, second = Sampler(SamplingParams(temperature=1.0), []), Sampler(SamplingParams(temperature=1.0), [])
    assert first.seed != second.seed
    again = Sampler(SamplingParams(temperature=1.0, seed=first.seed), [])
    logits = random_row(3, 500)
    assert [first.sample(logits, [0] * i) for i in range(9)] == [again.sample(logits, [0] * i) for i in range(9)]


def test_a_tiny_temperature_is_greedy() -> None:
    logits = random_row(4, 200)
    assert set(samples(logits, 5, temperature=5e-324, seed=0)) == {int(logits.argmax())}


def test_top_k_keeps_the_most_likely_tokens_and_their_ties() -> None:
    assert surviving_tokens(row(1, 4, 3, 2), SamplingParams(temperature=1.0, top_k=2)).tolist() == [1, 2]
    assert surviving_tokens(row(3, 4, 3, 2), SamplingParams(temperature=1.0, top_k=2)).tolist() == [0, 1, 2]
    assert len(surviving_tokens(row(1, 2), SamplingParams(temperature=1.0, top_k=9))) == 2


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = np.log(row(0.5, 0.3, 0.15, 0.05))
    for top_p, kept in [(0.4, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4), (1.0, 4), (1e-9, 1)]:
        params = SamplingParams(temperature=1.0, top_p=top_p)
        assert surviving_tokens(logits, params).tolist() == list(range(kept))


def test_top_p_sorts_more_tokens_when_the_distribution_is_flat() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.5)
    for vocab in (1_000, 10_000, 40_000):
        assert surviving_tokens(np.zeros(vocab, dtype=np.float32), params).tolist() == list(range(vocab // 2))
    slope = np.linspace(1, 0, 50_000, dtype=np.float32)
    half = (1 - math.log((math.e + 1) / 2)) * 50_000  # where exp(1 - x) has half its area
    assert surviving_tokens(slope, params).tolist() == list(range(math.ceil(half)))


def test_min_p_is_relative_to_the_most_likely_token() -> None:
    logits = np.log(row(0.6, 0.3, 0.07, 0.03))
    assert surviving_tokens(logits, SamplingParams(temperature=1.0, min_p=0.1)).tolist() == [0, 1, 2]
    assert surviving_tokens(logits, SamplingParams(temperature=1.0, min_p=1.0)).tolist() == [0]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32),
    st.integers(2, 3000),
    st.floats(0.05, 4),
    st.integers(0, 50),
    st.floats(0.01, 1),
    st.floats(0, 1),
)
def test_the_most_likely_token_always_survives_and_samples_are_survivors(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_row(seed, vocab)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    survivors = surviving_tokens(logits, params)
    assert int(logits.argmax()) in survivors
    assert Sampler(params, []).sample(logits, []).token_id in survivors


def test_the_repetition_penalty_weakens_tokens_of_prompt_and_output_once() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), [0, 0, 0])
    assert sampler.sample(row(3.0, 1.6), []).token_id == 1, "3 / 2 < 1.6"
    assert sampler.sample(row(3.0, 1.4), []).token_id == 0, "three times in the prompt, but divided once"
    assert sampler.sample(row(3.0, 2.0, 1.4), [1, 1]).token_id == 0
    assert sampler.sample(row(-1.0, -1.5), []).token_id == 1, "negative logits are multiplied"


def test_the_presence_penalty_weakens_tokens_of_the_output_alone_and_once() -> None:
    sampler = Sampler(SamplingParams(presence_penalty=1.0), [0])
    assert sampler.sample(row(1.5, 1.0), []).token_id == 0
    assert sampler.sample(row(1.5, 1.0), [0]).token_id == 1
    assert sampler.sample(row(1.5, 0.4), [0, 0, 0]).token_id == 0


def test_the_frequency_penalty_counts_how_often_a_token_is_in_the_output() -> None:
    sampler = Sampler(SamplingParams(frequency_penalty=0.5), [0, 0, 0])
    assert sampler.sample(row(1.5, 0.4), []).token_id == 0
    assert sampler.sample(row(1.5, 0.4), [0, 0]).token_id == 0, "1.5 - 2 * 0.5 > 0.4"
    assert sampler.sample(row(1.5, 0.4), [0, 0, 0]).token_id == 1
    both = Sampler(SamplingParams(frequency_penalty=0.5, presence_penalty=0.2), [])
    assert both.sample(row(1.5, 0.4), [0, 0]).token_id == 1, "presence counts once more"
    assert Sampler(SamplingParams(frequency_penalty=-1.0), []).sample(row(0, 1, 0), [2, 2]).token_id == 2


def test_a_bias_is_added_to_the_logit_of_its_token_and_bans_or_forces_it() -> None:
    logits = row(3, 2.5, 2)
    assert Sampler(SamplingParams(logit_bias={1: 0.6}), []).sample(logits, []).token_id == 1
    assert Sampler(SamplingParams(logit_bias={1: 0.4}), []).sample(logits, []).token_id == 0
    for bias, left in (({0: -100}, {1, 2}), ({2: 100}, {2})):
        drawn = [SamplingParams(temperature=1.0, seed=seed, logit_bias=bias) for seed in range(100)]
        assert {Sampler(params, []).sample(logits, []).token_id for params in drawn} == left
    assert Sampler(SamplingParams(logit_bias={1: 100}), []).sample(row(0, -np.inf), []).token_id == 0
    after = Sampler(SamplingParams(logit_bias={0: 1.0}, repetition_penalty=2.0), [0])
    assert after.sample(row(3, 2.4), []).token_id == 0, "3 / 2 + 1 > 2.4: the penalty does not scale the bias"


@each_case("temperature", [0.0, 1.0])
@each_case("repetition", [5e-324, 1e-40, 1.7e308])
@each_case("presence", [-1.7e308, 0.0, 1.7e308])
def test_a_penalty_beyond_single_precision_still_gives_a_token(
    temperature: float, repetition: float, presence: float
) -> None:
    params = SamplingParams(
        temperature=temperature,
        seed=0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        top_p=0.9,
        min_p=0.1,
        frequency_penalty=-presence,
        logit_bias={0: 100, 1: -100},
    )
    for logits in (row(1, 0, -1, 2), row(0, 0, 0, 0), row(-np.inf, 3, -3, -np.inf)):
        token_id = Sampler(params, [0, 1]).sample(logits, [1, 2]).token_id
        assert np.isfinite(logits[token_id])


def test_penalties_do_not_change_the_callers_logits() -> None:
    logits = random_row(1, 50)
    before = logits.copy()
    Sampler(SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, temperature=1.0), [1, 2]).sample(logits, [3])
    assert np.array_equal(logits, before)


def test_logprobs_are_those_of_the_model_before_penalties_and_temperature() -> None:
    logits = random_row(2, 40)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    params = SamplingParams(temperature=0.3, repetition_penalty=1.5, logprobs=3, seed=0)
    sampled = Sampler(params, [1]).sample(logits, [])
    assert sampled.logprob == pytest.approx(expected[sampled.token_id])
    ranked = np.argsort(-logits)[:3]
    assert [entry.token_id for entry in sampled.top] == ranked.tolist()
    assert [entry.logprob for entry in sampled.top] == pytest.approx(expected[ranked])


def test_logprobs_zero_reports_the_sampled_token_alone_and_none_reports_nothing() -> None:
    logits = row(1, 2)
    chosen = Sampler(SamplingParams(logprobs=0), []).sample(logits, [])
    assert chosen.logprob is not None
    assert chosen.top == ()
    assert Sampler(SamplingParams(), []).sample(logits, []).logprob is None
    everything = Sampler(SamplingParams(logprobs=9), []).sample(logits, [])
    assert [entry.token_id for entry in everything.top] == [1, 0]


def test_ties_among_the_top_go_to_the_lowest_ids() -> None:
    sampled = Sampler(SamplingParams(logprobs=2), []).sample(row(1, 3, 1, 1), [])
    assert [entry.token_id for entry in sampled.top] == [1, 0]


SAMPLED = SamplingParams(temperature=0.5, top_k=4, top_p=0.75, seed=7)


def test_a_row_has_the_parameters_of_its_request_and_the_random_number_of_its_token() -> None:
    sampled, greedy = Sampler(SAMPLED, [1]), Sampler(SamplingParams(seed=1), [1])
    arrays = sampling_arrays([sampled, greedy, sampled], [3, 0, 9])
    assert arrays.temperatures.tolist() == [0.5, 0, 0.5]
    assert arrays.top_ks.tolist() == [4, 0, 4]
    assert arrays.top_ps.tolist() == [0.75, 1, 0.75]
    assert arrays.uniforms.tolist() == [np.float32(sampled.uniform(3)), 0, np.float32(sampled.uniform(9))]
    assert not arrays.greedy


@pytest.mark.parametrize("count", [0, 3])
def test_greedy_rows_and_zero_rows_need_no_random_numbers(count: int) -> None:
    arrays = sampling_arrays([Sampler(SamplingParams(), [1])] * count, [5] * count)
    assert arrays.greedy
    for each in fields(arrays):
        assert getattr(arrays, each.name).shape == (count,)
    assert arrays.uniforms.tolist() == [0] * count


def test_extreme_parameters_stay_in_range_as_float32() -> None:
    extremes = [
        SamplingParams(temperature=5e-324, top_p=5e-324, top_k=2**80, seed=MAX_SEED),
        SamplingParams(temperature=1e308, top_p=1 - 2**-53, seed=0),
        SamplingParams(temperature=Fraction(1, 3), top_p=Fraction(1, 3)),  # type: ignore[arg-type]  # any real number
    ]
    arrays = sampling_arrays([Sampler(params, [1]) for params in extremes], [2**40, 0, 1])
    assert np.isfinite(arrays.temperatures).all()
    assert (arrays.temperatures > 0).all()
    assert ((arrays.top_ps > 0) & (arrays.top_ps <= 1)).all()
    assert ((arrays.uniforms >= 0) & (arrays.uniforms < 1)).all()
    assert arrays.top_ks.tolist() == [2**31 - 1, 0, 0]


class HighestNumber(Sampler):
    """Its random number is one that float32 rounds to 1."""

    def uniform(self, index: int) -> float:
        return 1 - 2**-53


def test_a_number_just_below_one_is_not_rounded_to_one() -> None:
    assert sampling_arrays([HighestNumber(SAMPLED, [1])], [0]).uniforms[0] == np.float32(1) - np.float32(2**-24)


@each_case(
    "change",
    [
        {"min_p": 0.1},
        {"logprobs": 0},
        {"repetition_penalty": 1.1},
        {"presence_penalty": -1.0},
        {"frequency_penalty": 0.1},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": (1,)},
        {"min_tokens": 1},
    ],
    ids=str,
)
def test_penalties_biases_log_probabilities_and_min_p_need_the_host(change: dict[str, Any]) -> None:
    assert sampled_on_device(SAMPLED)
    assert sampled_on_device(SamplingParams())
    assert not sampled_on_device(replace(SAMPLED, **change))


_FIRST_REQUEST = """
import sys
import numpy as np
from ingot.runtime.requests.sampler import Sampler
from ingot.runtime.asking.sampling_params import SamplingParams
before = set(sys.modules)
params = SamplingParams(temperature=1.0, top_k=3, top_p=0.9, seed=1, repetition_penalty=1.1, frequency_penalty=0.1)
Sampler(params, [1, 2]).sample(np.ones(8, np.float32), [3, 3])
print(*sorted(set(sys.modules) - before))
"""


def test_the_first_request_of_a_process_imports_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", _FIRST_REQUEST], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
