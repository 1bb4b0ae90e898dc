"""Static and dynamic batches: when they start, that none joins later, and tokens that do not change."""

from typing import Any

import pytest

from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.scheduling_policy import Batching, SchedulingPolicy
from tests.runtime.engines import random_requests
from tests.runtime.steps.test_deadlines import Clock
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.pipelined_executor import FakePipelinedExecutor

CONTINUOUS: Batching = "continuous"


def engine_of(
    batching: Batching, executor: type[FakeExecutor] = FakeExecutor, *, max_sequences: int = 2, **options: Any
) -> tuple[Engine, Clock]:
    clock = Clock()
    policy = SchedulingPolicy(batching=batching, batch_wait_seconds=1)
    engine = Engine(executor(**options), max_sequences=max_sequences, policy=policy, clock=clock)
    return engine, clock


def tokens(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count)


def running(engine: Engine) -> list[int]:
    return sorted(engine._loop.scheduler.running)


def test_a_static_batch_runs_to_its_end_before_the_next_begins() -> None:
    engine, _ = engine_of("static")
    with engine:
        first, second, third = (engine.add([number], tokens(count)) for number, count in enumerate([2, 5, 3]))
        seen = []
        while engine.has_unfinished():
            engine.step()
            seen.append(running(engine))
        assert seen == [[first, second], [second], [second], [second], [], [third], [third], []]


def test_continuous_batching_fills_the_place_at_once() -> None:
    engine, _ = engine_of("continuous")
    with engine:
        first, second, third = (engine.add([number], tokens(count)) for number, count in enumerate([2, 5, 3]))
        engine.step()
        engine.step()
        engine.step()
        assert running(engine) == [second, third]
        assert first not in running(engine)


def test_a_static_batch_whose_prompts_take_several_steps_is_filled_all_the_same() -> None:
    engine, _ = engine_of("static", max_batch_tokens=4, max_sequences=3)
    with engine:
        for number in range(3):
            engine.add([number] * 5, tokens(9))
        late = None
        for _ in range(5):
            engine.step()
            late = late or engine.add([9], tokens(2))
        assert len(running(engine)) == 3
        assert late not in running(engine)


def test_a_dynamic_batch_waits_until_it_is_full_or_time_is_over() -> None:
    engine, clock = engine_of("dynamic")
    with engine:
        engine.add([1], tokens(3))
        assert engine.step() == []
        assert (running(engine), 0 < clock.now < 0.01) == ([], True)
        engine.add([2], tokens(3))
        engine.step()
        assert len(running(engine)) == 2, "it is full"
        while engine.has_unfinished():
            engine.step()
        before = clock.now
        engine.generate([3], tokens(3))
        assert clock.now - before == pytest.approx(1)


@pytest.mark.parametrize("executor", [FakeExecutor, FakePipelinedExecutor])
@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_tokens_are_those_of_continuous_batching(batching: Batching, executor: type[FakeExecutor]) -> None:
    prompts, params = map(list, zip(*random_requests(12, seed=3), strict=True))
    results = []
    for each in (batching, CONTINUOUS):
        engine, _ = engine_of(each, executor, num_blocks=16, block_tokens=8, max_batch_tokens=16, max_sequences=4)
        with engine:
            results.append([completion.token_ids for completion in engine.generate(prompts, params)])
            engine.check()
            assert engine.metrics().blocks_in_use == 0
    assert results[0] == results[1]
