"""Fleets: every request ends once, routers choose as they say, replicas come, fail and go."""

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from ingot.errors import UsageError
from ingot.planning.simulation.figures import Outcomes, figures_of, parse_service_level
from ingot.planning.simulation.fleet import Autoscaling, Fleet, ReplicaDrain, ReplicaFailure, drains_of, failures_of
from ingot.planning.simulation.replica import Replica, TimedRequest, serve
from ingot.planning.simulation.routers import ROUTERS
from tests.each_case import each_case
from tests.planning.simulation.engines import LinearTimes, request, shape_of


def make(number: int, start: float) -> Replica:
    return Replica(shape_of(max_sequences=8, num_blocks=600), LinearTimes(), start=start, seed=number)


def load(count: int, rate: float, prefixes: int = 8, seed: int = 1) -> list[TimedRequest]:
    rng, now, found = random.Random(seed), 0.0, []
    for line in range(1, count + 1):
        now += rng.expovariate(rate)
        found.append(request(now, 600, rng.randrange(5, 60), line, (rng.randrange(prefixes), 1000 + line)))
    return found


def lines(fleet: Fleet, requests: Iterable[TimedRequest]) -> Counter[int]:
    ended = list(fleet.serve(requests))
    assert all(each.completion and each.completion.finish_reason == "length" for each in ended)
    return Counter(each.request.lengths.line for each in ended)


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_each_request_ends_once_with_every_router(router: str) -> None:
    fleet = Fleet(make, 3, router=router)
    assert lines(fleet, load(80, 20.0)) == Counter(range(1, 81))
    assert sum(each.output_tokens for each in fleet.totals) == sum(
        each.lengths.output_tokens for each in load(80, 20.0)
    )
    assert all(each.output_tokens for each in fleet.totals)


def test_a_fleet_of_one_is_a_replica_alone() -> None:
    def times(ended: Iterable[Any]) -> list[float]:
        return sorted(each.completion.metrics.finish_seconds for each in ended)

    requests = load(60, 6.0)
    alone = times(serve(make(0, 0.0), requests))
    for router in ("round-robin", "least-connections"):
        assert times(Fleet(make, 1, router=router).serve(requests)) == pytest.approx(alone, abs=1e-9)


@pytest.mark.parametrize("router", ["prefix-reported", "prefix-predicted", "prefix-hybrid"])
def test_routers_that_know_prefixes_find_more_of_them(router: str) -> None:
    def cached(name: str) -> int:
        outcomes = Outcomes.of(Fleet(make, 4, router=name).serve(load(200, 12.0, prefixes=24)))
        return outcomes.counts["cached_tokens"]

    assert cached(router) > 1.15 * cached("round-robin")


def test_least_connections_and_cost_spare_a_busy_replica() -> None:
    long = [request(0.0, 600, 4000, 1)]
    short = [request(1.0 + line, 600, 5, line) for line in range(2, 30)]
    for router in ("least-connections", "cost"):
        fleet = Fleet(make, 2, router=router)
        assert lines(fleet, [*long, *short]) == Counter(range(1, 30))
        most = max(each.output_tokens for each in fleet.totals)
        assert most <= 4000 + 12 * 5, router
    fleet = Fleet(make, 2, router="round-robin")
    assert lines(fleet, [*long, *short]) == Counter(range(1, 30))
    assert max(each.output_tokens for each in fleet.totals) == 4000 + 14 * 5


def test_what_a_failing_replica_had_is_sent_to_others_and_it_comes_back() -> None:
    requests = load(120, 10.0)
    fleet = Fleet(make, 2, failures=[ReplicaFailure(2.0, 0, 3.0), ReplicaFailure(4.0, 1, 1.0)])
    assert lines(fleet, requests) == Counter(range(1, 121))
    assert len(fleet.totals) == 4


def test_a_drained_replica_serves_what_it_has_and_takes_no_more() -> None:
    requests = load(120, 10.0)
    for router in ("least-connections", "round-robin"):
        fleet = Fleet(make, 2, router=router, drains=[ReplicaDrain(2.0, 0, 3.0)])
        ended = list(fleet.serve(requests))
        assert Counter(each.request.lengths.line for each in ended) == Counter(range(1, 121))
        assert all(each.completion and each.completion.finish_reason == "length" for each in ended)
        # Nothing is computed twice.
        assert sum(each.output_tokens for each in fleet.totals) == sum(each.lengths.output_tokens for each in requests)
        assert len(fleet.totals) == 3
        assert list(fleet.replicas) == [1, 2]


