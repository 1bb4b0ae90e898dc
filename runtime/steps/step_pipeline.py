"""Asynchronous scheduling: a step is queued on the device before the tokens of the one before it are read.

    host      submit 0 | submit 1, read 0, finish 0 | submit 2, read 1, finish 1 | ...
    device    .........  compute 0 ........... compute 1 ................ compute 2 ...

While a step computes, the engine schedules, builds and queues the next one, so the device always has work: Python costs
no time as long as it needs less than a step takes. Three things make this possible:

    positions   a step needs the positions of its tokens, not their ids, and lengths are known ahead
    carried     a token in flight is named by its row in the step before, and stays on the device
    sampling    the device samples, with random numbers that depend on seed and index alone (`SamplingArrays`)

An end token or stop string is found only when its token is read; by then its request is in the next step already. That
row is discarded. The request's blocks are freed at once, which is safe because the device works in order. A step's
blocks enter the prefix index when the step is read, never before. Where a step fails, the one queued after it is undone
too (`step_loop`). One step ahead is enough to hide Python.

A step with a request that the host must sample is not queued: the engine reads the step in flight first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ingot.runtime.executors import PipelinedExecutor, SubmittedStep
from ingot.runtime.requests.request import Request
from ingot.runtime.requests.sampler import sampling_arrays
from ingot.runtime.scheduling.batch_builder import BatchBuilder
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.sequence import ScheduledBatch, SequenceState


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A queued step; row r of its logits samples a token for `requests[r]`."""

    batch: ScheduledBatch
    requests: Sequence[Request]
    submitted: SubmittedStep
    queued_at: float

    @property
    def rows(self) -> dict[int, int]:
        """Row of each sequence that the step samples a token for, by sequence id."""
        return {request.sequence.id: row for row, request in enumerate(self.requests)}

    @property
    def num_discarded_tokens(self) -> int:
        """Tokens computed for requests that have ended since the step was queued."""
        return sum(entry.num_tokens for entry in self.batch.entries if _ended(entry.sequence.state))

    def tokens(self) -> list[int]:
        """Wait for the step; the token of each row, -1 where its logits are not finite. Raises what the device does."""
        tokens: list[int] = self.submitted.tokens().tolist()
        return tokens


class StepPipeline:
    """Queues steps on a pipelined executor and keeps the one that is still unread."""

    def __init__(
        self, executor: PipelinedExecutor, scheduler: Scheduler, builder: BatchBuilder, clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._executor = executor
        self._scheduler = scheduler
        self._builder = builder
        self.in_flight: StepInFlight | None = None

    def submit(self, batch: ScheduledBatch, requests: Sequence[Request]) -> StepInFlight | None:
        """Queue a step that samples a token for each of `requests`; returns the step before it, for reading."""
        previous = self.in_flight
        submitted = self._submit(batch, requests, previous.rows if previous else {})
        self._scheduler.queue(batch)
        self.in_flight = StepInFlight(batch, requests, submitted, self._clock())
        return previous

    def run(self, batch: ScheduledBatch, requests: Sequence[Request]) -> list[int]:
        """Compute a step and wait for it, while none is in flight; returns a token for each of `requests`.

        A request whose drafts are verified is in `requests` once for each of its rows.
        """
        assert self.in_flight is None
        tokens: list[int] = self._submit(batch, requests, {}).tokens().tolist()
        return tokens

    def take(self) -> StepInFlight | None:
        """Return the step in flight, for reading; nothing is in flight afterwards."""
        step, self.in_flight = self.in_flight, None
        return step

    def _submit(self, batch: ScheduledBatch, requests: Sequence[Request], rows: Mapping[int, int]) -> SubmittedStep:
        carried = self._builder.carried(batch, rows)
        indices = output_indices(requests)
        sampling = sampling_arrays([request.sampler for request in requests], indices)
        return self._executor.submit(self._builder.build(batch), sampling, carried)


def first_index(request: Request) -> int:
    """Return the index in the output of the token that a request's first row samples; its rows follow each other."""
    return request.sequence.num_generated + request.sequence.num_in_flight


def output_indices(requests: Sequence[Request]) -> list[int]:
    """Return the index in the output of the token that each row samples."""
    indices: list[int] = []
    for row, request in enumerate(requests):
        follows = row and requests[row - 1] is request
        indices.append(indices[-1] + 1 if follows else first_index(request))
    return indices


def _ended(state: SequenceState) -> bool:
    return state is SequenceState.FINISHED
