"""The steps of an engine: schedule -> execute -> sample -> finish, for the requests that it has.

A step is a transaction. What fails in it ends the requests that caused the failure, and no other:

    one request    its logits are not finite, or its sampler, detokenizer or stop check raises. It ends alone. So does
                   one choice of a request with several, once they are forked (`families`).
    executor       nothing of the step counts. Its sequences are computed again one by one and without drafts, which
                   by batch invariance gives the same tokens, and those that fail again end.
    all            an executor that cannot compute one token of a fresh sequence is broken: all requests end, and
                   `error` says why.

A block enters the prefix index once finite logits were computed from it. A request whose logits are not finite shares
none, and what it reused leaves the index with all that continues it, in case a cached block is damaged.

A step may verify drafts (`ingot.runtime.speculation`). Their rows are sampled in order, each with the parameters and
the random number of its place in the output, up to the first token that differs from its draft or ends the request. So
they are the tokens of plain decoding, and rows after that one are never looked at.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from heapq import heapify, heappop, heappush
from itertools import islice

import numpy as np

from ingot.errors import EngineError
from ingot.runtime.executors import Executor, PipelinedExecutor, StatefulExecutor
from ingot.runtime.kv.blocks import BlockManager, Copy
from ingot.runtime.kv.cost_model import CostModel
from ingot.runtime.kv.states import StateCopy
from ingot.runtime.kv.tiers import TierManager
from ingot.runtime.load import Served, ServingRates
from ingot.runtime.metrics import MetricsRegistry
from ingot.runtime.outputs import EarlyEnd, OutputQueues, RequestOutput, joined
from ingot.runtime.prompt_logits import iterate_prompt_logits
from ingot.runtime.request import Request
from ingot.runtime.sampler import NonFiniteLogits
from ingot.runtime.speculation.speculator import Speculator
from ingot.runtime.steps.batch import BatchBuilder, FloatArray
from ingot.runtime.steps.beams import BeamGroup, BeamMoves
from ingot.runtime.steps.families import Family
from ingot.runtime.steps.policy import SchedulingPolicy
from ingot.runtime.steps.scheduler import ScheduledBatch, ScheduledSequence, Scheduler
from ingot.runtime.steps.sequence import SequenceState
from ingot.runtime.steps.side_state import SideState
from ingot.runtime.steps.step_pipeline import StepInFlight, StepPipeline

_log = logging.getLogger(__name__)
_FRESH = -1  # id of a sequence that no request has
_SPARE_DEADLINES = 64
_LONGEST_SLEEP_SECONDS = 0.001  # while a batch waits for requests, which are added between steps
_ATTEMPTS = 3  # to compute one token, before an executor counts as broken


class StepLoop:
    """Advances requests on one executor. `outputs` has what the steps gave them."""

    def __init__(
        self,
        executor: Executor,
        blocks: BlockManager,
        *,
        max_sequences: int,
        policy: SchedulingPolicy | None = None,
        clock: Callable[[], float] = time.perf_counter,
        speculator: Speculator | None = None,
        tiers: TierManager | None = None,
    ) -> None:
        self._executor = executor
        self._blocks = blocks
        self.clock = clock
        self.sleep: Callable[[float], object] = time.sleep
        self._side_state: SideState | None = None
        if blocks.states and isinstance(executor, StatefulExecutor):
            self._side_state = SideState(executor, blocks.states)
        self._tiers = tiers
        self._limits: dict[str, int] = {
            "max_batch_tokens": executor.max_batch_tokens,
            "max_sequences": max_sequences,
        }
        self.scheduler = Scheduler(blocks, policy=policy, tiers=tiers, **self._limits)
        self.builder = BatchBuilder(blocks, **self._limits)
        self._pipeline: StepPipeline | None = None
        if isinstance(executor, PipelinedExecutor):
            self._pipeline = StepPipeline(executor, self.scheduler, self.builder)
        self._speculator = speculator
        self.requests: dict[int, Request] = {}  # by sequence id
        self.families: dict[int, Family] = {}  # by request id
        self.searches: dict[int, BeamGroup] = {}  # by request id
        self._deadlines: list[tuple[float, int]] = []  # a heap of (seconds, request id)
        self.outputs = OutputQueues()
        self.metrics = MetricsRegistry()
        self.rates = ServingRates()
        self._batch_waits_until: float | None = None  # of a dynamic batch that is not full
        self.error: EngineError | None = None  # why no further step is possible

    def new_scheduler(self) -> Scheduler:
        """A scheduler for other sequences, on the same blocks and with the same limits."""
        return Scheduler(self._blocks, policy=None, tiers=None, **self._limits)

    def add(self, request: Request) -> None:
        """Queue a request; RequestError when the whole pool could not hold it."""
        self.scheduler.add(request.sequence)
        if not self.requests:
            self.rates.resume(self.clock())
        self.requests[request.sequence.id] = request
        if request.deadline_seconds is not None:
            heappush(self._deadlines, (request.deadline_seconds, request.sequence.id))
        if len(self._deadlines) > 2 * len(self.requests) + _SPARE_DEADLINES:  # most are of requests that have ended
            open_ids = self.requests.keys() | self.families.keys() | self.searches.keys()
            self._deadlines = [each for each in self._deadlines if each[1] in open_ids]
            heapify(self._deadlines)

    def add_choices(self, choices: list[Request]) -> None:
        """Queue a request with several choices; RequestError when the whole pool could not hold one of them."""
        family = Family(choices)
        self.add(family.first)
        self.families[family.id] = family

    def add_search(self, group: BeamGroup) -> None:
        """Queue a beam search; RequestError when the whole pool could not hold one of its beams."""
        self.add(group.first)
        self.searches[group.id] = group

    @property
    def num_requests(self) -> int:
        """Requests that are unfinished; one with several choices or beams counts once."""
        has_groups = self.families or self.searches
        return len({request.id for request in self.requests.values()}) if has_groups else len(self.requests)

    def end(self, request_id: int, reason: EarlyEnd = "abort") -> list[RequestOutput]:
        """End a request early and free its blocks; returns the last output of each choice that had not ended."""
        family = self.families.get(request_id)
        if family:
            outputs = [shown for choice in family.open for shown in family.collect(self._end(choice, reason))]
            del self.families[request_id]
            return outputs
        group = self.searches.get(request_id)
        if group:
            self._take_out(group.beams)
            del self.searches[request_id]
            return self._searched(group, reason)
        request = self.requests.get(request_id)
        return [self._end(request, reason)] if request and request.id == request_id else []

    def _end(self, request: Request, reason: EarlyEnd) -> RequestOutput:
        self.requests.pop(request.sequence.id, None)
        self._remove(request)
        now = self.clock()
        try:
            return self._counted(request.abort(now, reason))
        except Exception as error:  # noqa: BLE001 (the output has it)
            return self._counted(request.fail(error, now))

    def _counted(self, output: RequestOutput) -> RequestOutput:
        """Add the request, or the choice of one, to the metrics if this is its last output."""
        if output.completion:
            self.metrics.finish(output.completion)
        return output

    @property
    def in_flight(self) -> StepInFlight | None:
        """The step that the device computes."""
        return self._pipeline.in_flight if self._pipeline else None

    def advance(self) -> None:
        """Make one step. One that the host samples, and one with drafts, first waits for the step in flight.

        EngineError, with nothing changed, when an open iteration over prompt logits holds the blocks that it needs.
        """
        self._end_expired()
        if self._waits_for_batch():
            return
        if not self._tiers:
            self._advance()
        elif self._poll(self._tiers):
            batch = self._advance()
            self._tiers.start()
            if not batch.entries and not self.in_flight:
                self._tiers.wait()

    def _poll(self, tiers: TierManager) -> bool:
        """Take note of transfers that have ended; False when that ends the engine."""
        try:
            tiers.poll()
        except EngineError as error:
            self._break(error)
            return False
        return True

    def _advance(self) -> ScheduledBatch:
        if self._speculator is None:
            return self._step()
        started = self._speculator.clock()
        if self.in_flight and self._speculator.may_draft(self._drafting()):
            self.finish_in_flight()  # a draft continues the newest token
        batch = self._step(self._speculator)
        self._speculator.stepped(batch, self._speculator.clock() - started)
        return batch

    def _step(self, speculator: Speculator | None = None) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        self._require_progress(batch)
        if speculator:
            with self._aborting(batch):
                speculator.add_drafts(batch, self.scheduler, self.requests)
        if self._pipeline and not batch.has_drafts and not self._needs_logits(batch):
            self._queue(self._pipeline, batch)
            return batch
        with self._aborting(batch):
            self._copy_blocks(batch)
        self.finish_in_flight()
        batch.drop_ended()
        if batch.entries:
            with self._aborting(batch):
                self._execute(batch)
        return batch

    def _end_expired(self) -> None:
        """End the requests whose time is over, whatever state they are in; their outputs have the text so far."""
        now = self.clock() if self._deadlines else 0.0
        while self._deadlines and self._deadlines[0][0] <= now:
            for output in self.end(heappop(self._deadlines)[1], "timeout"):
                self.outputs.put(output)

    def _waits_for_batch(self) -> bool:
        """Wait a moment for more requests when a dynamic batch may not start yet; returns whether it did."""
        scheduler, policy = self.scheduler, self.scheduler.policy
        is_partial = not scheduler.running and 0 < len(scheduler.waiting) < scheduler.max_sequences
        if policy.batching != "dynamic" or not is_partial:
            self._batch_waits_until = None
            return False
        now = self.clock()
        if self._batch_waits_until is None:
            self._batch_waits_until = now + policy.batch_wait_seconds
        left = self._batch_waits_until - now
        if left > 0:
            self.sleep(min(left, _LONGEST_SLEEP_SECONDS))
        return left > 0

    def finish_in_flight(self) -> None:
        """Wait for the step in flight, if there is one, and finish it."""
        step = self._pipeline.take() if self._pipeline else None
        if step:
            self._finish_in_flight(step)

    def quiesce(self) -> None:
        """Finish the step in flight, and wait for transfers that hold blocks which other sequences need."""
        self.finish_in_flight()
        self._settle()

    def close(self) -> None:
        """End all requests, and forget the step in flight and outputs that were not read."""
        for request in list(self.requests.values()):
            for output in self.end(request.id):
                if request.id in self.outputs:
                    self.outputs.put(output)
        self.outputs.take()
        if self._pipeline:
            self._pipeline.take()
        if self._tiers:
            self._tiers.close()

    def check(self) -> None:
        """Assert that no block is leaked, every request is scheduled, and exactly those in flight await a token."""
        self._blocks.check()
        if self._tiers:
            self._tiers.check()
        scheduled = {*self.scheduler.running, *(sequence.id for sequence in self.scheduler.waiting)}
        parked = {number for number, each in self.requests.items() if each.sequence.state is SequenceState.PARKED}
        assert scheduled | parked == {*self.requests}
        assert all(family.first.sequence.id in self.requests or family.is_forked for family in self.families.values())
        assert not any(family.is_finished for family in self.families.values())
        rows = self.in_flight.rows if self.in_flight else {}
        assert all(request.sequence.num_in_flight == (number in rows) for number, request in self.requests.items())

    def _queue(self, pipeline: StepPipeline, batch: ScheduledBatch) -> None:
        """Queue a step that samples on the device, and only then wait for the one before it; see `step_pipeline`."""
        with self._aborting(batch):
            self._copy_blocks(batch)
            batch.drop_ended()
            try:
                previous = pipeline.submit(batch, self._sampling(batch)) if batch.entries else pipeline.take()
            except BaseException as error:
                self.finish_in_flight()  # its tokens can no longer be carried
                if not isinstance(error, Exception):
                    raise
                batch.drop_ended()
                self._execute_apart(batch, error)
                return
            if self._side_state:
                self._side_state.keep(batch)
        if previous:
            self._finish_in_flight(previous)

    def _copy_blocks(self, batch: ScheduledBatch) -> None:
        """Copy blocks on write. Tables and pool agree from here on: a request without its copy has ended."""
        now = self.clock()
        for entry in batch.entries:
            self.requests[entry.sequence.id].scheduled(now)
        self._make_copies(batch.copies)

    def _make_copies(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            try:
                if self._side_state and isinstance(copy, StateCopy):
                    self._side_state.copy(copy)
                else:
                    self._executor.copy_block(copy.source, copy.target)
            except Exception as error:  # noqa: BLE001 (the output of its request has it)
                self.finish_in_flight()
                running = [self.requests[number] for number in self.scheduler.running]
                owners = [request for request in running if self._blocks.holds(request.sequence.id, copy)]
                self._fail_in_executor(owners, error)
        if self._tiers:
            self._tiers.start()

    def _execute(self, batch: ScheduledBatch) -> None:
        started = time.perf_counter()
        try:
            rows = self._compute(batch)
        except Exception as error:  # noqa: BLE001 (the outputs of the requests that cause it have it)
            self._execute_apart(batch, error)
            return
        if self._tiers:
            observe_prefill(self._tiers.costs, batch, time.perf_counter() - started)
        self.scheduler.complete(batch)
        if self._side_state:
            self._side_state.keep(batch)
        self._finish(batch, rows)

    def _compute(self, batch: ScheduledBatch) -> Iterable[FloatArray | int]:
        """Logits [vocab], or a token sampled on the device, for each row of the entries that sample."""
        if self._pipeline and not self._needs_logits(batch):
            return self._pipeline.run(batch, self._sampling(batch))
        return self._executor.forward(self.builder.build(batch))

    def _execute_apart(self, batch: ScheduledBatch, error: Exception) -> None:
        """Compute the sequences of a step that failed one by one. One that was preempted since waits for its turn."""
        _log.warning("a step failed (%s); its sequences are computed again one by one (%d)", error, len(batch.entries))
        self.metrics.num_failed_steps += 1
        for entry in batch.entries:
            if entry.sequence.state is not SequenceState.RUNNING:
                continue
            alone = batch.only(entry)
            try:
                self._replay(entry)
                rows = self._compute(alone)
            except Exception as again:  # noqa: BLE001 (the request's output has it)
                self._fail_in_executor([self.requests[entry.sequence.id]], again)
                continue
            self.scheduler.complete(alone)
            self._finish(alone, rows)

    def _replay(self, entry: ScheduledSequence) -> None:
        """Compute side state again up to an entry: a step that failed may have changed it."""
        if self._side_state:
            for chunk in self._side_state.replay(entry, self._executor.max_batch_tokens):
                self._executor.forward(self.builder.build(chunk))

    def _finish_in_flight(self, step: StepInFlight) -> None:
        """Wait for a queued step and finish it. If it fails, so does the step that was queued after it."""
        with self._aborting(step.batch):
            try:
                tokens = step.tokens()
            except Exception as error:  # noqa: BLE001 (the outputs of the requests that cause it have it)
                self._undo_following(step)
                self.scheduler.undo(step.batch)
                self._execute_apart(step.batch, error)
                return
            self.scheduler.retire(step.batch)
            self._finish(step.batch, tokens, step.num_discarded_tokens)

    def _undo_following(self, failed: StepInFlight) -> None:
        following = self._pipeline.take() if self._pipeline else None
        if following:
            with suppress(Exception):  # it is computed again, whatever its outcome was
                following.tokens()
            self.metrics.count(following.batch.num_tokens, following.batch.num_tokens)
            self.scheduler.undo(following.batch)
            if self._side_state:  # what was not in the failed step too is not computed again here
                self.scheduler.restart(following.batch, kept=failed.batch)

    def _finish(self, batch: ScheduledBatch, rows: Iterable[FloatArray | int], num_discarded: int = 0) -> None:
        """Sample, append the tokens to their requests and queue the outputs."""
        now = self.clock()
        self.metrics.count(batch.num_tokens, num_discarded)
        unread = iter(rows)
        for entry in batch.entries:
            its_rows = list(islice(unread, entry.num_logits))
            request = self.requests.get(entry.sequence.id)
            group = self.searches.get(request.id) if request else None
            if its_rows and request and group:
                self._finish_beam(entry, group, request, its_rows[0], now)
            elif its_rows and request:  # it has not ended since
                for choice in [request, *self._fork(request)]:
                    if choice.sequence.id in self.requests:  # the copy of its side state did not fail
                        self._finish_entry(entry._replace(sequence=choice.sequence), choice, its_rows, now)
        self.rates.record(
            Served(self.metrics.computed_tokens, self.scheduler.waiting.num_admitted_tokens, self.metrics.num_finished),
            now,
        )

    def _finish_beam(
        self, entry: ScheduledSequence, group: BeamGroup, beam: Request, row: FloatArray | int, now: float
    ) -> None:
        """Read the logits after a beam; after the last of a search, choose its next beams."""
        assert not isinstance(row, int), "beams are chosen on the host"
        try:
            group.read(beam, row)
            self.scheduler.share(entry)
            if group.is_complete:
                if not group.num_steps:
                    self.metrics.first_token(now - beam.arrival_seconds, beam.sequence.num_prompt_tokens)
                self._advance_beams(group, group.advance(now))
        except Exception as error:  # noqa: BLE001 (the request's output has it)
            self._fail(beam, error)

    def _advance_beams(self, group: BeamGroup, moves: BeamMoves) -> None:
        self._take_out(moves.removed)
        self.metrics.output_tokens += 1
        copies: list[Copy] = []
        for parent, children in moves.forked:
            copies += self.scheduler.fork(parent.sequence, [child.sequence for child in children])
            self.requests |= {child.sequence.id: child for child in children}
        for beam, token in moves.continued:
            beam.sequence.tokens.append(token)
            self.scheduler.resume(beam.sequence)
        self._make_copies(copies)
        if group.is_done:
            del self.searches[group.id]
            for output in self._searched(group):
                self.outputs.put(output)

    def _searched(self, group: BeamGroup, reason: EarlyEnd = "abort") -> list[RequestOutput]:
        """The outputs of a search that has ended."""
        outputs = group.result(self.clock(), reason)
        self._counted(outputs[0])
        return outputs

    def _fork(self, request: Request) -> list[Request]:
        """The other choices of a request whose prompt was just computed: they sample from the same logits."""
        family = self._unforked(request)
        if family is None:
            return []
        children = family.fork()
        copies = self.scheduler.fork(request.sequence, [child.sequence for child in children])
        self.requests |= {child.sequence.id: child for child in children}
        self._make_copies(copies)
        return children

    def _unforked(self, request: Request) -> Family | None:
        """The family whose prompt a request computes."""
        family = self.families.get(request.id)
        return family if family and not family.is_forked else None

    def _finish_entry(
        self, entry: ScheduledSequence, request: Request, rows: list[FloatArray | int], now: float
    ) -> None:
        """Finish one request's share of a step. Whatever it raises ends this request alone."""
        outputs: list[RequestOutput] = []
        error: Exception | None = None
        previous = request.last_token_seconds
        try:
            self._read_rows(entry, request, rows, outputs, now)
        except Exception as raised:  # noqa: BLE001 (the request's output has it)
            error = raised
        if entry.drafts and self._speculator:
            self._speculator.verified(entry, [output.token_ids[0] for output in outputs])
        if outputs:  # also those before an error
            self._measure(request, previous, len(outputs), now)
            self._put(joined(outputs))
        if error:
            self._fail(request, error)
        elif outputs[-1].completion:
            del self.requests[request.sequence.id]
            self._remove(request)
        elif entry.drafts:
            self._make_copies(self.scheduler.drop_rejected(entry))

    def _read_rows(
        self,
        entry: ScheduledSequence,
        request: Request,
        rows: list[FloatArray | int],
        outputs: list[RequestOutput],
        now: float,
    ) -> None:
        """Sample the rows of an entry up to the first token that differs from its draft or ends the request."""
        drafts: tuple[int | None, ...] = (*entry.drafts, None)
        for num_accepted, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            token = request.sample(row)
            self.scheduler.share(entry, num_accepted)
            outputs.append(self._counted(request.push(token, now)))
            if outputs[-1].completion or token.token_id != draft:
                return
            self.scheduler.accept(entry.sequence)

    def _measure(self, request: Request, previous: float | None, num_tokens: int, now: float) -> None:
        """Add tokens of a request to the metrics; `previous` is when it had the one before."""
        self.metrics.output_tokens += num_tokens
        if previous is None:
            self.metrics.first_token(now - request.arrival_seconds, request.num_own_prompt_tokens)
        else:
            self.metrics.itl_seconds.observe(now - previous)

    def _put(self, output: RequestOutput) -> None:
        family = self.families.get(output.request_id)
        if family is None:
            self.outputs.put(output)
            return
        for shown in family.collect(output):
            self.outputs.put(shown)
        if family.is_finished:
            del self.families[family.id]

    def _remove(self, request: Request) -> None:
        """Free what the scheduler and the drafter keep for a request that has ended."""
        self.scheduler.remove(request.sequence)
        if self._speculator:
            self._speculator.forget(request.sequence.id)

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request that failed by itself."""
        if isinstance(error, NonFiniteLogits):
            self.scheduler.discard(request.sequence)
        self._end_failed([request], error)

    def _fail_in_executor(self, failed: list[Request], error: Exception) -> None:
        """End requests that the executor failed on; all, if it cannot compute one token of a fresh sequence either."""
        self._take_out(failed)
        if not any(self._computes_one_token() for _ in range(_ATTEMPTS)):
            self._break(error, failed)
            return
        self._end_failed(failed, error)

    def _break(self, error: Exception, failed: Iterable[Request] = ()) -> None:
        """End all requests: no further step is possible. Those that `failed` were taken out before."""
        self.error = EngineError(f"the engine failed and takes no more requests: {error}; load it again")
        self.error.__cause__ = error
        self._end_failed([*failed, *self.requests.values()], error)

    def _end_failed(self, failed: list[Request], error: Exception) -> None:
        """End requests with an error, and what depends on them: choices without a prompt, other beams of a search."""
        now = self.clock()
        self._take_out(failed)
        for request in failed:
            if request.id in self.searches:
                group = self.searches.pop(request.id)
                self._take_out([*group.beams, *(each for each in self.requests.values() if each.id == group.id)])
                ended = [group.replayed()]
            else:
                family = self._unforked(request)
                ended = family.open if family else [] if request.is_beam else [request]
            for each in ended:
                output = each.end_with(self.error, now) if self.error else each.fail(error, now)
                self._put(self._counted(output))

    def _take_out(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.requests.pop(request.sequence.id, None)
            self._remove(request)

    def _computes_one_token(self) -> bool:
        fresh = [(_FRESH, np.zeros(1, np.int64))]
        with suppress(Exception):  # that of the step is the one to report
            for _ in iterate_prompt_logits(self._executor, self.new_scheduler(), self.builder, fresh, self._settle):
                pass
            return True
        return False

    def _settle(self) -> None:
        if self._tiers:
            self._tiers.settle()

    @contextmanager
    def _aborting(self, batch: ScheduledBatch) -> Iterator[None]:
        """Abort the requests of a step that is interrupted, as by Ctrl-C: part of its outcome may be lost."""
        try:
            yield
        except BaseException:
            for request in [self.requests.get(entry.sequence.id) for entry in batch.entries]:
                for output in self.end(request.id) if request else ():
                    self.outputs.put(output)
            raise

    def _sampling(self, batch: ScheduledBatch) -> list[Request]:
        """Requests that the step samples tokens for, one for each row of its logits."""
        return [self.requests[entry.sequence.id] for entry in batch.entries for _ in range(entry.num_logits)]

    def _drafting(self) -> list[Request]:
        """Running requests that decode: a step may verify drafts for them."""
        running = self.scheduler.running.values()
        return [self.requests[sequence.id] for sequence in running if sequence.num_pending == 1]

    def _needs_logits(self, batch: ScheduledBatch) -> bool:
        return any(request.needs_logits or self._unforked(request) for request in self._sampling(batch))

    def _require_progress(self, batch: ScheduledBatch) -> None:
        """Raise EngineError when nothing can run and neither a step in flight nor a transfer could change that."""
        is_moving = self._tiers is not None and self._tiers.is_moving
        if self.requests and not batch.entries and not self.in_flight and not is_moving:
            raise EngineError(
                f"no block is free for the next step: an open iteration over prompt logits holds"
                f" {self._blocks.num_in_use} of {self._blocks.num_blocks}; finish or close it first"
            )


def observe_prefill(costs: CostModel, batch: ScheduledBatch, seconds: float) -> None:
    """Record the time of a step most of which was prompts, at the context of its longest prompt."""
    prompts = [entry for entry in batch.entries if entry.num_tokens > 1]
    num_tokens = sum(entry.num_tokens for entry in prompts)
    if num_tokens * 2 > batch.num_tokens:
        costs.observe_prefill(max(entry.start + entry.num_tokens for entry in prompts), num_tokens, seconds)
