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

An executor of several stages (`OverlappingExecutor`) computes as many steps at once, of different sequences, which the
scheduler divides among them. Nothing is carried, and the host samples, so any step without drafts is queued:

    host      begin A, begin B, read A | begin A, read B | begin B, read A | ...
    stage 0   A ........ B ........... A ............... B ...
    stage 1            A ............. B ............... A ...
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ingot.runtime.executors import OverlappingExecutor, PipelinedExecutor, SubmittedStep
from ingot.runtime.forward_batch import FloatArray
from ingot.runtime.requests.request import Request
from ingot.runtime.requests.sampler import sampling_arrays
from ingot.runtime.scheduling.batch_builder import BatchBuilder
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.sequence import ScheduledBatch, SequenceState


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A queued step; row r of its logits samples a token for `requests[r]`.

    result   waits for the step, and raises its error; of a device that samples the token of each row, -1 where its
             logits are not finite; else logits [R, vocab]
    """

    batch: ScheduledBatch
    requests: Sequence[Request]
    result: Callable[[], list[int] | FloatArray]
    queued_at: float

    @property
    def rows(self) -> dict[int, int]:
        """Row of each sequence that the step samples a token for, by sequence id."""
        return {request.sequence.id: row for row, request in enumerate(self.requests)}

    @property
    def num_discarded_tokens(self) -> int:
        """Tokens computed for requests that have ended since the step was queued."""
        return sum(entry.num_tokens for entry in self.batch.entries if _ended(entry.sequence.state))

    @property
    def has_released(self) -> bool:
        """Report whether a sequence gave up its blocks since, which the step may still write to."""
        return any(entry.sequence.state is not SequenceState.RUNNING for entry in self.batch.entries)


class StepPipeline:
    """Queues steps on a pipelined or overlapping executor and keeps those that are still unread.

    depth     most of them, besides the one that is being read
    """

    def __init__(
        self,
        executor: PipelinedExecutor | OverlappingExecutor,
        scheduler: Scheduler,
        builder: BatchBuilder,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._pipelined = executor if isinstance(executor, PipelinedExecutor) else None
        self._overlapping = None if isinstance(executor, PipelinedExecutor) else executor
        self._scheduler = scheduler
        self._builder = builder
        self._steps = deque[StepInFlight]()
        self.depth = self._overlapping.num_at_once - 1 if self._overlapping else 1

    @property
    def samples(self) -> bool:
        """Report whether the device samples."""
        return self._pipelined is not None

    @property
    def in_flight(self) -> StepInFlight | None:
        """The oldest step in flight."""
        return self._steps[0] if self._steps else None

    @property
    def rows(self) -> dict[int, int]:
        """Row of each sequence whose token is in flight, in its step."""
        return {number: row for step in self._steps for number, row in step.rows.items()}

    def submit(self, batch: ScheduledBatch, requests: Sequence[Request]) -> StepInFlight | None:
        """Queue a step that samples a token for each of `requests`; returns the oldest one if it is to be read now."""
        result = self._submit(batch, requests)
        self._scheduler.queue(batch)
        self._steps.append(StepInFlight(batch, requests, result, self._clock()))
        return self._steps.popleft() if len(self._steps) > self.depth else None

    def run(self, batch: ScheduledBatch, requests: Sequence[Request]) -> list[int]:
        """Compute a step and wait for it, while none is in flight; returns a token for each of `requests`.

        A request whose drafts are verified is in `requests` once for each of its rows.
        """
        assert not self._steps
        tokens = self._submit(batch, requests)()
        assert isinstance(tokens, list)
        return tokens

    def take(self) -> StepInFlight | None:
        """Return the oldest step in flight, for reading; it is not in flight afterwards."""
        return self._steps.popleft() if self._steps else None

    def settle(self) -> None:
        """Wait for steps that may write to blocks which others get now, on an executor that does not copy in order."""
        if self._overlapping and any(step.has_released for step in self._steps):
            self._overlapping.settle()

    def _submit(self, batch: ScheduledBatch, requests: Sequence[Request]) -> Callable[[], list[int] | FloatArray]:
        if self._pipelined is None:
            assert self._overlapping
            return self._overlapping.begin(self._builder.build(batch)).logits
        carried = self._builder.carried(batch, self._steps[-1].rows if self._steps else {})
        sampling = sampling_arrays([request.sampler for request in requests], output_indices(requests))
        return partial(_tokens, self._pipelined.submit(self._builder.build(batch), sampling, carried))


def _tokens(step: SubmittedStep) -> list[int]:
    tokens: list[int] = step.tokens().tolist()
    return tokens


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
