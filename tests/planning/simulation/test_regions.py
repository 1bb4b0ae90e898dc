"""Regions: the near one serves, a far one when that is busy or down, and its users see the network's time."""

from collections import Counter
from typing import Any

import pytest

from ingot.errors import UsageError
from ingot.planning.simulation.deployment import Deployment
from ingot.planning.simulation.disaggregation import ReplicaPools
from ingot.planning.simulation.fleet import ReplicaFailure
from ingot.planning.simulation.regions import RegionalFleet, UserRegion, regions_of
from ingot.planning.simulation.timed_request import EndedRequest, TimedRequest
from ingot.planning.simulation.traffic import RequestSizes, parse_traffic
from tests.each_case import each_case
from tests.planning.simulation.engines import LinearTimes, request, shape_of


def served(
    load: list[TimedRequest], *regions: UserRegion, failures: tuple[ReplicaFailure, ...] = (), **options: Any
) -> tuple[list[EndedRequest], RegionalFleet]:
    deployment = Deployment(
        shape=shape_of(max_sequences=4), times=LinearTimes(), regions=regions, failures=failures, **options
    )
    fleet = deployment.fleet()
    assert isinstance(fleet, RegionalFleet)
    ended = list(fleet.serve(load))
    assert Counter(each.request.lengths.line for each in ended) == Counter(each.lengths.line for each in load)
    assert {each.request.lengths.line: each.request for each in ended} == {each.lengths.line: each for each in load}
    return ended, fleet


def traffic(rate: float, count: int = 150) -> list[TimedRequest]:
    sizes = RequestSizes(prompt_tokens=100, output_tokens=30)
    return list(parse_traffic(f"poisson:{rate}", sizes=sizes, count=count, context_tokens=8192))


def test_a_region_that_is_idle_serves_its_own_users_without_delay() -> None:
    ended, fleet = served([request(0.0, 100, 5)], UserRegion("eu", 1, 0.5), UserRegion("us", 1, 0.5))
    times = LinearTimes()
    first = times.fixed + times.sequence + 100 * times.token + times.context * 100 * 101 / 2
    assert ended[0].completion
    assert ended[0].completion.metrics.first_token_seconds == pytest.approx(first)
    assert fleet.num_abroad == 0


def test_a_region_without_a_replica_sends_its_requests_to_another_and_back() -> None:
    regions = UserRegion("eu", 1, 0.1, 1e6), UserRegion("us", 1, 0.2, 1e-6)
    load = [request(1.0, 100, 5, 1), request(2.0, 100, 5, 2)]
    ended, fleet = served(load, *regions, failures=(ReplicaFailure(0.5, 0, 100.0),))
    assert fleet.num_abroad == 2
    for each in ended:
        assert each.completion
        metrics = each.completion.metrics
        assert metrics.arrival_seconds == each.request.seconds
        assert metrics.ttft_seconds == pytest.approx(0.6 + 0.0072, abs=1e-3)
        assert metrics.queue_seconds == pytest.approx(0.3)


def test_what_a_region_has_when_it_fails_is_served_elsewhere() -> None:
    load = traffic(20)
    middle = load[75].seconds
    failures = (ReplicaFailure(middle, 0, 1000.0), ReplicaFailure(middle, 1, 1000.0))
    ended, fleet = served(load, UserRegion("eu", 2, 0.05), UserRegion("us", 2, 0.05), failures=failures)
    assert all(each.completion and each.completion.finish_reason == "length" for each in ended)
    assert fleet.num_abroad > 20
    last = max(each.completion.metrics.finish_seconds for each in ended if each.completion)
    assert last < middle + 100


def test_without_any_replica_requests_wait_for_the_first_that_is_ready() -> None:
    failures = (ReplicaFailure(0.5, 0, 30.0), ReplicaFailure(0.5, 1, 10.0))
    ended, _ = served([request(1.0, 100, 5, 1)], UserRegion("eu", 1, 0.1), UserRegion("us", 1, 0.1), failures=failures)
    assert ended[0].completion
    assert 9.5 < ended[0].completion.metrics.finish_seconds < 12


def test_a_busy_region_sends_requests_to_one_that_is_near_and_keeps_them_from_one_that_is_far() -> None:
    load = traffic(30, 300)
    abroad, delays = {}, {}
    for latency in (0.02, 30.0):
        ended, fleet = served(load, UserRegion("eu", 1, latency, 1e6), UserRegion("us", 3, latency, 1e-6))
        abroad[latency] = fleet.num_abroad
        delays[latency] = sum(each.completion.metrics.ttft_seconds or 0 for each in ended if each.completion)
    assert abroad[0.02] > 50
    assert abroad[30.0] == 0
    assert delays[0.02] < delays[30.0]


@each_case("text", ["eu", "eu:1", "eu:0:0.1", ":1:0.1", "eu:1:-1", "eu:1:0.1:0", "eu:1:0.1:1:1", "eu:x:0.1", "eu:1:99"])
def test_regions_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"must be NAME:REPLICAS:LATENCY"):
        regions_of([text, "us:1:0.1"])


def test_regions_are_read_and_contradictions_refused() -> None:
    assert regions_of(["eu:4:0.04", "us:2:0.1:3"]) == (UserRegion("eu", 4, 0.04), UserRegion("us", 2, 0.1, 3.0))
    assert regions_of([]) == ()
    with pytest.raises(UsageError, match="must be NAME"):
        regions_of(["eu:1:0.1", "eu:1:0.1"])
    with pytest.raises(UsageError, match="there is one region, eu"):
        regions_of(["eu:1:0.1"])
    regions = regions_of(["eu:1:0.1", "us:1:0.1"])
    with pytest.raises(UsageError, match="leave out what changes that"):
        Deployment(shape=shape_of(), times=LinearTimes(), regions=regions, disaggregation=ReplicaPools(1, 1))
    with pytest.raises(UsageError, match="the router round-robin does not look at replicas"):
        Deployment(shape=shape_of(), times=LinearTimes(), regions=regions, router="round-robin")
