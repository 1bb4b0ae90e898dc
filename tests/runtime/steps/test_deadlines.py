"""Requests whose time is over end with the reason "timeout" and their output so far, in whatever state they are."""

from collections.abc import Callable
from typing import Any

import pytest

from ingot.runtime.asking.outputs import Completion
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from tests.runtime.engines import demo_tokenizer
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.pipelined_executor import FakePipelinedExecutor

EXECUTORS = pytest.mark.parametrize("executor", [FakeExecutor, FakePipelinedExecutor])
LONG = SamplingParams(max_tokens=100)


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def engine_of(executor: type[FakeExecutor], clock: Clock, *, max_sequences: int = 8, **options: Any) -> Engine:
    return Engine(executor(**options), max_sequences=max_sequences, clock=clock)


def within(seconds: float) -> RequestOptions:
    return RequestOptions(timeout_seconds=seconds)


def steps(engine: Engine, count: int) -> dict[int, Completion]:
    """Completions of `count` steps, by request."""
    done: dict[int, Completion] = {}
    for _ in range(count):
        done |= {output.request_id: output.completion for output in engine.step() if output.completion}
        engine.check()
    return done


def expire(engine: Engine, clock: Clock, request_id: int) -> Completion:
    """Let ten seconds pass; the completion of the request, which ends, and everything with it that it held."""
    clock.now += 10
    completion = steps(engine, 1)[request_id]
    assert completion.finish_reason == "timeout"
    assert completion.error is None
    steps(engine, 2)
    return completion


@EXECUTORS
def test_a_request_that_waits_ends_without_output(executor: type[FakeExecutor]) -> None:
    with engine_of(executor, clock := Clock(), max_sequences=1) as engine:
        running, waiting = engine.add([1], LONG), engine.add([2], LONG, options=within(10))
        steps(engine, 3)
        completion = expire(engine, clock, waiting)
        assert (completion.token_ids, completion.metrics.first_scheduled_seconds) == ((), None)
        assert completion.metrics.e2e_seconds == 10
        assert engine.abort(running)


@EXECUTORS
def test_a_request_ends_between_the_chunks_of_its_prompt(executor: type[FakeExecutor]) -> None:
    with engine_of(executor, clock := Clock(), max_batch_tokens=4) as engine:
        request = engine.add(list(range(20)), LONG, options=within(10))
        steps(engine, 2)
        assert expire(engine, clock, request).token_ids == ()
        assert engine.metrics().blocks_in_use == 0


@EXECUTORS
def test_a_request_that_decodes_keeps_its_output_and_its_batch_mate_goes_on(executor: type[FakeExecutor]) -> None:
    with engine_of(executor, clock := Clock()) as engine:
        expected = {prompt: engine.generate([prompt], LONG).token_ids for prompt in (1, 2)}
        mate, request = engine.add([1], LONG), engine.add([2], LONG, options=within(10))
        steps(engine, 5)
        completion = expire(engine, clock, request)
        assert 3 <= len(completion.token_ids) <= 5
        assert completion.token_ids == expected[2][: len(completion.token_ids)]
        assert steps(engine, 100)[mate].token_ids == expected[1]


@EXECUTORS
def test_a_request_that_was_preempted_keeps_the_output_before(executor: type[FakeExecutor]) -> None:
    with engine_of(executor, clock := Clock(), max_sequences=1) as engine:
        request = engine.add([1], LONG, options=RequestOptions(priority=1, timeout_seconds=10))
        steps(engine, 4)
        engine.add([2], LONG)
        steps(engine, 2)
        completion = expire(engine, clock, request)
        assert completion.metrics.num_preemptions == 1
        assert len(completion.token_ids) > 1


def test_text_that_was_held_back_for_a_stop_string_is_part_of_the_output() -> None:
    tokenizer, clock = demo_tokenizer(), Clock()
    executor = FakeExecutor(vocab_size=tokenizer.vocab_size)
    with Engine(executor, tokenizer, clock=clock) as engine:
        text = engine.generate("import", LONG).text
        request = engine.add("import", SamplingParams(max_tokens=100, stop=text[:-1] + "\0"), options=within(10))
        outputs = [output for _ in range(5) for output in engine.step()]
        assert not any(output.text for output in outputs)
        completion = expire(engine, clock, request)
        assert len(completion.text) > 1
        assert text.startswith(completion.text)


@EXECUTORS
def test_a_request_that_is_late_already_ends_with_the_first_step(executor: type[FakeExecutor]) -> None:
    with engine_of(executor, clock := Clock()) as engine:
        clock.now = 100
        request = engine.add([1], LONG, options=within(10), arrival_seconds=50)
        assert steps(engine, 1)[request].finish_reason == "timeout"
        assert not engine.has_unfinished()


def test_one_that_ends_in_time_does_not_expire_later() -> None:
    with engine_of(FakeExecutor, clock := Clock()) as engine:
        completion = engine.generate([1], SamplingParams(max_tokens=3), options=within(10))
        assert completion.finish_reason == "length"
        clock.now = 100
        assert engine.generate([1], SamplingParams(max_tokens=3)).finish_reason == "length"


def test_generate_and_stream_return_what_there_is() -> None:
    clock = Clock()

    class SlowExecutor(FakeExecutor):
        def forward(self, batch: Any) -> Any:
            clock.now += 1
            return super().forward(batch)

    with engine_of(SlowExecutor, clock) as engine:
        completion = engine.generate([1], LONG, options=within(10))
        assert (completion.finish_reason, len(completion.token_ids)) == ("timeout", 10)
        *tokens, last = engine.stream([1], LONG, options=within(5))
        assert (len(tokens), last.completion and last.completion.finish_reason) == (5, "timeout")


def test_deadlines_of_requests_that_have_ended_take_no_memory() -> None:
    with engine_of(FakeExecutor, Clock()) as engine:
        for _ in range(300):
            engine.generate([1], SamplingParams(max_tokens=1), options=within(1e6))
        assert len(engine._loop.requests.deadlines) < 100


@EXECUTORS
@pytest.mark.parametrize("end", ["abort", "timeout"])
@pytest.mark.parametrize("after", range(12))
def test_a_request_ends_after_any_number_of_steps_and_no_other_notices(
    executor: type[FakeExecutor], end: str, after: int
) -> None:
    """Chunked prefill, decoding and preemption in a small pool, with a step in flight or without."""
    params = SamplingParams(max_tokens=14)
    prompts = [[number] * (5 + 4 * number) for number in range(4)]
    make: Callable[[Clock], Engine] = lambda clock: engine_of(  # noqa: E731
        executor, clock, block_tokens=4, num_blocks=12, max_batch_tokens=6, max_sequences=3
    )
    with make(Clock()) as engine:
        expected = [completion.token_ids for completion in engine.generate(prompts, params)]
    for victim in range(4):
        with make(clock := Clock()) as engine:
            ids = []
            for number, prompt in enumerate(prompts):
                options = RequestOptions(
                    priority=number % 2, timeout_seconds=10 if (end, number) == ("timeout", victim) else None
                )
                ids.append(engine.add(prompt, params, options=options))
            done = steps(engine, after)
            clock.now = 10
            aborted = engine.abort(ids[victim]) if end == "abort" else None
            if aborted:
                done[ids[victim]] = aborted
            while engine.has_unfinished():
                done |= steps(engine, 1)
            assert set(done) == set(ids)
            assert engine.metrics().blocks_in_use == 0
            for number, request_id in enumerate(ids):
                tokens = done[request_id].token_ids
                assert tokens == expected[number][: len(tokens) if number == victim else None]
                assert done[request_id].finish_reason == (end if number == victim else "length")
