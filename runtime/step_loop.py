"""The engine's heart: one step is schedule -> execute -> sample -> finish.

Where steps can be queued on the executor it is schedule -> submit -> finish the step before: see `step_pipeline`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ingot.errors import EngineError
from ingot.runtime.batch import BatchBuilder, Executor, FloatArray, PipelinedExecutor
from ingot.runtime.outputs import RequestOutput, StepCounters
from ingot.runtime.request import Request
from ingot.runtime.sampler import SampledToken
from ingot.runtime.scheduler import ScheduledBatch, Scheduler
from ingot.runtime.step_pipeline import StepInFlight, StepPipeline


class StepLoop:
    """Requests in, outputs out, a step at a time."""

    def __init__(self, executor: Executor, scheduler: Scheduler, builder: BatchBuilder) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._builder = builder
        self._pipeline: StepPipeline | None = None
        if isinstance(executor, PipelinedExecutor):
            self._pipeline = StepPipeline(executor, scheduler, builder)
        self.requests: dict[int, Request] = {}
        self._outputs: list[RequestOutput] = []
        self.counters = StepCounters()

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs, a step is in flight, or an output waits to be returned by `step`."""
        return bool(self.requests or self._outputs or self._in_flight)

    def add(self, request: Request) -> None:
        """Queue a request; RequestError when the pool could never hold it."""
        self._scheduler.add(request.sequence)
        self.requests[request.sequence.id] = request

    def abort(self, request_id: int) -> RequestOutput | None:
        """End a request and free its blocks; its last output, or None when it is finished or unknown."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        self._remove(request)
        return request.abort(time.perf_counter())

    def abandon(self) -> None:
        """Abort all requests, and forget outputs and the step in flight: nobody reads them any more."""
        for request_id in list(self.requests):
            self.abort(request_id)
        self._outputs.clear()
        if self._pipeline:
            self._pipeline.take()

    def discard_outputs(self, request_id: int) -> None:
        """Drop a request's outputs that wait to be returned by `step`: nobody will read them."""
        self._outputs = [output for output in self._outputs if output.request_id != request_id]

    def step(self) -> list[RequestOutput]:
        """Advance by one step. When it fails, its requests are aborted and the error is raised.

        The last outputs of requests that were aborted so are returned by the next call. EngineError, with nothing
        aborted, when an open `iterate_prompt_logits` holds the blocks that the next request needs.
        """
        batch = self._scheduler.schedule()
        self._require_progress(batch)
        if self._pipeline is None or self._needs_logits(batch):
            self._run(batch)
        else:
            self._run_ahead(self._pipeline, batch)
        outputs, self._outputs = self._outputs, []
        return outputs

    def drain(self) -> bool:
        """Wait for the step in flight and finish it; False when there is none."""
        step = self._pipeline.take() if self._pipeline else None
        if step:
            self._finish_in_flight(step)
        return step is not None

    def check(self) -> None:
        """Assert that every request is scheduled, and that tokens in flight are those of the step in flight."""
        scheduled = {*self._scheduler.running, *(sequence.id for sequence in self._scheduler.waiting)}
        assert scheduled == {*self.requests}
        sampling = self._in_flight.rows if self._in_flight else {}
        assert all(request.sequence.num_in_flight == (number in sampling) for number, request in self.requests.items())

    @property
    def _in_flight(self) -> StepInFlight | None:
        return self._pipeline.in_flight if self._pipeline else None

    def _require_progress(self, batch: ScheduledBatch) -> None:
        """Raise EngineError when nothing can run and nothing is in flight that could change it."""
        blocks = self._scheduler.blocks
        if self._scheduler.has_unfinished and not batch.entries and not self._in_flight:
            raise EngineError(
                f"no block is free for the next step: an open iteration over prompt logits holds"
                f" {blocks.num_in_use} of {blocks.num_blocks}; finish or close it first"
            )

    def _sampling(self, batch: ScheduledBatch) -> list[Request]:
        """Requests that the step chooses a token for, one a row of its logits."""
        return [self.requests[entry.sequence.id] for entry in batch.entries if entry.samples]

    def _needs_logits(self, batch: ScheduledBatch) -> bool:
        return any(request.needs_logits for request in self._sampling(batch))

    def _run(self, batch: ScheduledBatch) -> None:
        """Compute a step and choose its tokens on the host."""
        with self._aborting_on_failure(batch):
            self._prepare(batch)
        if self.drain():
            batch.drop_ended()
        if batch.entries:
            with self._aborting_on_failure(batch):
                logits = self._execute(batch)
                tokens = self._sample(batch, logits)
                self._finish(tokens)

    def _run_ahead(self, pipeline: StepPipeline, batch: ScheduledBatch) -> None:
        """Queue a step, and only then wait for the one before it."""
        with self._aborting_on_failure(batch):
            try:
                self._prepare(batch)
                previous = pipeline.submit(batch, self._sampling(batch)) if batch.entries else pipeline.take()
            except BaseException:
                self.drain()  # its tokens are not carried any further
                raise
        if previous:
            self._finish_in_flight(previous)

    def _finish_in_flight(self, step: StepInFlight) -> None:
        with self._aborting_on_failure(step.batch):
            tokens = step.tokens()
            self._scheduler.retire(step.batch)
            self.counters.count(step.batch.num_tokens, step.num_discarded_tokens)
            self._finish(tokens)

    def _prepare(self, batch: ScheduledBatch) -> None:
        """Copy blocks on write. Whatever becomes of the step, tables and pool agree from here on."""
        now = time.perf_counter()
        for entry in batch.entries:
            request = self.requests[entry.sequence.id]
            if request.first_scheduled_seconds is None:
                request.first_scheduled_seconds = now
        for source, target in batch.copies:
            self._executor.copy_block(source, target)

    def _execute(self, batch: ScheduledBatch) -> FloatArray:
        """Logits [sampling sequences, vocab] of the step; afterwards its tokens are in the pool."""
        logits = self._executor.forward(self._builder.build(batch))
        self._scheduler.complete(batch)
        self.counters.count(batch.num_tokens)
        return logits

    def _sample(self, batch: ScheduledBatch, logits: FloatArray) -> list[tuple[Request, SampledToken]]:
        return [(request, request.sample(row)) for request, row in zip(self._sampling(batch), logits, strict=True)]

    def _finish(self, tokens: list[tuple[Request, SampledToken]]) -> None:
        """Hand the tokens to their requests, and take out those that end."""
        now = time.perf_counter()
        self.counters.output_tokens += len(tokens)
        for request, token in tokens:
            output = request.push(token, now)
            self._outputs.append(output)
            if output.finished:
                self._remove(request)

    @contextmanager
    def _aborting_on_failure(self, batch: ScheduledBatch) -> Iterator[None]:
        """Abort the requests of a step that fails; none of its blocks were entered into the prefix index."""
        try:
            yield
        except BaseException:
            for entry in batch.entries:
                output = self.abort(entry.sequence.id)
                if output:
                    self._outputs.append(output)
            raise

    def _remove(self, request: Request) -> None:
        del self.requests[request.sequence.id]
        self._scheduler.remove(request.sequence)
