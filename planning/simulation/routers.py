"""Routers of a fleet: which replica gets a request.

round-robin          each in turn
least-connections    the one with the fewest open requests
cost                 the one with the least expected time to first token, by the rates that replicas report
prefix-reported      the one with the longest cached prefix, as replicas report it, unless it is much busier
prefix-predicted     the same by what the router has sent to each, which needs no reports, and forgets late
prefix-hybrid        predicted, and corrected by what the replica that it chooses reports
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Protocol

from ingot.errors import UsageError, unknown
from ingot.planning.simulation.replica import Replica, TimedRequest

_REMEMBERED = 1 << 16  # blocks of a replica that a predicting router remembers
_BUSIER = 4  # open requests more than the fewest, above which a prefix does not count


class Router(Protocol):
    """Chooses replicas.

    is_blind     it needs no look at them, which then need not be simulated up to now
    reads_load   it reads how fast they serve
    """

    is_blind: bool
    reads_load: bool

    def choose(self, request: TimedRequest, replicas: Mapping[int, Replica]) -> int:
        """Return the number of a replica."""
        ...

    def forget(self, number: int) -> None:
        """Forget a replica that has ended."""
        ...


class RoundRobin:
    """Each in turn."""

    is_blind = True
    reads_load = False

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: TimedRequest, replicas: Mapping[int, Replica]) -> int:
        """Return the number of the next replica."""
        following = self._last + 1
        if following not in replicas:
            following = min((number for number in replicas if number > self._last), default=min(replicas))
        self._last = following
        return following

    def forget(self, number: int) -> None:
        """Keep nothing of it."""


class LeastConnections:
    """The fewest open requests; of several the one that is the longest in the fleet."""

    is_blind = False
    reads_load = False

    def choose(self, request: TimedRequest, replicas: Mapping[int, Replica]) -> int:
        """Return the number of the least busy replica."""
        counts = [len(replica.open_requests) for replica in replicas.values()]
        return next(islice(replicas, counts.index(min(counts)), None))

    def forget(self, number: int) -> None:
        """Keep nothing of it."""


class LeastCost:
    """The least expected time to first token, by the estimate that the server's admission uses."""

    is_blind = False
    reads_load = True

    def choose(self, request: TimedRequest, replicas: Mapping[int, Replica]) -> int:
        """Return the number of the replica that should answer first."""

        def cost(number: int) -> tuple[float, int, int]:
            return expected_ttft(replicas[number], request), len(replicas[number]), number

        return min(replicas, key=cost)

    def forget(self, number: int) -> None:
        """Keep nothing of it."""


def expected_ttft(replica: Replica, request: TimedRequest) -> float:
    """Return the seconds until a request that arrives now would have its first token, by the rates of the replica."""
    engine = replica.engine
    load = engine.load
    return load.ttft_seconds(
        num_open=len(replica),
        num_waiting=load.num_waiting,
        num_tokens=engine.num_waiting_tokens + request.lengths.prompt_tokens,
    )


class LongestPrefix:
    """The longest cached prefix, among replicas that are not much busier than the idlest.

    predicts   by the router's own memory of what it sent
    reports    by what replicas have cached
    """

    is_blind = False
    reads_load = False

    def __init__(self, *, predicts: bool, reports: bool) -> None:
        self._predicts, self._reports = predicts, reports
        self._sent: dict[int, OrderedDict[int, None]] = {}

    def choose(self, request: TimedRequest, replicas: Mapping[int, Replica]) -> int:
        """Return the number of a replica."""
        idlest = min(map(len, replicas.values()))
        allowed = [number for number, each in replicas.items() if len(each) <= idlest + _BUSIER]
        lengths = {number: self._length(number, replicas[number], request) for number in allowed}
        best = max(allowed, key=lambda number: (lengths[number], -len(replicas[number]), -number))
        if self._predicts:
            if self._reports and lengths[best] > self._reported(replicas[best], request):
                self.forget(best)  # it has evicted what it was chosen for
            self._remember(best, request)
        return best

    def _length(self, number: int, replica: Replica, request: TimedRequest) -> int:
        if not self._predicts:
            return self._reported(replica, request)
        sent: Mapping[int, None] = self._sent.get(number, {})
        count = 0
        for block in request.lengths.blocks:
            if block not in sent:
                break
            count += 1
        return count

    def _reported(self, replica: Replica, request: TimedRequest) -> int:
        """Return the leading blocks of the request that a replica has cached."""
        return replica.cached_tokens(request) // request.block_tokens if request.lengths.blocks else 0

    def _remember(self, number: int, request: TimedRequest) -> None:
        sent = self._sent.setdefault(number, OrderedDict())
        for block in request.lengths.blocks:
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > _REMEMBERED:
            sent.popitem(last=False)

    def forget(self, number: int) -> None:
        """Forget what was sent to a replica."""
        self._sent.pop(number, None)


ROUTERS: Mapping[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-connections": LeastConnections,
    "cost": LeastCost,
    "prefix-reported": lambda: LongestPrefix(predicts=False, reports=True),
    "prefix-predicted": lambda: LongestPrefix(predicts=True, reports=False),
    "prefix-hybrid": lambda: LongestPrefix(predicts=True, reports=True),
}


def make_router(name: str) -> Router:
    """Return a router. UsageError for an unknown name."""
    if name not in ROUTERS:
        raise UsageError(unknown("router", name, ROUTERS, "routers"))
    return ROUTERS[name]()
