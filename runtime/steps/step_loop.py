"""The steps of an engine: schedule -> execute -> read, for the requests that it has.

A step is a transaction. What fails in it ends the requests that caused the failure, and no other:

    one request    its logits are not finite, or its sampler, detokenizer or stop check raises. It ends alone. So does
                   one choice of a request with several, once they are forked (`choice_groups`).
    executor       nothing of the step counts. Its sequences are computed again one by one and without drafts, which
                   by batch invariance gives the same tokens, and those that fail again end.
    all            an executor that cannot compute one token of a fresh sequence is broken: all requests end, and
                   `error` says why.

A block enters the prefix index once finite logits were computed from it. A request whose logits are not finite shares
none, and what it reused leaves the index with all that continues it, in case a cached block is damaged.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np

from ingot.errors import EngineError
from ingot.runtime.clock import SYSTEM_CLOCK, Clock
from ingot.runtime.constraints.matcher import MaskWorker, Matcher
from ingot.runtime.executors import (
    AdaptingExecutor,
    Executor,
    ObservedExecutor,
    OffloadingExecutor,
    OverlappingExecutor,
    PipelinedExecutor,
    StatefulExecutor,
)
from ingot.runtime.kv.blocks import BlockManager, BlockMove, Copy
from ingot.runtime.kv.cost_model import CostModel
from ingot.runtime.kv.states import StateCopy
from ingot.runtime.kv.tiers import TierManager
from ingot.runtime.requests.request import Request
from ingot.runtime.scheduling.adapter_slots import AdapterSlots
from ingot.runtime.scheduling.batch_builder import BatchBuilder
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.sequence import ScheduledBatch, ScheduledSequence, Sequence, SequenceState
from ingot.runtime.scheduling.slow_blocks import SlowBlocks
from ingot.runtime.scheduling_policy import SchedulingPolicy
from ingot.runtime.speculation.speculator import Speculator
from ingot.runtime.steps.open_requests import OpenRequests
from ingot.runtime.steps.prompt_logits import iterate_prompt_logits
from ingot.runtime.steps.side_state import SideState
from ingot.runtime.steps.step_pipeline import StepInFlight, StepPipeline
from ingot.runtime.steps.step_reader import Row, StepReader, sampled_rows

_log = logging.getLogger(__name__)
_FRESH = -1  # id of a sequence that no request has
_LONGEST_SLEEP_SECONDS = 0.001  # while a batch waits for requests, which are added between steps
Constrained = tuple[Matcher, tuple[int, ...]]
"""The matcher of a row with a constraint, and the drafts of its step."""
_ATTEMPTS = 3  # to compute one token, before an executor counts as broken


class StepLoop:
    """Advances `requests` on one executor."""

    def __init__(
        self,
        executor: Executor,
        blocks: BlockManager,
        *,
        max_sequences: int,
        policy: SchedulingPolicy | None = None,
        clock: Clock = SYSTEM_CLOCK,
        speculator: Speculator | None = None,
        tiers: TierManager | None = None,
    ) -> None:
        self._executor = executor
        self._blocks = blocks
        self.clock = clock
        self._masks = MaskWorker()
        self._side_state: SideState | None = None
        if blocks.states and isinstance(executor, StatefulExecutor):
            self._side_state = SideState(executor, blocks.states)
        self._tiers = tiers
        self._limits: dict[str, int] = {
            "max_batch_tokens": executor.max_batch_tokens,
            "max_sequences": max_sequences,
        }
        self.adapters: AdapterSlots | None = None  # None: the executor computes none
        if isinstance(executor, AdaptingExecutor) and executor.max_adapters:
            self.adapters = AdapterSlots(executor)
        self._overlapping: OverlappingExecutor | None = None
        if isinstance(executor, OverlappingExecutor) and executor.num_at_once > 1 and speculator is None:
            self._overlapping = executor
        self._slow: SlowBlocks | None = None  # None: the pool has no slow part
        if isinstance(executor, OffloadingExecutor) and blocks.num_slow:
            self._slow = SlowBlocks(blocks, executor.kv_geometry, executor.slow_bytes_per_second)
        self.scheduler = self._make_scheduler(policy, self._overlapping.num_at_once if self._overlapping else 1)
        self.builder = BatchBuilder(blocks, adapter_slot=self.adapters.slot if self.adapters else None, **self._limits)
        self._observed: ObservedExecutor | None = None  # blocks move while it computes
        if isinstance(executor, ObservedExecutor):
            if executor.leaves_a_core:
                self._observed = executor
            elif tiers:
                tiers.give_way()
        self._moves_after_copies = tiers is not None and self._observed is None  # else while a step computes
        self._batch_wait = BatchWait(self.scheduler, clock)
        self._pipeline: StepPipeline | None = None
        pipelined = self._overlapping or (executor if isinstance(executor, PipelinedExecutor) else None)
        if pipelined:
            self._pipeline = StepPipeline(pipelined, self.scheduler, self.builder, clock)
        self._speculator = speculator
        self._observe = speculator.observe if speculator else None
        if speculator:
            speculator.clock = clock
        self.requests = OpenRequests(self.scheduler, clock=clock, speculator=speculator)
        self._reader = StepReader(self.requests, self.scheduler, speculator, self._make_copies)
        self._computed_at = 0.0  # when the last step in flight was found complete
        self.when_cores_are_free: Callable[[], None] | None = None  # see EngineCore.call_when_cores_are_free

    def new_scheduler(self) -> Scheduler:
        """A scheduler for other sequences, on the same blocks and with the same limits."""
        return self._make_scheduler(None)

    def _make_scheduler(self, policy: SchedulingPolicy | None, num_groups: int = 1) -> Scheduler:
        return Scheduler(
            self._blocks,
            policy=policy,
            tiers=self._tiers,
            adapters=self.adapters,
            slow=self._slow,
            num_groups=num_groups,
            **self._limits,
        )

    def count_adapters(self, sequences: Iterable[Sequence]) -> dict[str, int]:
        """Number of sequences by the name of their adapter, without those that have none."""
        if self.adapters is None:
            return {}
        requests = [self.requests.by_sequence.get(sequence.id) for sequence in list(sequences) if sequence.adapter]
        return Counter(request.adapter_name for request in requests if request and request.adapter_name)

    @property
    def error(self) -> EngineError | None:
        """Why no further step is possible."""
        return self.requests.error

    @property
    def in_flight(self) -> StepInFlight | None:
        """The oldest step that the device computes."""
        return self._pipeline.in_flight if self._pipeline else None

    def step(self) -> None:
        """Make one step: schedule, draft, copy, then queue it and finish the one before, or execute and read it.

        One that the host samples, and one with drafts, first waits for the step in flight. EngineError, with nothing
        changed, when an open iteration over prompt logits holds the blocks that it needs.
        """
        requests, tiers, speculator = self.requests, self._tiers, self._speculator
        if requests.deadlines:
            requests.end_expired()
        if self._batch_wait.waits():
            return
        if tiers and not self._poll(tiers):
            return
        drafts_since = self._begin_drafts(speculator) if speculator else None
        batch = self.scheduler.schedule()
        if not batch.entries:
            self._require_progress()
            if not self.in_flight:
                self.requests.metrics.resume(self.clock())
        try:
            if speculator and drafts_since is not None:
                speculator.add_drafts(batch, self.scheduler, requests.by_sequence)
            is_queued = self._pipeline is not None and self._may_queue(batch)
            if self._pipeline:
                self._pipeline.settle()
            self._copy(batch)
            previous = self._queue(batch) if is_queued else None
        except BaseException:
            self._abort(batch)
            raise
        if previous:
            self._finish(previous)
        if not is_queued:
            if self._pipeline:
                self.finish_in_flight()
            batch.drop_ended()
            try:
                rows = self._execute(batch) if batch.entries else None
                if rows is not None:
                    self.scheduler.complete(batch)
                    if self._side_state:
                        self._side_state.keep(batch)
                    self._reader.read(batch, rows, self.clock())
            except BaseException:
                self._abort(batch)
                raise
        if speculator:
            self._end_drafts(speculator, batch, drafts_since)
        if tiers:
            self._let_move(tiers, batch)

    def _poll(self, tiers: TierManager) -> bool:
        """Take note of transfers that have ended; False when that ends the engine."""
        try:
            tiers.poll()
        except EngineError as error:
            self.requests.fail_all(error)
            return False
        return True

    def _let_move(self, tiers: TierManager, batch: ScheduledBatch) -> None:
        """Let blocks move where no step does it: without an entry to compute, and after the last request."""
        is_empty = not batch.entries
        if not self.requests or (is_empty and self._observed):
            tiers.start()
        if is_empty and not self.in_flight:
            tiers.wait()

    def _begin_drafts(self, speculator: Speculator) -> float | None:
        """Return when drafting began; None where the speculator rests."""
        if speculator.rests:
            return None
        started = self.clock()
        if self.in_flight and speculator.may_draft(self._drafting()):
            self.finish_in_flight()  # a draft continues the newest token
        return started

    def _end_drafts(self, speculator: Speculator, batch: ScheduledBatch, since: float | None) -> None:
        if since is None:
            speculator.rested(batch)
        else:
            speculator.stepped(batch, self.clock() - since)

    def finish_in_flight(self) -> None:
        """Wait for the steps in flight, if there are any, and finish them."""
        while self._pipeline and (step := self._pipeline.take()):
            self._finish(step)

    def quiesce(self) -> None:
        """Finish the step in flight, and wait for transfers that hold blocks which other sequences need."""
        self.finish_in_flight()
        self._settle()

    def close(self, flush_seconds: float | None = None) -> None:
        """End all requests, and forget the step in flight and outputs that were not read; see `TierManager.close`."""
        self.requests.close()
        self._masks.close()
        while self._pipeline and self._pipeline.take():
            pass
        if self._overlapping:
            self._overlapping.settle()
        if self._tiers:
            self._tiers.close(flush_seconds)

    def check(self) -> None:
        """Assert that no block is leaked, every request is scheduled, and exactly those in flight await a token."""
        self._blocks.check()
        if self._tiers:
            self._tiers.check()
        self.requests.check()
        if self.adapters:
            running = self.scheduler.running.values()
            self.adapters.check(Counter(each.adapter.digest for each in running if each.adapter))
        rows = self._pipeline.rows if self._pipeline else {}
        open_requests = self.requests.by_sequence.items()
        assert all(request.sequence.num_in_flight == (number in rows) for number, request in open_requests)

    def _copy(self, batch: ScheduledBatch) -> None:
        """Copy blocks on write. Tables and pool agree from here on: a request without its copy has ended."""
        now = self.clock()
        for entry in batch.entries:
            self.requests.by_sequence[entry.sequence.id].scheduled(now)
        if batch.copies or self._moves_after_copies:
            self._make_copies(batch.copies)

    def _make_copies(self, copies: Iterable[Copy]) -> None:
        failed: dict[Copy, Exception] = {}
        lost: dict[int, Exception] = {}  # blocks without their content
        for copy in copies:
            try:
                if isinstance(copy, StateCopy):
                    if self._side_state:
                        self._side_state.copy(copy)
                    continue
                if copy.source in lost:
                    raise lost[copy.source]
                self._executor.copy_block(copy.source, copy.target)
                lost.pop(copy.target, None)
            except Exception as error:  # noqa: BLE001 (the output of its request has it)
                failed[copy] = error
                if not isinstance(copy, StateCopy):
                    lost[copy.target] = error
        for copy, problem in failed.items():
            if not isinstance(copy, StateCopy):
                if copy.target not in lost:  # it has other content since
                    continue
                self._blocks.discard_content(copy.target)
            self.finish_in_flight()
            self._fail_in_executor(self._owners(copy), problem)
        if self._tiers and self._moves_after_copies:
            self._tiers.start()

    def _may_queue(self, batch: ScheduledBatch) -> bool:
        """Return whether the device can sample the step, and nothing waits for its tokens."""
        return not batch.has_drafts and (self._overlapping is not None or not self._needs_logits(self._sampling(batch)))

    def _queue(self, batch: ScheduledBatch) -> StepInFlight | None:
        """Queue a step that samples on the device; return the one before it, to be finished. See `step_pipeline`."""
        pipeline = self._pipeline
        assert pipeline
        batch.drop_ended()
        try:
            previous = pipeline.submit(batch, self._sampling(batch)) if batch.entries else pipeline.take()
        except BaseException as error:
            self.finish_in_flight()  # its tokens can no longer be carried
            if not isinstance(error, Exception):
                raise
            batch.drop_ended()
            self._execute_apart(batch, error)
            return None
        if self._side_state:
            self._side_state.keep(batch)
        return previous

    def _execute(self, batch: ScheduledBatch) -> Iterable[Row] | None:
        """Return what the step computed; None where it failed, and its sequences were computed and read one by one."""
        started = self.clock() if self._tiers or self._slow else 0.0
        try:
            rows = self._compute(batch)
        except Exception as error:  # noqa: BLE001 (the outputs of the requests that cause it have it)
            self._execute_apart(batch, error)
            return None
        if self._tiers:
            observe_prefill(self._tiers.costs, batch, self.clock() - started)
        if self._slow:
            self._slow.observe(batch, self.clock() - started)
        return rows

    def _compute(self, batch: ScheduledBatch) -> Iterable[Row]:
        """Return a token, or the logits [vocab] to sample it from, for each row of the entries that sample."""
        sampling, constrained = self._rows_of(batch)
        if self._pipeline and self._pipeline.samples and not self._needs_logits(sampling):
            tokens = self._pipeline.run(batch, sampling)
            if self.when_cores_are_free:
                self.when_cores_are_free()
            return tokens
        masks_done = self._masks.start(constrained) if constrained else None
        observed = self._observed
        try:
            forward = self.builder.build(batch)
            if self._tiers and observed:  # on a core that is left, blocks move meanwhile
                with self._tiers.during(lambda: observed.is_computing):
                    logits = observed.forward(forward)
            else:
                logits = self._executor.forward(forward)
        finally:
            if masks_done:
                masks_done()
        if self._observe:
            self._observe(batch)
        if self.when_cores_are_free:
            self.when_cores_are_free()
        return sampled_rows(logits, sampling, self.requests)

    def _rows_of(self, batch: ScheduledBatch) -> tuple[list[Request], list[Constrained]]:
        """Return the request of each row of a step's logits, and the matchers of those with a constraint."""
        sampling, constrained = list[Request](), list[Constrained]()
        for entry in batch.entries:
            num_logits = entry.num_logits
            request = self.requests.by_sequence.get(entry.sequence.id) if num_logits else None
            if request is None:
                continue
            sampling += [request] * num_logits
            if request.matcher and entry.samples:
                constrained.append((request.matcher, entry.drafts))
        return sampling, constrained

    def _execute_apart(self, batch: ScheduledBatch, error: Exception) -> None:
        """Compute the sequences of a step that failed one by one. One that was preempted since waits for its turn."""
        _log.warning("a step failed (%s); its sequences are computed again one by one (%d)", error, len(batch.entries))
        self.requests.metrics.num_failed_steps += 1
        for entry in batch.entries:
            if entry.sequence.state is not SequenceState.RUNNING:
                continue
            alone = batch.only(entry)
            try:
                self._replay(entry)
                rows = self._compute(alone)
            except Exception as again:  # noqa: BLE001 (the request's output has it)
                self._fail_in_executor([self.requests.by_sequence[entry.sequence.id]], again)
                continue
            self.scheduler.complete(alone)
            self._reader.read(alone, rows, self.clock())

    def _replay(self, entry: ScheduledSequence) -> None:
        """Compute side state again up to an entry: a step that failed may have changed it."""
        if self._side_state:
            for chunk in self._side_state.replay(entry, self._executor.max_batch_tokens):
                self._executor.forward(self.builder.build(chunk))

    def _finish(self, step: StepInFlight) -> None:
        """Wait for a queued step and read it. If it fails, so does the step that was queued after it."""
        try:
            if self.when_cores_are_free:
                self.when_cores_are_free()
            masks_done = self._masks.start(self._rows_of(step.batch)[1]) if self._overlapping else None
            try:
                result = step.result()
            except Exception as error:  # noqa: BLE001 (the outputs of the requests that cause it have it)
                self._undo_following(step)
                self.scheduler.undo(step.batch)
                self._execute_apart(step.batch, error)
                return
            finally:
                if masks_done:
                    masks_done()
            if self._tiers:
                now = self.clock()
                observe_prefill(self._tiers.costs, step.batch, now - max(step.queued_at, self._computed_at))
                self._computed_at = now
            self.scheduler.retire(step.batch)
            rows = result if isinstance(result, list) else sampled_rows(result, step.requests, self.requests)
            self._reader.read(step.batch, rows, self.clock(), num_discarded=step.num_discarded_tokens)
        except BaseException:
            self._abort(step.batch)
            raise

    def _undo_following(self, failed: StepInFlight) -> None:
        following = list[StepInFlight]()
        while self._pipeline and (step := self._pipeline.take()):
            following.append(step)
        for step in reversed(following):
            with suppress(Exception):  # it is computed again, whatever its outcome was
                step.result()
            self.requests.metrics.count(step.batch.num_tokens, step.batch.num_tokens)
            self.scheduler.undo(step.batch)
            if self._side_state:  # what was not in the failed step too is not computed again here
                self.scheduler.restart(step.batch, kept=failed.batch)

    def _fail_in_executor(self, failed: list[Request], error: Exception) -> None:
        """End requests that the executor failed on; all, if it cannot compute one token of a fresh sequence either."""
        self.requests.take_out(failed)
        if any(self._computes_one_token() for _ in range(_ATTEMPTS)):
            self.requests.fail(failed, error)
        else:
            self.requests.fail_all(error, failed)

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

    def _abort(self, batch: ScheduledBatch) -> None:
        """Abort the requests of a step that is interrupted, as by Ctrl-C: part of its outcome may be lost."""
        for number in [entry.sequence.id for entry in batch.entries]:
            request = self.requests.by_sequence.get(number)
            self.requests.end_and_put(request.id if request else number)  # a first choice has its request's id
        for move in [copy for copy in batch.copies if isinstance(copy, BlockMove)]:
            self._blocks.discard_content(move.target)
            for request in self._owners(move):
                self.requests.end_and_put(request.id)

    def _owners(self, copy: Copy) -> list[Request]:
        """Running requests that read the target of a copy."""
        running = [self.requests.by_sequence[number] for number in self.scheduler.running]
        return [request for request in running if self._blocks.holds(request.sequence.id, copy)]

    def _sampling(self, batch: ScheduledBatch) -> list[Request]:
        """Requests that the step samples tokens for, one for each row of its logits."""
        return [
            self.requests.by_sequence[entry.sequence.id] for entry in batch.entries for _ in range(entry.num_logits)
        ]

    def _drafting(self) -> list[Request]:
        """Running requests that decode: a step may verify drafts for them."""
        running = self.scheduler.running.values()
        return [self.requests.by_sequence[sequence.id] for sequence in running if sequence.num_pending == 1]

    def _needs_logits(self, sampling: Iterable[Request]) -> bool:
        return any(request.needs_logits or self.requests.unforked(request) for request in sampling)

    def _require_progress(self) -> None:
        """Raise EngineError when nothing can run and neither a step in flight nor a transfer could change that."""
        if self.in_flight or not self.requests:
            return
        if self._tiers and (self._tiers.will_change or self.scheduler.has_ended_loads):
            return
        own = {block for number in self.scheduler.running for block in self._blocks.table(number)}
        others = self._blocks.num_in_use - len(own)
        if others > 0:
            raise EngineError(
                f"no block is free for the next step: an open iteration over prompt logits holds"
                f" {others} of {self._blocks.num_blocks}; finish or close it first"
            )
        raise EngineError(
            f"no step is possible for the {len(self.requests)} open requests, which use {self._blocks.num_in_use} of"
            f" {self._blocks.num_blocks} KV blocks: this is a bug of the engine; end them with abort, or load it again"
        )


class BatchWait:
    """The wait of a dynamic batch that is not full for more requests."""

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._is_dynamic = scheduler.policy.batching == "dynamic"
        self._until: float | None = None

    def waits(self) -> bool:
        """Wait a moment when a dynamic batch may not start yet; returns whether it waited."""
        if not self._is_dynamic:
            return False
        scheduler = self._scheduler
        is_partial = not scheduler.running and 0 < len(scheduler.waiting) < scheduler.max_sequences
        if not is_partial:
            self._until = None
            return False
        now = self._clock()
        if self._until is None:
            self._until = now + scheduler.policy.batch_wait_seconds
        left = self._until - now
        if left > 0:
            self._clock.sleep(min(left, _LONGEST_SLEEP_SECONDS))
        return left > 0


def observe_prefill(costs: CostModel, batch: ScheduledBatch, seconds: float) -> None:
    """Record the time of a step most of which was prompts, at the context of its longest prompt."""
    prompts = [entry for entry in batch.entries if entry.num_tokens > 1]
    num_tokens = sum(entry.num_tokens for entry in prompts)
    if num_tokens * 2 > batch.num_tokens:
        costs.observe_prefill(max(entry.start + entry.num_tokens for entry in prompts), num_tokens, seconds)
