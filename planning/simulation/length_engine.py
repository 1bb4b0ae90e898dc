"""A simulated engine that keeps lengths alone: the engine's scheduler, KV blocks, admission and rates, without tokens.

A decode run is one event: where every running sequence decodes and none can join before the next ends or arrives, the
steps that follow differ in nothing but the length of contexts. Their number and their seconds have a closed form, so
they are made at once, with the step in which sequences end: the blocks, tokens, counters and rates are those of single
steps. The seconds of the steps of a run are interpolated between its first and its last, which is exact where the step
model is linear in the context.
"""

from array import array
from collections.abc import Sized
from dataclasses import replace
from heapq import heappop, heappush
from math import inf, sqrt
from typing import NamedTuple

from ingot.errors import RequestError
from ingot.planning.simulation.simulated_executor import EngineShape, StepPredictor, VirtualClock
from ingot.planning.simulation.timed_request import (
    ComputedTokens,
    EndedRequest,
    ObservedSteps,
    ServedLengths,
    StepWatch,
    TimedRequest,
)
from ingot.planning.simulation.unshared_blocks import UnsharedBlocks
from ingot.planning.step_model import StepShape
from ingot.runtime.asking.outputs import FinishReason, RequestMetrics
from ingot.runtime.engine.admission import AdmissionControl
from ingot.runtime.kv.blocks import SHARED, BlockManager
from ingot.runtime.kv.keys import PrefixScope
from ingot.runtime.options import EngineOptions
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.sequence import ScheduledBatch, Sequence
from ingot.runtime.scheduling.waiting import by_rank
from ingot.runtime.steps.metrics import HistogramSnapshot, MetricsRegistry
from ingot.runtime.steps.service_rates import EngineLoad, Served, ServingRates
from ingot.runtime.steps.step_loop import BatchWait

_STEPS_OF_A_RUN = 1 << 20


class EngineCounts(NamedTuple):
    """Totals of a simulated engine."""

    num_steps: int
    computed_tokens: int
    output_tokens: int
    num_preemptions: int
    prefix_hit_tokens: int
    finished_by_reason: dict[str, int]
    itl_seconds: HistogramSnapshot
    busy_seconds: float


class DecodeRun(NamedTuple):
    """Steps that decode the same sequences: the seconds of the first, and by how much each is longer than the last."""

    num_steps: int
    first_seconds: float
    growth: float

    def seconds(self, num_steps: int) -> float:
        """Return the seconds of the first steps."""
        return num_steps * (self.first_seconds + self.growth * (num_steps - 1) / 2)

    def num_steps_within(self, seconds: float) -> int:
        """Return how many steps begin within so many seconds, at least one."""
        if self.seconds(self.num_steps) < seconds:
            return self.num_steps
        half = self.growth / 2
        linear = self.first_seconds - half
        root = linear * linear + 4 * half * seconds
        estimate = 2 * seconds / (linear + sqrt(root)) if root >= 0 and linear > 0 else seconds / self.first_seconds
        count = max(1, min(self.num_steps, int(estimate) + 1))
        while count > 1 and self.seconds(count - 1) >= seconds:
            count -= 1
        while self.seconds(count) < seconds:
            count += 1
        return count


class _Row:
    """An open request, its sequence, and when it was computed."""

    __slots__ = ("first_scheduled", "first_token", "last_token", "request", "sequence")

    def __init__(self, request: TimedRequest, sequence: Sequence) -> None:
        self.request, self.sequence = request, sequence
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token = 0.0


