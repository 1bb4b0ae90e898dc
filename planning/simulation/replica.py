"""One simulated engine that requests are sent to, and its clock."""

from collections.abc import Callable, Iterable, Iterator

from ingot.errors import Overloaded, RequestError
from ingot.planning.simulation.length_engine import LengthEngine
from ingot.planning.simulation.simulated_executor import EngineShape, StepPredictor, VirtualClock
from ingot.planning.simulation.stepped_engine import SteppedEngine
from ingot.planning.simulation.timed_request import EndedRequest as EndedRequest
from ingot.planning.simulation.timed_request import StepWatch
from ingot.planning.simulation.timed_request import TimedRequest as TimedRequest
from ingot.runtime.forward_batch import ForwardBatch
from ingot.runtime.options import EngineOptions


class Replica:
    """A simulated engine that requests are sent to. Its clock is ahead of the arrivals by less than a step.

    observe           called with each batch, which is then made as the engine makes it, with tokens
    skips             keep lengths alone where nothing else is looked at: no batch, no draft, no tier
    shares_prefixes   whether requests begin alike
    reports_load      whether a router reads how fast it serves
    watch             called with each step, or decode run, that has been made
    """

    def __init__(
        self,
        shape: EngineShape,
        times: StepPredictor,
        options: EngineOptions | None = None,
        *,
        timeout_seconds: float | None = None,
        start: float = 0.0,
        seed: int = 0,
        observe: Callable[[ForwardBatch], object] | None = None,
        skips: bool = True,
        shares_prefixes: bool = True,
        reports_load: bool = True,
        watch: StepWatch | None = None,
    ) -> None:
        self.clock, options = VirtualClock(start), options or EngineOptions()
        self.engine: LengthEngine | SteppedEngine
        if skips and observe is None and keeps_lengths_alone(shape, options):
            self.engine = LengthEngine(
                shape,
                times,
                options,
                self.clock,
                shares_prefixes=shares_prefixes,
                reports_load=reports_load,
                watch=watch,
            )
        else:
            self.engine = SteppedEngine(shape, times, options, self.clock, seed=seed, observe=observe, watch=watch)
        self.open_requests = self.engine.open_requests
        self._timeout_seconds = timeout_seconds
        self.num_refused = 0

    def __len__(self) -> int:
        """Open requests."""
        return len(self.open_requests)

    def add(self, request: TimedRequest, now: float | None = None) -> EndedRequest | None:
        """Queue a request, which arrives now if not at its time; it has ended where the engine refuses it."""
        engine = self.engine
        if not self.open_requests:
            self.clock.now = max(self.clock.now, request.seconds if now is None else now)
        try:
            engine.send(request, self._timeout_seconds)
        except (Overloaded, RequestError):  # RequestError: more than the whole pool holds
            self.num_refused += 1
            return EndedRequest(request, None)
        return None

    def advance(self, until: float) -> list[EndedRequest]:
        """Make the steps that begin before a moment; return what ends in them."""
        return self.engine.advance(until)

    def settle(self, until: float) -> list[EndedRequest]:
        """Make what ends before a moment end, and no other step: a decode run that is cut costs another event."""
        return self.engine.settle(until)

    def next_change(self) -> float:
        """Return a moment before which no request ends; infinite without any."""
        return self.engine.next_change()

    def take_all(self) -> list[TimedRequest]:
        """End all open requests, as a replica that fails does, and return them."""
        return self.engine.take_all()

    def cached_tokens(self, request: TimedRequest) -> int:
        """Return the leading tokens of a request that the KV pool has cached."""
        return self.engine.cached_tokens(request)


def keeps_lengths_alone(shape: EngineShape, options: EngineOptions) -> bool:
    """Return whether lengths decide all that an engine does, which drafts, tiers and a slow part prevent."""
    return not shape.acceptance and not shape.slow_blocks and not options.kv_host_bytes // shape.kv.block_bytes


def serve(replica: Replica, load: Iterable[TimedRequest]) -> Iterator[EndedRequest]:
    """Serve a load, which is in order of arrival, with one replica; yield what ends."""
    for request in load:
        yield from replica.advance(request.seconds)
        refused = replica.add(request)
        if refused:
            yield refused
    yield from replica.advance(float("inf"))
