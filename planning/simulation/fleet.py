"""Replicas and their router, with autoscaling and failures, in one virtual time.

Replicas are independent between arrivals. So the replica that gets a request is advanced to the request's arrival, and
the others, where the router looks at them, past the requests that ended before. A decode run of a replica is cut by its
own arrivals alone.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Literal

from ingot.errors import UsageError
from ingot.planning.simulation.figures import EngineTotals
from ingot.planning.simulation.replica import EndedRequest, Replica, TimedRequest
from ingot.planning.simulation.routers import make_router

MakeReplica = Callable[[int, float], Replica]
"""Makes a replica from its number and the second at which it is ready."""

_DOWN_SECONDS = 120.0
MOST_REPLICAS = 4096
ScalingRule = Literal["queue-depth", "predictive"]


@dataclass(frozen=True, kw_only=True)
class Autoscaling:
    """How the number of replicas follows the load.

    rule             queue-depth: open requests over `open_per_replica`; predictive: those expected once a replica that
                     is started now is ready, by the growth of the rate of arrivals
    startup_seconds  from the decision to the first request that a new replica takes
    patience         decisions in a row for fewer replicas, before one is drained
    """

    rule: ScalingRule = "queue-depth"
    most: int = 8
    open_per_replica: float = 16.0
    startup_seconds: float = 120.0
    interval_seconds: float = 15.0
    patience: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.most <= MOST_REPLICAS:
            raise UsageError(f"the most replicas are {self.most}; it must be from 1 to {MOST_REPLICAS}")
        for name in ("open_per_replica", "interval_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {getattr(self, name):g}; it must be above 0")
        if not 0 <= self.startup_seconds < math.inf:
            raise UsageError(f"startup_seconds is {self.startup_seconds:g}; it must be at least 0")


@dataclass(frozen=True)
class ReplicaFailure:
    """A replica that ends at a moment with all that it serves, which is sent to others; it is ready again after."""

    seconds: float
    replica: int
    down_seconds: float = _DOWN_SECONDS


@dataclass(frozen=True)
class ReplicaDrain:
    """A replica that takes no more requests from a moment on, serves its open requests, and ends.

    down_seconds   from that moment until another takes its place
    """

    seconds: float
    replica: int
    down_seconds: float = _DOWN_SECONDS


class Fleet:
    """Serves a load with replicas.

    make       makes a replica
    count      replicas at the start, and the fewest of autoscaling
    places     keep which replica each request was sent to, until `take_place`
    """

    def __init__(
        self,
        make: MakeReplica,
        count: int,
        *,
        router: str = "least-connections",
        autoscaling: Autoscaling | None = None,
        failures: Iterable[ReplicaFailure] = (),
        drains: Iterable[ReplicaDrain] = (),
        places: bool = False,
    ) -> None:
        if not 1 <= count <= MOST_REPLICAS:
            raise UsageError(f"replicas is {count}; it must be from 1 to {MOST_REPLICAS}")
        if autoscaling and autoscaling.most < count:
            raise UsageError(f"the most replicas are {autoscaling.most}, fewer than the {count} at the start")
        self._make, self._fewest = make, count
        self._router = make_router(router)
        self.replicas = {number: make(number, 0.0) for number in range(count)}
        self._starts = dict.fromkeys(self.replicas, 0.0)
        self._draining: dict[int, Replica] = {}
        self._changes: list[tuple[float, int]] = []  # a heap: a moment before which nothing of a replica ends
        self._events: list[tuple[float, int, Callable[[float], Iterator[EndedRequest]]]] = []  # a heap
        self._num_events = 0
        self._held: deque[TimedRequest] = deque()  # without a replica that is ready
        self._places: dict[int, int] | None = {} if places else None
        self._next_number, self._num_starting = count, 0
        self._scaling = _Scaler(autoscaling) if autoscaling else None
        self.totals: list[EngineTotals] = []
        self.most_replicas = count
        for failure in failures:
            self._at(failure.seconds, partial(self._fail, failure))
        for drain in drains:
            self._at(drain.seconds, partial(self._drain, drain))
        if autoscaling:
            self._at(autoscaling.interval_seconds, self._scale)

    def serve(self, load: Iterable[TimedRequest]) -> Iterator[EndedRequest]:
        """Serve requests, which are in order of arrival; yield what ends."""
        for request in load:
            yield from self.offer(request)
        while self._events and (self._held or any(self.replicas.values())):
            # What is left ends without further arrivals, so that only failures and new replicas matter.
            yield from self._pass_events(self._events[0][0] + 1e-9, is_last=True)
        yield from self._finish()

    def offer(self, request: TimedRequest) -> Iterator[EndedRequest]:
        """Take a request at its arrival, which is not before the last; yield what has ended."""
        yield from self._pass_events(request.seconds)
        if self._scaling:
            self._scaling.num_arrived += 1
        yield from self._send(request, request.seconds)

    def settle(self, until: float) -> Iterator[EndedRequest]:
        """Let events before a moment happen, and requests that end before it end."""
        yield from self._pass_events(until)
        yield from self._settle(until)

    @property
    def num_held(self) -> int:
        """Requests that wait for a replica."""
        return len(self._held)

    @property
    def next_event(self) -> float:
        """When a replica fails, drains or starts next; infinite without any."""
        return self._events[0][0] if self._events else math.inf

    def take_held(self) -> list[TimedRequest]:
        """Return the requests that wait for a replica, and forget them."""
        held = list(self._held)
        self._held.clear()
        return held

    def take_place(self, request: TimedRequest) -> int:
        """Return which replica a request that has ended was sent to, and forget it."""
        assert self._places is not None
        return self._places.pop(request.lengths.line)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return sum(map(len, (*self.replicas.values(), *self._draining.values()))) + len(self._held)

    def _finish(self) -> Iterator[EndedRequest]:
        for replica in (*self.replicas.values(), *self._draining.values()):
            yield from replica.advance(math.inf)
        end = max((each.clock.now for each in (*self.replicas.values(), *self._draining.values())), default=0.0)
        for number, replica in [*self.replicas.items(), *self._draining.items()]:
            self._end(number, replica, end)

    def _end(self, number: int, replica: Replica, now: float) -> None:
        self.totals.append(EngineTotals.of(replica, max(now, replica.clock.now) - self._starts[number]))
        replica.engine.close()

    def _at(self, seconds: float, event: Callable[[float], Iterator[EndedRequest]]) -> None:
        self._num_events += 1
        heappush(self._events, (seconds, self._num_events, event))

    def _pass_events(self, until: float, *, is_last: bool = False) -> Iterator[EndedRequest]:
        while self._events and self._events[0][0] < until:
            seconds, _, event = heappop(self._events)
            if not (is_last and event == self._scale):
                yield from event(seconds)

    def _send(self, request: TimedRequest, now: float) -> Iterator[EndedRequest]:
        """Send a request to the replica that the router chooses."""
        if not self.replicas:
            self._held.append(request)
            return
        if not self._router.is_blind:
            yield from self._settle(now)
        number = self._router.choose(request, self.replicas)
        replica = self.replicas[number]
        if self._places is not None:
            self._places[request.lengths.line] = number
        yield from replica.advance(now)
        refused = replica.add(request, now)
        if refused:
            yield refused
        elif not self._router.is_blind:
            heappush(self._changes, (replica.clock.now, number))

    def _settle(self, now: float) -> Iterator[EndedRequest]:
        """Make what ends before now end in all replicas."""
        while self._changes and self._changes[0][0] < now:
            _, number = heappop(self._changes)
            replica = self.replicas.get(number) or self._draining.get(number)
            if replica is None:
                continue
            yield from replica.settle(now)
            if replica:
                heappush(self._changes, (replica.next_change(), number))
        if len(self._changes) > 4 * len(self.replicas) + 64:  # most are of moments that have moved
            self._changes = [(each.next_change(), number) for number, each in self.replicas.items() if each]
            heapify(self._changes)

    def _start(self, now: float) -> Iterator[EndedRequest]:
        """Have a new replica take requests."""
        number, self._next_number = self._next_number, self._next_number + 1
        self._num_starting -= 1
        self.replicas[number], self._starts[number] = self._make(number, now), now
        self.most_replicas = max(self.most_replicas, len(self.replicas))
        while self._held:
            yield from self._send(self._held.popleft(), now)

    def _fail(self, failure: ReplicaFailure, now: float) -> Iterator[EndedRequest]:
        replica = self.replicas.get(failure.replica)
        if replica is None:
            return
        yield from replica.advance(now)
        del self.replicas[failure.replica]
        self._router.forget(failure.replica)
        lost = replica.take_all()
        self._end(failure.replica, replica, now)
        self._replace_in(failure.down_seconds, now)
        for request in lost:
            yield from self._send(request, now)

    def _drain(self, drain: ReplicaDrain, now: float) -> Iterator[EndedRequest]:
        replica = self.replicas.get(drain.replica)
        if replica is None:
            return
        yield from replica.settle(now)
        self._draining[drain.replica] = self.replicas.pop(drain.replica)
        self._router.forget(drain.replica)
        self._replace_in(drain.down_seconds, now)

    def _replace_in(self, seconds: float, now: float) -> None:
        if seconds < math.inf:
            self._num_starting += 1
            self._at(now + seconds, self._start)

    def _scale(self, now: float) -> Iterator[EndedRequest]:
        scaling = self._scaling
        assert scaling
        for number, replica in [*self.replicas.items(), *self._draining.items()]:
            yield from replica.settle(now)
            if number in self._draining and not replica:
                self._end(number, self._draining.pop(number), now)
        wanted = scaling.wanted(self.num_open, now, self._fewest)
        current = len(self.replicas) + self._num_starting
        for _ in range(wanted - current):
            self._num_starting += 1
            self._at(now + scaling.options.startup_seconds, self._start)
        if scaling.may_drain(wanted < current) and len(self.replicas) > self._fewest:
            number = min(self.replicas, key=lambda each: (len(self.replicas[each]), -each))
            self._draining[number] = self.replicas.pop(number)
            self._router.forget(number)
        self._at(now + scaling.options.interval_seconds, self._scale)


class _Scaler:
    """Decides how many replicas there should be."""

    def __init__(self, options: Autoscaling) -> None:
        self.options = options
        self.num_arrived = 0
        self._rates: deque[float] = deque(maxlen=4)  # requests a second that arrived in each of the last intervals
        self._num_fewer = 0

    def wanted(self, num_open: int, now: float, fewest: int) -> int:
        """Return the number of replicas for the requests that are open, or will be."""
        options = self.options
        self._rates.append(self.num_arrived / options.interval_seconds)
        self.num_arrived = 0
        expected = float(num_open)
        if options.rule == "predictive" and len(self._rates) == self._rates.maxlen and self._rates[-1]:
            growth = (self._rates[-1] - self._rates[0]) / (len(self._rates) - 1) / options.interval_seconds
            ahead = self._rates[-1] + growth * options.startup_seconds
            expected *= max(0.0, ahead / self._rates[-1])
        return max(fewest, min(options.most, math.ceil(expected / options.open_per_replica)))

    def may_drain(self, is_fewer: bool) -> bool:
        """Return True after `patience` decisions in a row for fewer replicas, when one may be drained."""
        self._num_fewer = self._num_fewer + 1 if is_fewer else 0
        if self._num_fewer < self.options.patience:
            return False
        self._num_fewer = 0
        return True


def failures_of(texts: Sequence[str]) -> list[ReplicaFailure]:
    """Return failures from texts such as 600:0 or 600:0:120: second, replica, seconds until it is ready again."""
    return [ReplicaFailure(*each) for each in _moments(texts, "failure")]


def drains_of(texts: Sequence[str]) -> list[ReplicaDrain]:
    """Return drains from texts such as 600:0 or 600:0:120: second, replica, seconds until another is ready."""
    return [ReplicaDrain(*each) for each in _moments(texts, "drain")]


def _moments(texts: Sequence[str], kind: str) -> list[tuple[float, int, float]]:
    found = []
    for text in texts:
        try:
            seconds, replica, *down = text.split(":")
            values = [float(seconds), *map(float, down)]
            number = int(replica)
        except ValueError:
            values, number = [], -1
        if not 1 <= len(values) <= 2 or number < 0 or not all(0 <= each < math.inf for each in values):
            raise UsageError(f"the {kind} {text!r} must be SECOND:REPLICA or SECOND:REPLICA:DOWN_SECONDS, as 600:0:120")
        found.append((values[0], number, values[1] if len(values) > 1 else _DOWN_SECONDS))
    return found
