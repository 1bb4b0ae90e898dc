"""The advice for a model follows what binds it: weights at a low batch, KV at a long context, nothing without times."""

import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from ingot.builder.plan_advice import Advice, advise, advise_hosting
from ingot.planning.hardware import find_hardware
from ingot.planning.load import Load
from ingot.planning.model_shape import ModelShape
from ingot.planning.plan import ServingPlan, make_plan
from ingot.planning.service_levels import LevelBounds
from ingot.planning.step_model import StepModel, Term, Use
from tests.planning.shapes import dense_shape, subject

H100 = find_hardware("h100")


def test_one_request_gains_most_from_fewer_bytes_of_weights_a_token() -> None:
    found = {one.name: one for one in advise(make_plan(subject(), "h100", H100, Load(1, 256, 256)))}
    assert found["weights in 4 bits"].tpot > found["weights in 8 bits"].tpot > 1.2
    assert found["weights in 4 bits"].throughput > 1.5 * found["KV in 4 bits"].throughput
    assert found["weights in 4 bits"].sequences > 1


def test_long_contexts_in_a_batch_gain_from_fewer_bytes_of_kv() -> None:
    found = {one.name: one for one in advise(make_plan(subject(), "h100", H100, Load(24, 16000, 2000)))}
    assert found["KV in 8 bits"].sequences > 1.8
    assert found["KV in 8 bits"].tpot > 1.1


def test_what_is_done_already_is_left_out() -> None:
    found = advise(make_plan(subject(dense_shape(bits=4.5)), "h100", H100, Load(4)))
    assert found
    assert not any(one.name.startswith("weights in") for one in found)


def test_the_order_takes_the_largest_gain_on_top_and_training_last() -> None:
    found = advise(make_plan(subject(), "h100", H100, Load(8, 1024, 256)))
    order = [one for one in found if one.step]
    assert [one.step for one in order] == list(range(1, len(order) + 1))
    assert found[: len(order)] == order
    assert [one.effort == "training" for one in order] == sorted(one.effort == "training" for one in order)
    gains = [after.together / before.together for before, after in pairwise(order)]
    assert order[0].together == max(one.throughput for one in found if one.effort != "training")
    assert min(gains) >= 1.02
    assert all("ms a token, then" in one.why for one in order)
    alone = {one.name: one.throughput for one in order}
    assert math.prod(alone.values()) > order[-1].together, (
        "gains overlap, so that together they are less than all multiplied"
    )
    (fewer,) = (one for one in found if one.name == "KV in 8 bits")
    assert (fewer.step, fewer.why) == (0, f"nothing left to gain after step {len(order)}")


def _batch_with_a_level(shape: ModelShape) -> tuple[Advice, Advice, list[Advice]]:
    """Twice the batch without a service level and with one that is just met, and all advice with it."""
    load = Load(16, 1024, 256, drafted_tokens=4, acceptance=0.7)
    free = make_plan(subject(shape), "h100", H100, load)
    assert free.latency
    level = LevelBounds(words="tight", tpot=free.latency.upper["tpot"] * 1.001)
    found = advise(replace(free, level=("tight", level)))
    batches = [next(one for one in each if one.name == "twice the batch") for each in (advise(free), found)]
    return batches[0], batches[1], found


def test_a_step_that_misses_the_service_level_waits_until_others_make_room() -> None:
    without, batch, found = _batch_with_a_level(dense_shape(bits=4.5))
    assert without.step == 1
    assert batch.step > next(one.step for one in found if one.name == "smaller model")


def test_a_step_that_always_misses_the_service_level_says_by_how_much() -> None:
    without, batch, _ = _batch_with_a_level(dense_shape(layers=1, bits=4.5))
    assert without.step == 1
    assert batch.step == 0
    assert re.match(r"misses tight: TPOT [0-9.]+ ms, 1\.[0-9]+ times the bound of", batch.why)


def test_gains_of_a_measured_plan_compare_data_sheets_alone() -> None:
    slow = StepModel((Term("all", (Use("overhead", "steps", 1.0),)),), "measured", 0.1)
    plan = make_plan(subject(), "h100", H100, Load(8))
    assert advise(make_plan(subject(), "h100", H100, Load(8), measured=slow)) == advise(plan)


def _plan(**given: float) -> ServingPlan:
    return make_plan(subject(), "h100", H100, Load(8, 1024, 256), **given)  # type: ignore[arg-type]


def test_a_few_tokens_are_cheaper_by_an_api_and_many_on_own_devices() -> None:
    plan = _plan(price=2.0, api_price=0.001)
    few, many = (advise_hosting(plan, tokens) for tokens in (1e6, 1e9))
    assert (few.choice, many.choice) == ("API", "own devices")
    assert [band.cheaper for band in many.bands] == ["API", "API", "own", "own", "own"]
    # 2 dollars x 730 hours of one replica; 100 million / 1,000 x 0.001 x 30 days.
    assert few.bands[0].own == 1460.0
    assert few.bands[2].api == pytest.approx(3000.0)
    assert plan.latency
    best = max(one.tokens_per_second for one in plan.sweep)
    assert many.bands[3].replicas == math.ceil(1e9 / (best * 86400 * 0.5))
    assert "1,000,000,000 tokens a day cost" in many.reasons[0]


def test_data_decides_before_the_team_and_the_team_before_cost() -> None:
    plan = _plan(price=2.0, api_price=1e-6)
    assert advise_hosting(plan, 1e6, "restricted", 0).choice == "own devices"
    assert advise_hosting(plan, 1e6, "public", 3).choice == "API"
    assert advise_hosting(_plan(price=2.0, api_price=1.0), 1e9, "internal", 0).choice == "API"
    assert advise_hosting(plan, 1e6, "internal", 1).reasons[:2] == (
        "internal data needs a contract on storage and training with the API's provider",
        "one engineer cannot answer alerts around the clock: take one replica kind and managed machines",
    )


def test_what_is_not_given_does_not_decide_and_says_what_to_give() -> None:
    for plan, needed in (
        (make_plan(subject(), "l4", find_hardware("l4"), Load(1)), "give --price"),
        (_plan(price=2.0), "give the price of an API with --api-price"),
        (_plan(price=2.0, api_price=0.001), "give --tokens-a-day"),
    ):
        found = advise_hosting(plan)
        assert found.choice == "either"
        assert needed in found.reasons[-1]


def test_a_model_that_fits_nowhere_gets_none() -> None:
    huge = dense_shape(2000, 65536, 262144, 512, 8)
    assert advise(make_plan(subject(huge), "l4", find_hardware("l4"), Load(1, 1024, 128))) == []
