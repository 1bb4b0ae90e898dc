"""A choice is the cheapest that meets the level at worst, has one answer each time, and says why nothing meets it."""

import math
from dataclasses import replace

import pytest

from ingot.errors import UsageError
from ingot.planning.choice.search import Limits, choose
from ingot.planning.service_levels import LevelBounds
from ingot.planning.simulation.traffic import Traffic
from tests.planning.choice.questions import found, question
from tests.planning.shapes import dense_shape, subject


def test_the_answer_is_the_cheapest_that_keeps_the_level_and_the_next_differ_in_kind() -> None:
    asked = question()
    choice = choose(found("a100", "h100"), asked)
    assert choice.best
    assert [one.price for one in choice.answers] == sorted(one.price for one in choice.answers)
    assert len({one.configuration.kind for one in choice.answers}) == len(choice.answers) == 3
    for answer in choice.answers:
        assert answer.worst.good_share >= asked.level.percentile
        assert not answer.worst.is_saturated
        assert answer.expected.ttft.p99 <= answer.worst.ttft.p99
        assert answer.rate * answer.replicas == pytest.approx(asked.traffic.rate)
    # One A100 serves it, and of two variants that cost the same the less quantized wins.
    best = choice.best
    assert (best.configuration.on.name, best.configuration.variant.recipe, best.replicas) == ("a100", "fp16-cuda", 1)
    assert choice.needs(choice.answers[1]) == "costs the same; the answer has weights of 16 bits instead of 5.31"
    other = choice.answers[2]
    assert other.configuration.on.name == "h100"
    assert choice.needs(other) == "$1.30 a device and hour instead of $3.00"
    again = choose(found("a100", "h100"), question())
    assert [(one.configuration, one.replicas, one.worst) for one in again.answers] == [
        (one.configuration, one.replicas, one.worst) for one in choice.answers
    ]


def test_more_requests_take_more_replicas_and_one_replica_less_fails() -> None:
    asked = question(60.0, requests=200)
    (first, *_) = choose([found("a100")[0]], asked).answers
    assert first.replicas > 1
    fewer = first.configuration.deployment(1, at_worst=True)
    figures = fewer.run(asked.traffic.at(asked.traffic.rate / (first.replicas - 1)), asked.level)
    assert figures.good_share < asked.level.percentile or figures.is_saturated


def test_what_holds_no_sequence_is_never_simulated() -> None:
    large = subject(dense_shape(80, 8192, 28672, 64, 8))
    big = [replace(one, variant=replace(one.variant, subject=large)) for one in found("l4")]
    choice = choose(big, question())
    assert not choice.answers
    assert choice.num_requests == 0
    assert choice.num_pruned == len(big)
    assert all(miss.factor == math.inf for miss in choice.misses)
    assert "holds no sequence" in choice.misses[0].reason


def test_a_bound_that_nothing_meets_is_named_with_the_nearest_that_passes() -> None:
    level = LevelBounds(words="too quick", tpot=0.001, percentile=0.9)
    choice = choose(found("a100"), question(level=level))
    assert not choice.answers
    nearest = choice.misses[0]
    assert nearest.reason.startswith("even alone, TPOT")
    assert "times the bound of 1 ms" in nearest.reason
    assert nearest.factor == min(miss.factor for miss in choice.misses) > 1
    passing = LevelBounds(words="slow enough", tpot=0.001 * nearest.factor * 2, percentile=0.9)
    assert choose(found("a100"), question(level=passing)).best


def test_limits_that_nothing_keeps_say_how_many_replicas_or_dollars_do() -> None:
    few = choose(found("a100")[:1], question(60.0, requests=100, limits=Limits(replicas=1)))
    assert not few.answers
    assert "replicas" in few.misses[0].reason
    needed = int(few.misses[0].nearest.split(" ")[1].rstrip(","))
    assert choose(found("a100")[:1], question(60.0, requests=100, limits=Limits(replicas=needed))).best
    poor = choose(found("a100")[:1], question(limits=Limits(budget=1.0)))
    assert poor.misses[0].nearest.startswith("--budget 1.30")
    assert poor.misses[0].factor == pytest.approx(1.3)


def test_a_question_without_a_rate_or_with_empty_limits_is_refused() -> None:
    asked = question()
    with pytest.raises(UsageError, match="has no rate; a choice needs requests that arrive over time"):
        type(asked)(Traffic("at-once", 0.0, asked.traffic.make), asked.level)
    with pytest.raises(UsageError, match="replicas is 0; it must be from 1 to 1024"):
        Limits(0)
    with pytest.raises(UsageError, match="budget is 0; it must be above 0"):
        Limits(budget=0)
    with pytest.raises(UsageError, match="nothing to choose from"):
        choose([], asked)