class LengthEngine:
    """An engine without a model and without tokens, in virtual time.

    shares_prefixes   whether requests begin alike; where none does, blocks need no contents
    reports_load      whether `load` is read, for which rates are measured
    watch             called with each step, or decode run, that has been made
    """

    def __init__(
        self,
        shape: EngineShape,
        times: StepPredictor,
        options: EngineOptions,
        clock: VirtualClock,
        *,
        shares_prefixes: bool = True,
        reports_load: bool = True,
        watch: StepWatch | None = None,
    ) -> None:
        self.clock, self._times, self._watch = clock, times, watch
        self.busy_seconds = 0.0
        self._context_tokens = shape.context_tokens
        self._is_private = not options.prefix_cache
        self._unshared: UnsharedBlocks | None = None
        if not shares_prefixes or self._is_private:
            self._unshared = UnsharedBlocks(shape.num_blocks, shape.kv.block_tokens)
        self._blocks = self._unshared or BlockManager(shape.num_blocks, shape.kv.block_tokens)
        self._scheduler = Scheduler(
            self._blocks,
            policy=options,
            max_batch_tokens=shape.max_batch_tokens,
            max_sequences=shape.max_sequences,
        )
        self._measures_rates = reports_load or options.reject_late
        self._metrics, self._rates = MetricsRegistry(), ServingRates(shape.max_batch_tokens)
        self._admission = AdmissionControl(
            self._scheduler,
            self._rates,
            self._metrics,
            max_requests=options.max_requests,
            max_waiting_tokens=options.max_waiting_tokens,
            reject_late=options.reject_late,
            clock=clock,
        )
        self._batch_wait = BatchWait(self._scheduler, clock)
        self._rows: dict[int, _Row] = {}
        self.open_requests: Sized = self._rows
        self._deadlines: list[tuple[float, int]] = []
        self._num_added = 0
        self._decodes = False  # whether all running sequences decode
        self._is_steady = False  # the last step decoded all that run, and none has come, ended or been preempted
        self._next_run: DecodeRun | None = None

    @property
    def load(self) -> EngineLoad:
        """How busy it is, as the server's admission sees it."""
        assert self._measures_rates
        return self._admission.load

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of requests that wait."""
        return self._scheduler.waiting.num_prompt_tokens

    @property
    def counts(self) -> EngineCounts:
        """Totals so far."""
        metrics, scheduler = self._metrics, self._scheduler
        return EngineCounts(
            metrics.num_steps,
            metrics.computed_tokens,
            metrics.output_tokens,
            scheduler.num_preemptions,
            scheduler.prefix_hit_tokens.total(),
            dict(metrics.finished_by_reason),
            metrics.itl_seconds.snapshot(),
            self.busy_seconds,
        )

    def send(self, request: TimedRequest, timeout_seconds: float | None) -> None:
        """Queue a request. Overloaded where admission refuses it, RequestError where it can never be served."""
        self._admission.require_place(len(self._rows))
        lengths, number = request.lengths, self._num_added
        room = self._context_tokens - lengths.prompt_tokens
        if room < 1:
            raise RequestError(f"the prompt has {lengths.prompt_tokens} tokens; the context has {self._context_tokens}")
        tokens, scope = (array("b", bytes(lengths.prompt_tokens)), PrefixScope(b"%d" % number, self._is_private))
        if self._unshared is None:
            tokens, scope = request.stand_ins(), SHARED
        most = lengths.prompt_tokens + min(lengths.output_tokens, room)
        sequence = Sequence(number, tokens, lengths.prompt_tokens, most, scope=scope)
        deadline = None if timeout_seconds is None else request.seconds - request.waited_seconds + timeout_seconds
        self._admission.require_room(sequence, deadline)
        if not self._rows:
            self._rates.resume(self.clock.now)
        self._scheduler.add(sequence)
        if request.received_tokens:
            assert self._unshared, "only blocks that are not shared can come from another engine"
            self._unshared.received[scope.root] = request.received_tokens
        self._rows[number] = _Row(request, sequence)
        self._num_added += 1
        self._is_steady, self._next_run = False, None
        if deadline is not None:
            heappush(self._deadlines, (deadline, number))

    def advance(self, until: float) -> list[EndedRequest]:
        """Make the steps that begin before a moment; return what ends in them."""
        ended: list[EndedRequest] = []
        clock = self.clock
        while self._rows and clock.now < until:
            run = self._next_run or self._ahead()
            left = min(until, self._deadlines[0][0] if self._deadlines else inf) - clock.now
            if run and left > 0:
                self._decode(run, run.num_steps_within(left), ended)
            else:
                self._step(ended)
        return ended

    def settle(self, until: float) -> list[EndedRequest]:
        """Make what ends before a moment end, and no other step: a decode run that is cut costs another event."""
        ended: list[EndedRequest] = []
        while self.next_change() < until:
            run = self._ahead()
            left = self._next_deadline - self.clock.now
            if run and left > 0:
                self._decode(run, run.num_steps_within(left), ended)
            else:
                self._step(ended)
        return ended

    def next_change(self) -> float:
        """Return a moment before which no request ends; infinite without any."""
        if not self._rows:
            return inf
        run = self._ahead()
        end = self.clock.now + run.seconds(run.num_steps) if run else self.clock.now
        return min(end, max(self._next_deadline, self.clock.now))

    def take_all(self) -> list[TimedRequest]:
        """End all open requests, as a replica that fails does, and return them."""
        lost = [replace(row.request, received_tokens=0) for row in self._rows.values()]
        for row in self._rows.values():
            self._scheduler.remove(row.sequence)
        self._rows.clear()
        self._deadlines.clear()
        self._decodes, self._is_steady, self._next_run = False, False, None
        return lost

    def cached_tokens(self, request: TimedRequest) -> int:
        """Return the leading tokens of a request that the pool has cached."""
        if self._unshared:
            return 0
        cached = 0
        for content in self._blocks.contents(request.stand_ins(), SHARED):
            if not self._blocks.has(content):
                break
            cached += self._blocks.block_tokens
        return cached

    def check(self) -> None:
        """Assert that no block is leaked, and that every request is scheduled."""
        self._blocks.check()
        waiting = [sequence.id for sequence in self._scheduler.waiting]
        assert sorted([*self._scheduler.running, *waiting]) == sorted(self._rows)

    def close(self) -> None:
        """Hold nothing."""

    @property
    def _next_deadline(self) -> float:
        return self._deadlines[0][0] if self._deadlines else inf

    def _step(self, ended: list[EndedRequest]) -> None:
        """Make one step."""
        num_open = len(self._rows)
        self._next_run, self._decodes, self._is_steady = None, False, False
        if self._deadlines:
            self._end_expired(ended)
        if self._batch_wait.waits():
            return
        batch = self._scheduler.schedule()
        if not batch.entries:
            assert not self._rows, "the scheduler makes no progress"
            return
        shape, started = _shape_of(batch), self.clock.now
        self._take(self._times.seconds(shape))
        if self._watch:
            self._show(
                self._watch, started, 1, [(each.sequence, each.start, each.num_tokens) for each in batch.entries]
            )
        num_sampled = self._read(batch, started, ended)
        running = len(self._scheduler.running)
        is_same = num_open == len(self._rows) and not batch.preempted
        self._is_steady = is_same and not shape.prefill_tokens and len(batch.entries) == running
        self._decodes = num_sampled == running > 0

    def _show(self, watch: StepWatch, begin: float, num_steps: int, computed: list[tuple[Sequence, int, int]]) -> None:
        """Show what has been computed since a moment: sequences, where each began, and how many of its tokens."""
        tokens = []
        for sequence, start, count in computed:
            request = self._rows[sequence.id].request
            is_prompt = start < (request.received_tokens or sequence.num_prompt_tokens) or count > num_steps
            tokens.append(ComputedTokens(request, start, count, is_prompt))
        watch(ObservedSteps(self._scheduler, begin, self.clock.now, num_steps, tokens))

    def _take(self, seconds: float) -> None:
        self.busy_seconds += seconds
        self.clock.now += seconds

    def _read(self, batch: ScheduledBatch, started: float, ended: list[EndedRequest]) -> int:
        """Record a computed step; return how many of its sequences have a new token and go on."""
        scheduler, metrics, now = self._scheduler, self._metrics, self.clock.now
        scheduler.complete(batch)
        metrics.num_steps += 1
        metrics.computed_tokens += batch.num_tokens
        num_going_on = 0
        for entry in batch.entries:
            sequence = entry.sequence
            row = self._rows[sequence.id]
            if row.first_scheduled is None:
                row.first_scheduled = started
            if not entry.samples:
                continue
            scheduler.share(entry)
            sequence.tokens.append(0)
            metrics.output_tokens += 1
            if row.first_token is None:
                row.first_token = now
            else:
                metrics.itl_seconds.observe(now - row.last_token)
            row.last_token = now
            if len(sequence.tokens) == sequence.max_total_tokens:
                ended.append(self._end(row, "length"))
            else:
                num_going_on += 1
        self._record(1)
        return num_going_on

    def _record(self, num_steps: int) -> None:
        if not self._measures_rates:
            return
        metrics = self._metrics
        served = Served(metrics.computed_tokens, self._scheduler.waiting.num_admitted_tokens, metrics.num_finished)
        self._rates.record(served, self.clock.now, num_steps)

    def _end(self, row: _Row, reason: FinishReason) -> EndedRequest:
        sequence = row.sequence
        self._scheduler.remove(sequence)
        del self._rows[sequence.id]
        self._metrics.num_finished += 1
        self._metrics.finished_by_reason[reason] += 1
        cached = sequence.cached_tokens.total if sequence.cached_tokens else 0
        times = RequestMetrics(
            row.request.seconds,
            row.first_scheduled,
            row.first_token,
            self.clock.now,
            sequence.num_generated,
            sequence.num_preemptions,
        )
        return EndedRequest(row.request, ServedLengths(reason, sequence.num_prompt_tokens, cached, times))

    def _end_expired(self, ended: list[EndedRequest]) -> None:
        while self._deadlines and self._deadlines[0][0] <= self.clock.now:
            row = self._rows.get(heappop(self._deadlines)[1])
            if row:
                ended.append(self._end(row, "timeout"))

    def _ahead(self) -> DecodeRun | None:
        """Return the next decode run; None where the next step is not part of one."""
        if self._next_run is None and self._decodes:
            scheduler = self._scheduler
            is_closed = not scheduler.waiting.num_sequences and scheduler.policy.is_continuous
            if is_closed or self._is_steady:
                self._next_run = self._find_run()
        return self._next_run

    def _find_run(self) -> DecodeRun | None:
        """Return the steps up to the first in which a sequence ends, or for which the pool has no block left."""
        left, context, longest = _STEPS_OF_A_RUN, 0, 0
        running = self._scheduler.running
        for sequence in running.values():
            computed = sequence.num_computed
            to_end = sequence.max_total_tokens - computed - 1
            if to_end < left:
                left = to_end
            if computed > longest:
                longest = computed
            context += computed
        num_steps, rows = self._num_reserved(left), len(running)
        if not num_steps:
            return None
        first = last = self._times.seconds(_decoding(rows, context + rows, longest + 1))
        if num_steps > 1:
            last = self._times.seconds(_decoding(rows, context + rows * num_steps, longest + num_steps))
        return DecodeRun(num_steps, first, (last - first) / max(1, num_steps - 1))

    def _num_reserved(self, most: int) -> int:
        """Return how many steps the free blocks are enough for, at most `most`."""
        size, free, running = self._blocks.block_tokens, self._blocks.num_available, self._scheduler.running
        if free >= len(running) * (most // size + 1):
            return most
        starts = [(each.num_computed, len(self._blocks.table(each.id))) for each in running.values()]
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            needed = sum(max(0, -(-(start + middle) // size) - held) for start, held in starts)
            low, high = (middle, high) if needed <= free else (low, middle - 1)
        return low

    def _decode(self, run: DecodeRun, num_steps: int, ended: list[EndedRequest]) -> None:
        """Make the first steps of a run at once; sequences may end in the last of it."""
        scheduler, blocks, metrics, rows = self._scheduler, self._blocks, self._metrics, self._rows
        seconds = run.seconds(num_steps)
        self._take(seconds)
        now, done = self.clock.now, list[Sequence]()
        size, is_own, serve = blocks.block_tokens, self._unshared is not None, scheduler.waiting.serve
        for number, sequence in scheduler.running.items():
            start, tokens = sequence.num_computed, sequence.tokens
            end = start + num_steps
            serve(sequence, start, num_steps)
            tokens.frombytes(bytes(num_steps * tokens.itemsize))
            sequence.num_computed = end
            # Within a block that a sequence has for itself nothing is allocated, and no block becomes full.
            if not is_own or start % size == 0 or start // size != end // size:
                reserved = blocks.reserve(number, start, end)
                assert reserved is not None
                blocks.commit(number, tokens, end)
            rows[number].last_token = now
            if end + 1 == sequence.max_total_tokens:
                done.append(sequence)
        if self._watch:
            computed = [(each, each.num_computed - num_steps, num_steps) for each in scheduler.running.values()]
            self._show(self._watch, now - seconds, num_steps, computed)
        num_rows = len(scheduler.running)
        metrics.num_steps += num_steps
        metrics.computed_tokens += num_steps * num_rows
        metrics.output_tokens += num_steps * num_rows
        metrics.itl_seconds.observe(seconds / num_steps, num_steps * num_rows)
        for sequence in sorted(done, key=by_rank) if len(done) > 1 else done:
            ended.append(self._end(rows[sequence.id], "length"))
        self._record(num_steps)
        self._next_run = None
        if done:
            self._decodes, self._is_steady = bool(scheduler.running), False


def _decoding(rows: int, context_tokens: int, longest: int) -> StepShape:
    """Return the counts of a step that decodes so many sequences."""
    return StepShape(decode_rows=rows, context_tokens=context_tokens, longest_context=longest, num_sequences=rows)


def _shape_of(batch: ScheduledBatch) -> StepShape:
    """Return the counts that the time of a step follows from."""
    prefill = attended = decoding = context_tokens = longest = 0
    for _, start, count, *_ in batch.entries:
        if count == 1:
            decoding += 1
            context_tokens += start + 1
            longest = max(longest, start + 1)
        else:
            prefill += count
            attended += count * start + count * (count + 1) // 2
    return StepShape(
        prefill_tokens=prefill,
        prefill_context_tokens=attended,
        decode_rows=decoding,
        context_tokens=context_tokens,
        longest_context=longest,
        num_sequences=len(batch.entries),
    )
