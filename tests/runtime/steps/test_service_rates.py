"""Rates that are measured, and the times to retry that follow."""

import math
import random

import pytest

from ingot.runtime.steps.service_rates import LEAST_RETRY_SECONDS, MOST_RETRY_SECONDS, Served, ServingRates
from tests.each_case import each_case


def measured(*, seconds: float, tokens: float, requests: float, steps: int = 100) -> ServingRates:
    """Rates after `steps` equal steps."""
    rates = ServingRates()
    rates.resume(0.0)
    for step in range(1, steps + 1):
        share = step / steps
        rates.record(Served(2 * tokens * share, tokens * share, requests * share), seconds * share)
    return rates


def test_rates_are_per_second_of_work() -> None:
    rates = measured(seconds=8, tokens=800, requests=4)
    assert rates.now.served == pytest.approx(Served(200, 100, 0.5))
    rates.resume(1000)  # idle for a long time
    rates.record(Served(1800, 900, 4.5), 1001)
    assert rates.now.served == pytest.approx(Served(200, 100, 0.5), rel=1e-6)


def test_recent_rates_count_more() -> None:
    rates = measured(seconds=20, tokens=200, requests=2)
    rates.record(Served(400 + 20_000, 200 + 10_000, 3), 40)
    assert 300 < rates.now.served.admitted_tokens < 500, "10 before, 500 now"


def test_the_time_to_retry_follows_the_rates() -> None:
    rates = measured(seconds=8, tokens=800, requests=4)
    assert rates.now.retry_seconds(num_requests=3) == pytest.approx(6)
    assert rates.now.retry_seconds(num_tokens=250) == pytest.approx(2.5)
    assert rates.now.retry_seconds(num_requests=1, num_tokens=1000) == pytest.approx(10)
    assert rates.seconds_to_admit(50) == pytest.approx(0.5)


def test_before_anything_is_measured_it_is_the_time_so_far_and_at_least_a_second() -> None:
    rates = ServingRates()
    assert (rates.now.retry_seconds(num_requests=1), rates.seconds_to_admit(10)) == (1, None)
    rates.resume(100)
    assert rates.now.retry_seconds(num_tokens=5) == 1
    for now in range(101, 108):
        rates.record(Served(10), now)
    assert rates.now.retry_seconds(num_requests=1) == 7


@each_case("seed", range(30))
def test_the_time_to_retry_is_never_zero_nor_without_end(seed: int) -> None:
    rng = random.Random(seed)
    rates, now, totals = ServingRates(), 0.0, Served()
    for _ in range(200):
        if rng.random() < 0.1:
            rates.resume(now)
        now += rng.choice([0.0, 1e-9, 0.01, 5.0, 1e6])
        totals = Served(*(total + rng.choice([0, 0, 1, 10**6]) for total in totals))
        rates.record(totals, now)
        seconds = rates.now.retry_seconds(num_requests=rng.randrange(3), num_tokens=rng.choice([0, 1, 10**9]))
        assert math.isfinite(seconds)
        assert LEAST_RETRY_SECONDS <= seconds <= MOST_RETRY_SECONDS
