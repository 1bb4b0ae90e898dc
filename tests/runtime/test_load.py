"""Rates that are measured, the times to retry that follow, and requests that an overloaded engine refuses."""

import math
import pickle
import random
from typing import Any

import pytest

from ingot.errors import EngineBusy, Overloaded
from ingot.runtime.engine import Engine
from ingot.runtime.load import LEAST_RETRY_SECONDS, MOST_RETRY_SECONDS, Served, ServingRates
from ingot.runtime.request_options import RequestOptions
from ingot.runtime.sampling import SamplingParams
from tests.runtime.steps.test_deadlines import Clock
from tests.simulators.fake_executor import FakeExecutor


def measured(*, seconds: float, tokens: float, requests: float, steps: int = 100) -> ServingRates:
    """Rates after `steps` equal steps."""
    rates = ServingRates()
    rates.resume(0.0)
    for step in range(1, steps + 1):
        share = step / steps
        rates.record(Served(2 * tokens * share, tokens * share, requests * share), seconds * share)
    return rates


class SlowExecutor(FakeExecutor):
    """Takes one second for a step."""

    clock: Clock

    def forward(self, batch: Any) -> Any:
        self.clock.now += 1
        return super().forward(batch)


def engine_of(clock: Clock, **options: Any) -> Engine:
    executor = SlowExecutor()
    executor.clock = clock
    return Engine(executor, clock=clock, **options)


def test_rates_are_per_second_of_work() -> None:
    rates = measured(seconds=8, tokens=800, requests=4)
    assert rates.per_second == pytest.approx(Served(200, 100, 0.5))
    rates.resume(1000)  # idle for a long time
    rates.record(Served(1800, 900, 4.5), 1001)
    assert rates.per_second == pytest.approx(Served(200, 100, 0.5), rel=1e-6)


def test_recent_rates_count_more() -> None:
    rates = measured(seconds=20, tokens=200, requests=2)
    rates.record(Served(400 + 20_000, 200 + 10_000, 3), 40)
    assert 300 < rates.per_second.admitted_tokens < 500, "10 before, 500 now"


def test_the_time_to_retry_follows_the_rates() -> None:
    rates = measured(seconds=8, tokens=800, requests=4)
    assert rates.retry_seconds(num_requests=3) == pytest.approx(6)
    assert rates.retry_seconds(num_tokens=250) == pytest.approx(2.5)
    assert rates.retry_seconds(num_requests=1, num_tokens=1000) == pytest.approx(10)
    assert rates.seconds_to_admit(50) == pytest.approx(0.5)


def test_before_anything_is_measured_it_is_the_time_so_far_and_at_least_a_second() -> None:
    rates = ServingRates()
    assert (rates.retry_seconds(num_requests=1), rates.seconds_to_admit(10)) == (1, None)
    rates.resume(100)
    assert rates.retry_seconds(num_tokens=5) == 1
    for now in range(101, 108):
        rates.record(Served(10), now)
    assert rates.retry_seconds(num_requests=1) == 7


@pytest.mark.parametrize("seed", range(30))
def test_the_time_to_retry_is_never_zero_nor_without_end(seed: int) -> None:
    rng = random.Random(seed)
    rates, now, totals = ServingRates(), 0.0, Served()
    for _ in range(200):
        if rng.random() < 0.1:
            rates.resume(now)
        now += rng.choice([0.0, 1e-9, 0.01, 5.0, 1e6])
        totals = Served(*(total + rng.choice([0, 0, 1, 10**6]) for total in totals))
        rates.record(totals, now)
        seconds = rates.retry_seconds(num_requests=rng.randrange(3), num_tokens=rng.choice([0, 1, 10**9]))
        assert math.isfinite(seconds)
        assert LEAST_RETRY_SECONDS <= seconds <= MOST_RETRY_SECONDS


def test_more_than_max_requests_are_refused_with_the_time_to_retry() -> None:
    with engine_of(Clock(), max_requests=2) as engine:
        for length in (8, 12):
            engine.generate([1], SamplingParams(max_tokens=length))
        for number in range(2):
            engine.add([number], SamplingParams(max_tokens=10))
        with pytest.raises(
            Overloaded, match=r"2 unfinished requests, as many as max_requests allows; try again in about \d+\.\d s"
        ) as refusal:
            engine.add([3])
        assert 7 < refusal.value.retry_after_seconds < 12, "one request took 8 s, the next 12 s"
        assert isinstance(refusal.value, EngineBusy)
        assert pickle.loads(pickle.dumps(refusal.value)).retry_after_seconds == refusal.value.retry_after_seconds
        assert engine.metrics().num_refused == 1


def test_waiting_prompt_tokens_are_bounded_but_one_request_alone_may_always_wait() -> None:
    with engine_of(Clock(), max_waiting_tokens=10, max_sequences=1) as engine:
        first = engine.add([1] * 20, SamplingParams(max_tokens=4))
        with pytest.raises(
            Overloaded, match="20 prompt tokens wait, and the request has 1; max_waiting_tokens is 10; try"
        ):
            engine.add([1])
        engine.step()
        for _ in range(2):
            engine.add([1] * 5, SamplingParams(max_tokens=4))
        with pytest.raises(Overloaded) as refusal:
            engine.add([1] * 5)
        assert refusal.value.retry_after_seconds == pytest.approx(5 / 20), "5 tokens too many; 20 in the first second"
        assert engine.abort(first)
        engine.step()
        engine.add([1] * 5)
        assert engine.metrics().waiting_prompt_tokens == 10


def test_a_request_that_cannot_be_served_in_time_is_refused_at_once_if_the_option_is_set() -> None:
    late = RequestOptions(timeout_seconds=2)
    for rejects in (True, False):
        with engine_of(Clock(), max_sequences=1, reject_late=rejects) as engine:
            engine.generate([1] * 10, SamplingParams(max_tokens=10))  # 10 prompt tokens in 10 s
            for _ in range(3):
                engine.add([1] * 10, SamplingParams(max_tokens=10))
            engine.add([1], options=RequestOptions(timeout_seconds=60))
            engine.add([1], options=RequestOptions(timeout_seconds=2, priority=-1))
            if not rejects:
                engine.add([1], options=late)
                continue
            message = r"32 prompt tokens wait before the request, about \d\d\.\d s of work; its timeout leaves 2"
            with pytest.raises(Overloaded, match=message) as refusal:
                engine.add([1], options=late)
            assert 20 < refusal.value.retry_after_seconds < 50


def test_a_long_prompt_with_nothing_before_it_is_never_late() -> None:
    with engine_of(Clock(), reject_late=True) as engine:
        engine.generate([1], SamplingParams(max_tokens=10))  # by the rate of arrivals, 30 tokens would take 300 s
        engine.add([1] * 30, options=RequestOptions(timeout_seconds=5))
