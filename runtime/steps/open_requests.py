"""The requests of an engine that have not ended: added, ended early, expired or failed, with the outputs they gave.

A request has one sequence, or several: its choices (`choice_groups`) or its beams (`beams`). Sequences are found by
their ids here; what ends one also frees its blocks and what the drafter keeps for it.
"""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from ingot.errors import EngineError, RequestError
from ingot.runtime.asking.outputs import EarlyEnd, OutputQueues, RequestOutput
from ingot.runtime.requests.request import Request
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.sequence import SequenceState
from ingot.runtime.speculation.speculator import Speculator
from ingot.runtime.steps.beams import BeamGroup
from ingot.runtime.steps.choice_groups import ChoiceGroup
from ingot.runtime.steps.metrics import MetricsRegistry
from ingot.runtime.steps.service_rates import ServingRates

_SPARE_DEADLINES = 64


class OpenRequests:
    """Unfinished requests of one scheduler. `by_sequence` has one for each sequence: each choice, each beam."""

    def __init__(
        self, scheduler: Scheduler, *, clock: Callable[[], float], speculator: Speculator | None = None
    ) -> None:
        self._scheduler = scheduler
        self._speculator = speculator
        self._clock = clock
        self.by_sequence: dict[int, Request] = {}
        self.searches: dict[int, BeamGroup] = {}  # by request id
        self.families: dict[int, ChoiceGroup] = {}  # by request id
        self.deadlines: list[tuple[float, int]] = []  # a heap of (seconds, request id)
        self.outputs = OutputQueues()
        self.metrics = MetricsRegistry()
        self.rates = ServingRates(scheduler.max_batch_tokens)
        self.error: EngineError | None = None  # why no request can be served any more

    def __bool__(self) -> bool:
        return bool(self.by_sequence)

    def __len__(self) -> int:
        """Requests; one with several choices or beams counts once."""
        if self.families or self.searches:
            return len({request.id for request in self.by_sequence.values()})
        return len(self.by_sequence)

    def add(self, request: Request) -> None:
        """Queue a request; RequestError when the whole pool could not hold it."""
        if not self.by_sequence:
            now = self._clock()
            self.rates.resume(now)
            self.metrics.resume(now)
        self.by_sequence[request.sequence.id] = request  # first: an interrupted caller finds and ends it
        try:
            self._scheduler.add(request.sequence)
        except RequestError:
            del self.by_sequence[request.sequence.id]
            raise
        if request.deadline_seconds is not None:
            heappush(self.deadlines, (request.deadline_seconds, request.id))
        if len(self.deadlines) > 2 * len(self.by_sequence) + _SPARE_DEADLINES:  # most are of requests that have ended
            open_ids = self.by_sequence.keys() | self.families.keys() | self.searches.keys()
            self.deadlines = [each for each in self.deadlines if each[1] in open_ids]
            heapify(self.deadlines)

    def add_choices(self, choices: list[Request]) -> None:
        """Queue a request with several choices; RequestError when the whole pool could not hold one of them."""
        family = ChoiceGroup(choices)
        self.add(family.first)
        self.families[family.id] = family

    def add_search(self, group: BeamGroup) -> None:
        """Queue a beam search; RequestError when the whole pool could not hold one of its beams."""
        self.add(group.first)
        self.searches[group.id] = group

    def start(self, forked: Iterable[Request]) -> None:
        """Add sequences that were forked from one that is here."""
        self.by_sequence |= {request.sequence.id: request for request in forked}

    def unforked(self, request: Request) -> ChoiceGroup | None:
        """The family whose prompt a request computes."""
        if not self.families:
            return None
        family = self.families.get(request.id)
        return family if family and not family.is_forked else None

    def count(self, output: RequestOutput) -> RequestOutput:
        """Add the request, or the choice of one, to the metrics if this is its last output."""
        if output.completion:
            self.metrics.finish(output.completion)
        return output

    def put(self, output: RequestOutput) -> None:
        """Queue an output for its reader. The family of a choice decides what is shown, and when."""
        family = self.families.get(output.request_id)
        if family is None:
            self.outputs.put(output)
            return
        for shown in family.collect(output):
            self.outputs.put(shown)
        self._forget_finished(family)

    def take_out(self, requests: Iterable[Request]) -> None:
        """Remove sequences that have ended; free what the scheduler and the drafter keep for them."""
        for request in requests:
            self._scheduler.remove(request.sequence)
            if self._speculator:
                self._speculator.forget(request.sequence)
            self.by_sequence.pop(request.sequence.id, None)  # last: an interrupted caller finds and ends it
            family = self.families.get(request.id) if self.families else None
            if family:
                self._forget_finished(family)

    def _forget_finished(self, family: ChoiceGroup) -> None:
        """Forget a family whose choices have all ended and been taken out; until then `end` finds them by it."""
        if family.is_finished and not self._sequences_of(family.id):
            self.families.pop(family.id, None)

    def _sequences_of(self, request_id: int) -> list[Request]:
        """The choices or beams of a request that were not taken out."""
        return [each for each in self.by_sequence.values() if each.id == request_id]

    def end(self, request_id: int, reason: EarlyEnd = "abort") -> list[RequestOutput]:
        """End a request early and free its blocks; returns the last output of each choice that had not ended."""
        family = self.families.get(request_id)
        if family:
            outputs = [shown for choice in family.open for shown in family.collect(self._end(choice, reason))]
            self.take_out(self._sequences_of(request_id))  # one has ended if an interrupt came then
            self.families.pop(request_id, None)
            return outputs
        group = self.searches.get(request_id)
        if group:
            self.take_out([*group.beams, *self._sequences_of(request_id)])  # also beams that were to be removed
            return self._end_search(group, reason)
        request = self.by_sequence.get(request_id)
        return [self._end(request, reason)] if request and request.id == request_id else []

    def end_and_put(self, request_id: int, reason: EarlyEnd = "abort") -> None:
        """As `end`; the outputs are queued."""
        for output in self.end(request_id, reason):
            self.outputs.put(output)

    def end_expired(self) -> None:
        """End the requests whose time is over, whatever state they are in; their outputs have the text so far."""
        now = self._clock() if self.deadlines else 0.0
        while self.deadlines and self.deadlines[0][0] <= now:
            self.end_and_put(heappop(self.deadlines)[1], "timeout")

    def finish_search(self, group: BeamGroup) -> None:
        """Queue the outputs of a search that is done."""
        for output in self._end_search(group):
            self.outputs.put(output)

    def fail(self, failed: list[Request], error: Exception) -> None:
        """End requests with an error, and what depends on them: choices without a prompt, other beams of a search."""
        now = self._clock()
        self.take_out(failed)
        for request in failed:
            for each in self._failing_with(request):
                output = each.end_with(self.error, now) if self.error else each.fail(error, now)
                self.put(self.count(output))

    def fail_all(self, error: Exception, failed: Iterable[Request] = ()) -> None:
        """End all requests: no further step is possible. Those that `failed` were taken out before."""
        self.error = EngineError(f"the engine failed and takes no more requests: {error}; load it again")
        self.error.__cause__ = error
        self.fail([*failed, *self.by_sequence.values()], error)

    def close(self) -> None:
        """End all requests. Only those with a queue of their own get their last outputs."""
        for request in list(self.by_sequence.values()):
            for output in self.end(request.id):
                if request.id in self.outputs:
                    self.outputs.put(output)
        self.outputs.take()

    def check(self) -> None:
        """Assert that every sequence is scheduled or parked, and that no group outlives its sequences."""
        scheduled = {*self._scheduler.running, *(sequence.id for sequence in self._scheduler.waiting)}
        sequences = [request.sequence for request in self.by_sequence.values()]
        parked = {sequence.id for sequence in sequences if sequence.state is SequenceState.PARKED}
        assert scheduled | parked == {*self.by_sequence}
        families = self.families.values()
        assert all(family.first.sequence.id in self.by_sequence or family.is_forked for family in families)
        assert not any(family.is_finished for family in families)
        for family in families:
            assert {*self._sequences_of(family.id)} <= {*family.open}, "a choice that has ended was not taken out"
        known = {*self.families, *self.searches}
        assert all(each.id in known or each.id == number for number, each in self.by_sequence.items())

    def _end(self, request: Request, reason: EarlyEnd) -> RequestOutput:
        self.take_out([request])
        now = self._clock()
        try:
            return self.count(request.abort(now, reason))
        except Exception as error:  # noqa: BLE001 (the output has it)
            return self.count(request.fail(error, now))

    def _end_search(self, group: BeamGroup, reason: EarlyEnd = "abort") -> list[RequestOutput]:
        del self.searches[group.id]
        outputs = group.result(self._clock(), reason)
        self.count(outputs[0])
        return outputs

    def _failing_with(self, request: Request) -> list[Request]:
        """The requests and choices to end with an error where this one failed."""
        group = self.searches.pop(request.id, None)
        if group:
            self.take_out([*group.beams, *self._sequences_of(group.id)])
            return [group.replayed()]
        family = self.unforked(request)
        if family:
            return family.open
        return [] if request.is_beam else [request]