def test_all_replicas_are_replaced_one_after_the_other_and_no_request_is_lost() -> None:
    requests = load(200, 10.0)
    fleet = Fleet(make, 3, drains=[ReplicaDrain(2.0 + 3 * number, number, 2.0) for number in range(3)])
    assert lines(fleet, requests) == Counter(range(1, 201))
    assert sorted(fleet.replicas) == [3, 4, 5]


def test_without_a_replica_requests_wait_for_the_next() -> None:
    fleet = Fleet(make, 1, failures=[ReplicaFailure(0.5, 0, 30.0)])
    ended = list(fleet.serve([request(0.0, 10, 2, 1), request(1.0, 10, 2, 2)]))
    first, second = (each.completion for each in ended)
    assert first
    assert second
    assert second.metrics.first_token_seconds is not None
    assert second.metrics.first_token_seconds > 30.5


@pytest.mark.parametrize("rule", ["queue-depth", "predictive"])
def test_replicas_are_started_under_load_and_drained_after(rule: Any) -> None:
    scaling = Autoscaling(rule=rule, most=6, open_per_replica=4, startup_seconds=5.0, interval_seconds=2.0, patience=2)
    busy, quiet = (
        load(600, 25.0, prefixes=100_000),
        [request(60.0 + 2 * line, 20, 2, 600 + line) for line in range(1, 15)],
    )
    fleet = Fleet(make, 1, autoscaling=scaling)
    assert lines(fleet, [*busy, *quiet]) == Counter(range(1, 615))
    assert 3 <= fleet.most_replicas <= 6
    assert len(fleet.replicas) < fleet.most_replicas
    alone = Outcomes.of(Fleet(make, 1).serve([*busy, *quiet]))
    scaled = Outcomes.of(Fleet(make, 1, autoscaling=scaling).serve([*busy, *quiet]))
    assert sum(scaled.ttft) < 0.7 * sum(alone.ttft)


@each_case(
    ("text", "message"),
    [
        ("x:0", "the failure 'x:0' must be SECOND:REPLICA"),
        ("5", "must be SECOND:REPLICA"),
        ("5:-1", "must be"),
        ("1:2:3:4", "must be"),
    ],
)
def test_failures_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        failures_of([text])


def test_failures_are_read() -> None:
    assert failures_of(["600:0", "5:1:2.5"]) == [ReplicaFailure(600, 0), ReplicaFailure(5, 1, 2.5)]
    assert drains_of(["600:0", "5:1:2.5"]) == [ReplicaDrain(600, 0), ReplicaDrain(5, 1, 2.5)]
    with pytest.raises(UsageError, match="the drain 'x' must be SECOND:REPLICA"):
        drains_of(["x"])


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="replicas is 0"):
        Fleet(make, 0)
    with pytest.raises(UsageError, match="unknown router 'nearest'"):
        Fleet(make, 1, router="nearest")
    with pytest.raises(UsageError, match="fewer than the 3 at the start"):
        Fleet(make, 3, autoscaling=Autoscaling(most=2))
    with pytest.raises(UsageError, match="startup_seconds is -1"):
        Autoscaling(startup_seconds=-1)


def test_figures_add_up() -> None:
    fleet = Fleet(make, 2)
    requests = load(100, 10.0)
    outcomes = Outcomes.of(fleet.serve(requests))
    level = parse_service_level("ttft=0.2,percentile=0.9")
    found = figures_of(outcomes, fleet.totals, level, num_requests=100, offered_rate=10.0, places=16)
    assert (found.num_finished, found.num_refused, found.num_timeouts) == (100, 0, 0)
    assert found.good_share == sum(each <= 0.2 for each in outcomes.ttft) / 100
    assert found.goodput == pytest.approx(100 * found.good_share / found.seconds)
    assert 0 < found.busy_share < 1
    assert found.ttft.p50 <= found.ttft.p90 <= found.ttft.p99
    assert found.most_open >= 1


def test_outputs_of_one_token_have_no_time_per_token() -> None:
    outcomes = Outcomes.of(Fleet(make, 1).serve([request(0.0, 10, 1, 1), request(1.0, 10, 3, 2)]))
    assert outcomes.num_good(parse_service_level("tpot=0.001")) == 1
    level = parse_service_level("tpot=0.001")
    found = figures_of(outcomes, [], level, num_requests=2, offered_rate=1.0, places=8)
    assert found.tpot.p50 > 0.001
