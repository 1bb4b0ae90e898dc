"""What goes to the device to choose tokens with, and who cannot be served so."""

from dataclasses import fields, replace
from fractions import Fraction

import numpy as np
import pytest

from ingot.runtime.sampler import Sampler
from ingot.runtime.sampling import MAX_SEED, SamplingParams
from ingot.runtime.token_draws import chosen_on_device, token_draws

DRAWN = SamplingParams(temperature=0.5, top_k=4, top_p=0.75, seed=7)


def test_a_row_holds_the_parameters_of_its_request_and_the_number_of_its_token() -> None:
    drawn, greedy = Sampler(DRAWN, [1]), Sampler(SamplingParams(seed=1), [1])
    draws = token_draws([drawn, greedy, drawn], [3, 0, 9])
    assert draws.temperatures.tolist() == [0.5, 0, 0.5]
    assert draws.top_ks.tolist() == [4, 0, 4]
    assert draws.top_ps.tolist() == [0.75, 1, 0.75]
    assert draws.uniforms.tolist() == [np.float32(drawn.uniform(3)), 0, np.float32(drawn.uniform(9))]
    assert not draws.greedy


@pytest.mark.parametrize("count", [0, 3])
def test_greedy_rows_and_no_rows_at_all_need_no_numbers(count: int) -> None:
    draws = token_draws([Sampler(SamplingParams(), [1])] * count, [5] * count)
    assert draws.greedy
    for each in fields(draws):
        assert getattr(draws, each.name).shape == (count,)
    assert draws.uniforms.tolist() == [0] * count


def test_extreme_parameters_stay_in_range_as_float32() -> None:
    extremes = [
        SamplingParams(temperature=5e-324, top_p=5e-324, top_k=2**80, seed=MAX_SEED),
        SamplingParams(temperature=1e308, top_p=1 - 2**-53, seed=0),
        SamplingParams(temperature=Fraction(1, 3), top_p=Fraction(1, 3)),  # type: ignore[arg-type]  # any real number
    ]
    draws = token_draws([Sampler(params, [1]) for params in extremes], [2**40, 0, 1])
    assert np.isfinite(draws.temperatures).all()
    assert (draws.temperatures > 0).all()
    assert ((draws.top_ps > 0) & (draws.top_ps <= 1)).all()
    assert ((draws.uniforms >= 0) & (draws.uniforms < 1)).all()
    assert draws.top_ks.tolist() == [2**31 - 1, 0, 0]


class HighestNumber(Sampler):
    """Draws a number that float32 would round to 1."""

    def uniform(self, index: int) -> float:
        return 1 - 2**-53


def test_a_number_just_below_one_is_not_rounded_to_one() -> None:
    assert token_draws([HighestNumber(DRAWN, [1])], [0]).uniforms[0] == np.float32(1) - np.float32(2**-24)


@pytest.mark.parametrize(
    "change", [{"min_p": 0.1}, {"logprobs": 0}, {"repetition_penalty": 1.1}, {"presence_penalty": -1.0}], ids=str
)
def test_penalties_log_probabilities_and_min_p_need_the_host(change: dict[str, float]) -> None:
    assert chosen_on_device(DRAWN)
    assert chosen_on_device(SamplingParams())
    assert not chosen_on_device(replace(DRAWN, **change))  # type: ignore[arg-type]  # every value has its field's type
