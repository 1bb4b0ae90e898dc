"""Costs of steps with drafts: relative to plain steps, robust to single wrong measurements."""

import pytest

from ingot.runtime.speculation.step_times import StepTimes


def measured(plain: float = 0.01, **costs: float) -> StepTimes:
    times = StepTimes()
    for _ in range(5):
        times.observe_plain(1, plain)
        for name, cost in costs.items():
            times.observe(1, int(name[1:]), plain * cost)
    return times


def test_costs_are_measured_in_plain_steps_with_straight_lines_between() -> None:
    costs = measured(_1=1.2, _4=1.8).costs(1, 6)
    assert costs[:5] == pytest.approx([1, 1.2, 1.4, 1.6, 1.8])
    assert costs[6] == pytest.approx(1.8 + 2 * 0.2), "beyond, the average slope goes on"


def test_nothing_is_known_before_plain_steps_are_measured() -> None:
    times = StepTimes()
    times.observe(1, 2, 0.5)
    assert times.plain_seconds(1) is None
    assert times.costs(1, 2) == pytest.approx(StepTimes().costs(1, 2))
    for _ in range(3):
        times.observe_plain(1, 0.25)
    assert times.plain_seconds(1) == 0.25


def test_the_first_step_of_a_kind_and_single_slow_ones_do_not_count() -> None:
    times = measured(_2=1.5)
    times.observe(1, 2, 9.0)
    times.observe_plain(1, 9.0)
    assert times.costs(1, 2)[2] == pytest.approx(1.5)
    times.observe(1, 8, 9.0)
    assert times.costs(1, 8)[8] == pytest.approx(1 + 8 * 0.25)


def test_numbers_of_sequences_have_costs_of_their_own_and_similar_ones_share_them() -> None:
    times = measured(_1=3.0)
    assert times.costs(2, 1)[1] < 1.1
    for _ in range(3):
        times.observe_plain(33, 1.0)
    assert times.plain_seconds(34) == 1.0
    assert times.plain_seconds(40) is None


def test_costs_follow_a_machine_that_changes() -> None:
    times = measured(_1=1.2)
    for _ in range(9):
        times.observe_plain(1, 0.02)
        times.observe(1, 1, 0.05)
    assert times.plain_seconds(1) == 0.02
    assert times.costs(1, 1)[1] == pytest.approx(2.5)
