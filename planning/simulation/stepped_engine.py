"""A simulated engine whose every step is made by the engine's own step loop, with tokens, drafts and tiers."""

from array import array
from collections.abc import Callable, Iterable, Sized
from collections.abc import Sequence as Many
from functools import partial
from itertools import islice
from math import inf
from typing import NamedTuple

from ingot.planning.simulation.length_engine import EngineCounts
from ingot.planning.simulation.simulated_executor import EngineShape, SimulatedExecutor, StepPredictor, VirtualClock
from ingot.planning.simulation.simulated_tiers import simulated_tiers
from ingot.planning.simulation.timed_request import (
    ComputedTokens,
    EndedRequest,
    ObservedSteps,
    StepWatch,
    TimedRequest,
)
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine_core import EngineCore
from ingot.runtime.forward_batch import ForwardBatch
from ingot.runtime.options import EngineOptions
from ingot.runtime.scheduling.sequence import Sequence, SequenceState
from ingot.runtime.speculation.drafter import NUM_GRADES, DraftRequest, Proposal
from ingot.runtime.speculation.speculator import Speculator
from ingot.runtime.steps.service_rates import EngineLoad


class ConstantDrafter:
    """Drafts token 0 as often as it is asked to, for nothing; the executor decides which drafts are right."""

    kind = "constant"
    is_free = True

    def propose(self, requests: Many[DraftRequest]) -> list[Proposal]:
        """Return a proposal for each request."""
        return [Proposal((0,) * each.num_tokens, (NUM_GRADES - 1,) * each.num_tokens) for each in requests]

    def catch_up_tokens(self, sequence: object) -> int:
        """Compute nothing before a draft."""
        return 0

    def forget(self, sequence: object) -> None:
        """Keep nothing."""

    def close(self) -> None:
        """Hold nothing."""


class _Position(NamedTuple):
    """A sequence before a step: its tokens in the pool, and how often it was preempted."""

    sequence: Sequence
    num_computed: int
    num_preemptions: int
    request: TimedRequest


class SteppedEngine(EngineCore):
    """An engine without a model, in virtual time.

    watch   called with each step that has been made. What a preempted sequence finds in a tier counts as computed
    """

    def __init__(
        self,
        shape: EngineShape,
        times: StepPredictor,
        options: EngineOptions,
        clock: VirtualClock,
        *,
        seed: int = 0,
        observe: Callable[[ForwardBatch], object] | None = None,
        watch: StepWatch | None = None,
    ) -> None:
        self._watch = watch
        self.executor = SimulatedExecutor(shape, times, clock, seed=seed, observe=observe)
        drafts = len(shape.acceptance)
        speculator = None
        if drafts:
            speculator = Speculator(
                ConstantDrafter(), vocab_size=self.executor.model.vocab_size, num_draft_tokens=drafts
            )
        num_slots = options.kv_host_bytes // shape.kv.block_bytes
        tiers = partial(simulated_tiers, num_slots=num_slots, options=options) if num_slots else None
        super().__init__(
            self.executor,
            max_sequences=shape.max_sequences,
            prefix_cache=options.prefix_cache,
            max_requests=options.max_requests,
            max_waiting_tokens=options.max_waiting_tokens,
            reject_late=options.reject_late,
            policy=options,
            identity="simulated",
            clock=clock,
            speculator=speculator,
            tiers=tiers,
        )
        self._virtual = clock
        self._requests: dict[int, TimedRequest] = {}
        self.open_requests: Sized = self._requests

    @property
    def load(self) -> EngineLoad:
        """How busy it is, as the server's admission sees it."""
        return self.admission.load

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of requests that wait."""
        return self._loop.scheduler.waiting.num_prompt_tokens

    @property
    def counts(self) -> EngineCounts:
        """Totals so far."""
        metrics = self.metrics()
        return EngineCounts(
            metrics.num_steps,
            metrics.computed_tokens,
            metrics.output_tokens,
            metrics.num_preemptions,
            metrics.prefix_hit_tokens,
            dict(metrics.finished_by_reason),
            metrics.itl_seconds,
            self.executor.busy_seconds,
        )

    def send(self, request: TimedRequest, timeout_seconds: float | None) -> None:
        """Queue a request. Overloaded where admission refuses it, RequestError where it can never be served."""
        assert not request.received_tokens, "blocks without contents cannot come from another engine"
        number = self.add(
            request.prompt(self.model.vocab_size),
            SamplingParams(max_tokens=request.lengths.output_tokens, ignore_eos=True),
            options=RequestOptions(timeout_seconds=timeout_seconds),
            arrival_seconds=request.seconds,
        )
        self._requests[number] = request

    def advance(self, until: float) -> list[EndedRequest]:
        """Make the steps that begin before a moment; return what ends in them."""
        ended: list[EndedRequest] = []
        while self._requests and self._virtual.now < until:
            before, busy = self._positions() if self._watch else (), self.executor.busy_seconds
            outputs = self.step()
            if self._watch and self.executor.busy_seconds > busy:
                self._show(self._watch, before, self.executor.busy_seconds - busy)
            for output in outputs:
                if output.result:
                    ended.append(EndedRequest(self._requests.pop(output.request_id), output.result))
        return ended

    def _positions(self) -> list["_Position"]:
        """Return how far each sequence is that may be in the next step."""
        scheduler = self._loop.scheduler
        waiting = islice(scheduler.waiting, self.executor.max_sequences)
        return [
            _Position(each, each.num_computed, each.num_preemptions, self._requests[each.id])
            for each in (*scheduler.running.values(), *waiting)
        ]

    def _show(self, watch: StepWatch, before: Iterable["_Position"], seconds: float) -> None:
        """Show a step that took so long. A prefix that was found is not computed."""
        computed = []
        for sequence, start, preemptions, request in before:
            if sequence.cached_tokens and not preemptions:
                start = max(start, sequence.cached_tokens.total)
            count, is_loading = sequence.num_computed - start, sequence.state is SequenceState.LOADING
            if count > 0 and not is_loading and sequence.num_preemptions == preemptions:
                computed.append(ComputedTokens(request, start, count, start < sequence.num_prompt_tokens))
        watch(ObservedSteps(self._loop.scheduler, self._virtual.now - seconds, self._virtual.now, 1, computed))

    def settle(self, until: float) -> list[EndedRequest]:
        """Make what ends before a moment end: any step may be the last of a request."""
        return self.advance(until)

    def next_change(self) -> float:
        """Return a moment before which no request ends; infinite without any."""
        return self._virtual.now if self._requests else inf

    def take_all(self) -> list[TimedRequest]:
        """End all open requests, as a replica that fails does, and return them."""
        lost = list(self._requests.values())
        for number in list(self._requests):
            self.abort(number)
        if self.has_unfinished():
            self.step()
        self._requests.clear()
        return lost

    def cached_tokens(self, request: TimedRequest) -> int:
        """Return the leading tokens of a request that the pool has cached."""
        scope, cached = self._scope(RequestOptions(), None), 0
        tokens = array("q", request.prompt(self.model.vocab_size).tobytes())
        for content in self._blocks.contents(tokens, scope):
            if not self._blocks.has(content):
                break
            cached += self._blocks.block_tokens
        return cached
