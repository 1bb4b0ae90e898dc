"""Random use of the engine: add, step, abort, failing steps. A choice that finishes has the tokens it gets alone."""

from dataclasses import replace
from functools import cache
from typing import ClassVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ingot.errors import EngineError
from ingot.runtime.asking.outputs import Completion
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.forward_batch import FloatArray, ForwardBatch, Int32Array, SamplingArrays
from ingot.runtime.requests.beam_search import BeamParams
from ingot.runtime.requests.sampler import choice_seed
from tests.runtime.engines import token_engine
from tests.runtime.steps.test_deadlines import Clock
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.overlapping_executor import FakeBegunStep, FakeOverlappingExecutor
from tests.simulators.pipelined_executor import FakePipelinedExecutor, FakeStep

# Prompts that end with a block: the second of two has its last block copied.
WHOLE_BLOCKS = st.sampled_from([4, 8]).map(lambda length: [0] * length)

# What a device can sample, and what needs the host (penalties); ends that cannot be known ahead.
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 11),
    stop_token_ids=st.sampled_from([(), (), (2,)]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.0, 1.5]),
    temperature=st.sampled_from([0.0, 0.9]),
    seed=st.integers(0, 3),
    n=st.sampled_from([1, 1, 2, 3]),
)


OPTIONS = st.builds(
    RequestOptions,
    priority=st.sampled_from([0, 0, 1, 5]),
    group=st.sampled_from(["", "a"]),
    timeout_seconds=st.sampled_from([None, None, None, 1, 7, 30]),
)


BEAM_PARAMS = st.builds(
    BeamParams,
    width=st.integers(1, 4),
    max_tokens=st.integers(1, 11),
    stop_token_ids=st.sampled_from([(), (2,)]),
)


class BreakableExecutor(FakeExecutor):
    """Fails `times` times where `breaks` says: before or after it wrote to the pool."""

    breaks: str = ""
    times = 0

    def forward(self, batch: ForwardBatch) -> FloatArray:
        self.break_if("before")
        return super().forward(batch)

    def logits(self, batch: ForwardBatch) -> FloatArray:
        logits = super().logits(batch)
        self.break_if("after")
        return logits

    def break_if(self, when: str) -> None:
        if self.times and self.breaks == when:
            self.times -= 1
            raise EngineError("broken")


class BreakablePipelinedExecutor(BreakableExecutor, FakePipelinedExecutor):
    """Fails where `breaks` says: when a step is queued or while it computes."""

    def submit(self, batch: ForwardBatch, sampling: SamplingArrays, carried: Int32Array) -> FakeStep:
        self.break_if("before")
        return super().submit(batch, sampling, carried)


class BreakableOverlappingExecutor(BreakableExecutor, FakeOverlappingExecutor):
    """Fails where `breaks` says: when a step begins or while stages compute it."""

    def begin(self, batch: ForwardBatch) -> FakeBegunStep:
        self.break_if("before")
        return super().begin(batch)


