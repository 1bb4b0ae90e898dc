"""Asynchronous scheduling: a step is queued on the device before the tokens of the one before it are known.

    host      submit 0 | submit 1, read 0, finish 0 | submit 2, read 1, finish 1 | ...
    device    .........  compute 0 ........... compute 1 ................ compute 2 ...

While a step computes, the next one is scheduled, built and queued, so the device always has work: Python costs nothing
as long as it takes less time than a step. What makes that possible:

    positions   a step needs to know where its tokens stand, not what they are: lengths are known ahead
    carried     a token that is still in flight is named by its row in the step before, and stays on the device
    draws       the device chooses tokens itself, from numbers that depend on seed and index alone (`token_draws`)

An end token or stop string shows only when a token is read: by then its request is in the next step already. That row
is discarded, and its blocks go back at once, which is safe because the device works in order. The prefix index learns
the blocks of a step when the step is read, never before. One step ahead is enough to hide Python.

A step with a request whose logits the host must see is not queued: what is in flight is read first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.errors import EngineError
from ingot.runtime.batch import BatchBuilder, PipelinedExecutor, SubmittedStep
from ingot.runtime.request import Request
from ingot.runtime.sampler import SampledToken
from ingot.runtime.scheduler import ScheduledBatch, Scheduler
from ingot.runtime.sequence import SequenceState
from ingot.runtime.token_draws import token_draws


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that was queued, with the request that each of its rows chooses a token for."""

    batch: ScheduledBatch
    requests: Sequence[Request]
    submitted: SubmittedStep

    @property
    def rows(self) -> dict[int, int]:
        """Row of each sequence that the step chooses a token for."""
        return {request.sequence.id: row for row, request in enumerate(self.requests)}

    @property
    def num_discarded_tokens(self) -> int:
        """Tokens computed for requests that ended since the step was queued."""
        return sum(entry.num_tokens for entry in self.batch.entries if _ended(entry.sequence.state))

    def tokens(self) -> list[tuple[Request, SampledToken]]:
        """Wait for the step; the tokens of requests that still run. EngineError when a row of logits had none."""
        tokens = []
        for row, token_id in enumerate(self.submitted.tokens().tolist()):
            request = self.requests[row]
            if _ended(request.sequence.state):
                continue
            if token_id < 0:
                raise EngineError(
                    f"the logits of request {request.sequence.id} (row {row} of its step) are not finite; logits must"
                    " be finite to choose a token: check the checkpoint's weights, or build with less quantization"
                )
            tokens.append((request, SampledToken(token_id)))
        return tokens


class StepPipeline:
    """Queues steps on a pipelined executor and holds the one that was not read yet."""

    def __init__(self, executor: PipelinedExecutor, scheduler: Scheduler, builder: BatchBuilder) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._builder = builder
        self.in_flight: StepInFlight | None = None

    def submit(self, batch: ScheduledBatch, requests: Sequence[Request]) -> StepInFlight | None:
        """Queue a step that chooses a token for each of `requests`; returns the step before it, now to be read."""
        previous = self.in_flight
        carried = self._builder.carried(batch, previous.rows if previous else {})
        indices = [request.sequence.num_generated + request.sequence.num_in_flight for request in requests]
        draws = token_draws([request.sampler for request in requests], indices)
        submitted = self._executor.submit(self._builder.build(batch), draws, carried)
        self._scheduler.queue(batch)
        self.in_flight = StepInFlight(batch, requests, submitted)
        return previous

    def take(self) -> StepInFlight | None:
        """The step in flight, to be read; nothing is in flight afterwards."""
        step, self.in_flight = self.in_flight, None
        return step


def _ended(state: SequenceState) -> bool:
    return state is SequenceState.FINISHED
