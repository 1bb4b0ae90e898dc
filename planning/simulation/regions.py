"""Regions: users and replicas in several places, and requests that cross from one to another.

A user's request goes to the region where the network and the expected time to its first token take the least together:
near ones, unless they are busy or have no replica that is ready. A region without one sends what waits there on.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from ingot.errors import UsageError, shown
from ingot.planning.simulation.figures import EngineTotals
from ingot.planning.simulation.fleet import MOST_REPLICAS, Fleet
from ingot.planning.simulation.routers import expected_ttft
from ingot.planning.simulation.timed_request import EndedRequest, ServedLengths, TimedRequest


@dataclass(frozen=True)
class UserRegion:
    """A place with users and replicas.

    latency_seconds   from its users and replicas to the exchange of all regions; from region to region takes both
    share             of the users, in proportion to those of the others
    """

    name: str
    replicas: int
    latency_seconds: float
    share: float = 1.0


class _Crossing(NamedTuple):
    """A request that has been sent: as its user did, from where, and to where."""

    request: TimedRequest
    home: int
    region: int


class RegionalFleet:
    """Serves a load with a fleet in each region. Their routers look at replicas, and measure how fast they serve."""

    def __init__(self, regions: Sequence[UserRegion], fleets: Sequence[Fleet], *, seed: int = 0) -> None:
        assert len(regions) == len(fleets) > 0
        self._regions, self._fleets = regions, fleets
        self._rng = random.Random(seed)
        self._shares = [each.share for each in regions]
        self._sent: dict[int, _Crossing] = {}
        # A heap of arrival, order of sending, region and request.
        self._on_the_way: list[tuple[float, int, int, TimedRequest]] = []
        self._num_sent = 0
        self.num_abroad = 0

    def serve(self, load: Iterable[TimedRequest]) -> Iterator[EndedRequest]:
        """Serve requests, which are in order of arrival; yield what ends, at the time at which its user sees it."""
        for request in load:
            yield from self._pass(request.seconds)
            (home,) = self._rng.choices(range(len(self._regions)), self._shares)
            self._send(request, home, home, request.seconds)
        while self._on_the_way or any(fleet.num_held for fleet in self._fleets):
            moment = min(fleet.next_event for fleet in self._fleets)
            if self._on_the_way:
                moment = min(moment, self._on_the_way[0][0])
            assert moment < inf, "requests wait for a replica, and none will start"
            yield from self._pass(moment + 1e-9)
        for fleet in self._fleets:
            yield from map(self._seen, fleet.serve(()))

    @property
    def totals(self) -> list[EngineTotals]:
        """Totals of all engines."""
        return [each for fleet in self._fleets for each in fleet.totals]

    @property
    def most_replicas(self) -> int:
        """The largest number of replicas at a time."""
        return sum(fleet.most_replicas for fleet in self._fleets)

    def _way(self, one: int, other: int) -> float:
        """Return the seconds from one region to another."""
        if one == other:
            return 0.0
        return self._regions[one].latency_seconds + self._regions[other].latency_seconds

    def _send(self, request: TimedRequest, home: int, place: int, now: float) -> None:
        """Send a request that is in some place to the region that should answer its user first."""

        def cost(region: int) -> float:
            replicas = self._fleets[region].replicas.values()
            served = min((expected_ttft(each, request) for each in replicas), default=inf)
            return self._way(place, region) + served + self._way(region, home)

        region = min(range(len(self._regions)), key=cost)
        crossing = self._sent.get(request.lengths.line)
        self._sent[request.lengths.line] = _Crossing(crossing.request if crossing else request, home, region)
        arrival = now + self._way(place, region)
        self._num_sent += 1
        heappush(self._on_the_way, (arrival, self._num_sent, region, request))

    def _pass(self, until: float) -> Iterator[EndedRequest]:
        """Let all that happens before a moment happen."""
        while self._on_the_way and self._on_the_way[0][0] < until:
            arrival, _, region, request = heappop(self._on_the_way)
            first = self._sent[request.lengths.line].request
            there = replace(request, seconds=arrival, waited_seconds=arrival - first.seconds + first.waited_seconds)
            yield from map(self._seen, self._fleets[region].offer(there))
        for fleet in self._fleets:
            yield from map(self._seen, fleet.settle(until))
        for region, fleet in enumerate(self._fleets):
            if fleet.num_held and any(other.replicas for other in self._fleets):
                for request in fleet.take_held():
                    self._send(request, self._sent[request.lengths.line].home, region, until)

    def _seen(self, ended: EndedRequest) -> EndedRequest:
        """Return a request as its user sees it end."""
        request, home, region = self._sent.pop(ended.request.lengths.line)
        self.num_abroad += home != region
        done, way = ended.completion, self._way(region, home)
        if done is None:
            return EndedRequest(request, None)
        times = done.metrics
        first = times.first_token_seconds
        metrics = replace(
            times,
            arrival_seconds=request.seconds,
            first_token_seconds=None if first is None else first + way,
            finish_seconds=times.finish_seconds + way,
        )
        return EndedRequest(request, ServedLengths(done.finish_reason, done.prompt_tokens, done.cached_tokens, metrics))


def regions_of(texts: Sequence[str]) -> tuple[UserRegion, ...]:
    """Return regions from texts such as eu:4:0.04 or eu:4:0.04:3. UsageError for others."""
    found: dict[str, UserRegion] = {}
    for text in texts:
        try:
            name, replicas, *numbers = text.split(":")
            region = UserRegion(name, int(replicas), *map(float, numbers))
        except (ValueError, TypeError):
            region = UserRegion("", 0, -1.0)
        is_valid = 1 <= region.replicas <= MOST_REPLICAS and 0 <= region.latency_seconds < 60 and 0 < region.share < 1e9
        if not is_valid or not region.name or region.name in found:
            raise UsageError(
                f"the region {shown(text)} must be NAME:REPLICAS:LATENCY[:SHARE], each name once, with 1 to"
                f" {MOST_REPLICAS} replicas and less than 60 seconds, as eu:4:0.04 or eu:4:0.04:3"
            )
        found[region.name] = region
    if len(found) == 1:
        raise UsageError(f"there is one region, {next(iter(found))}; give several, or --replicas")
    return tuple(found.values())