@cache
def tokens_alone(prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    with token_engine(vocab_size=3) as engine:
        return engine.generate(list(prompt), params).token_ids


@cache
def searched_alone(prompt: tuple[int, ...], params: BeamParams) -> list[tuple[int, ...]]:
    with token_engine(vocab_size=3) as engine:
        return [choice.token_ids for choice in engine.beam_search(list(prompt), params).choices]


@cache
def logits_of_ones() -> FloatArray:
    with token_engine(vocab_size=3) as engine:
        return engine.prompt_logits([1] * 9)


class EngineOperations(RuleBasedStateMachine):
    """A small vocabulary and pool, so that prefixes are shared and blocks often run out."""

    executor_type: ClassVar[type[BreakableExecutor]] = BreakableExecutor

    @initialize(
        num_blocks=st.integers(6, 10), budget=st.integers(1, 12), places=st.integers(1, 5), prefix_cache=st.booleans()
    )
    def start(self, num_blocks: int, budget: int, places: int, prefix_cache: bool) -> None:
        self.executor = self.executor_type(num_blocks=num_blocks, block_tokens=4, max_batch_tokens=budget, vocab_size=3)
        self.clock = Clock()
        self.engine = Engine(self.executor, max_sequences=places, prefix_cache=prefix_cache, clock=self.clock)
        self.requests: dict[int, tuple[tuple[int, ...], SamplingParams]] = {}
        self.searches: dict[int, tuple[tuple[int, ...], BeamParams]] = {}
        self.failed: set[int] = set()  # requests of which a choice or more failed
        self.ended: dict[int, dict[int, Completion]] = {}  # choices by request and index

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=13) | WHOLE_BLOCKS, params=PARAMS, options=OPTIONS)
    def add(self, prompt: list[int], params: SamplingParams, options: RequestOptions) -> None:
        self.requests[self.engine.add(prompt, params, options=options)] = tuple(prompt), params

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=13) | WHOLE_BLOCKS, params=BEAM_PARAMS)
    def search(self, prompt: list[int], params: BeamParams) -> None:
        self.searches[self.engine.add(prompt, params)] = tuple(prompt), params

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.clock.now += 1
            for output in self.engine.step():
                if output.request_id in self.searches:
                    if output.result:
                        self.searched(output.result)
                    continue
                if output.completion:
                    self.choice_ended(output.completion)
                if output.result:
                    self.finished(output.result)

    @rule(number=st.integers(0, 20))
    def abort(self, number: int) -> None:
        if self.requests:
            request_id = sorted(self.requests)[number % len(self.requests)]
            result = self.engine.abort(request_id)
            assert result is not None
            for choice in result.choices:
                self.choice_ended(choice)
            self.finished(result)

    @rule(number=st.integers(0, 20))
    def abort_search(self, number: int) -> None:
        if self.searches:
            request_id = sorted(self.searches)[number % len(self.searches)]
            assert self.engine.abort(request_id) is not None
            del self.searches[request_id]

    @rule(when=st.sampled_from(["before", "after"]), times=st.integers(1, 2))
    def fail(self, when: str, times: int) -> None:
        """The next computed step fails; the second time, so does its first sequence when it is computed alone."""
        self.executor.breaks, self.executor.times = when, times
        before, num_failed_before = self.engine.metrics(), len(self.failed)
        while self.engine.has_unfinished() and self.executor.times:
            self.step(1)
        self.step(getattr(self.executor, "num_at_once", 1) - 1)  # steps in flight are read
        after = self.engine.metrics()
        num_failed = times - self.executor.times
        num_failed_steps = after.num_failed_steps - before.num_failed_steps
        assert num_failed_steps + len(self.failed) - num_failed_before <= num_failed
        assert (num_failed_steps > 0) == (num_failed > 0)
        self.executor.times = 0

    @rule(length=st.integers(1, 9))
    def evaluate(self, length: int) -> None:
        if self.engine.metrics().num_running == 0:
            assert np.array_equal(self.engine.prompt_logits([1] * length), logits_of_ones()[:length])

    def searched(self, result: Completion) -> None:
        prompt, params = self.searches.pop(result.request_id)
        if result.error:
            self.failed.add(result.request_id)
        else:
            assert [choice.token_ids for choice in result.choices] == searched_alone(prompt, params)

    def choice_ended(self, choice: Completion) -> None:
        prompt, params = self.requests[choice.request_id]
        expected = tokens_alone(prompt, replace(params, n=1, seed=choice_seed(params.seed or 0, choice.index)))
        cut_off = choice.finish_reason in ("abort", "timeout", "error")
        assert choice.token_ids == (expected[: len(choice.token_ids)] if cut_off else expected)
        if choice.error:
            self.failed.add(choice.request_id)
        same = self.ended.setdefault(choice.request_id, {}).setdefault(choice.index, choice)
        assert same.token_ids == choice.token_ids

    def finished(self, result: Completion) -> None:
        _, params = self.requests.pop(result.request_id)
        ended = self.ended.pop(result.request_id)
        assert [choice.index for choice in result.choices] == sorted(ended) == [*range(params.n)]
        assert [choice.seed for choice in result.choices] == [
            choice_seed(params.seed or 0, index) for index in range(params.n)
        ]

    @invariant()
    def bookkeeping_is_consistent(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.engine.has_unfinished():
                break
            self.step(1)
        assert not self.requests, "a request never finished"
        assert not self.searches, "a search never finished"
        assert self.engine.metrics().blocks_in_use == 0


class PipelinedEngineOperations(EngineOperations):
    """The same with a step in flight."""

    executor_type = BreakablePipelinedExecutor


class OverlappingEngineOperations(EngineOperations):
    """The same with a step in flight in each stage."""

    executor_type = BreakableOverlappingExecutor


TestEngineOperations = EngineOperations.TestCase
TestEngineOperations.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

TestPipelinedEngineOperations = PipelinedEngineOperations.TestCase
TestPipelinedEngineOperations.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)

TestOverlappingEngineOperations = OverlappingEngineOperations.TestCase
TestOverlappingEngineOperations.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
