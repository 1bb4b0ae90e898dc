"""Pipelined steps: the same tokens as steps one by one, no leaks, no discarded block in the prefix index."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ingot.errors import EngineError
from ingot.runtime.asking.outputs import Completion
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.forward_batch import FloatArray, ForwardBatch, Int32Array, SamplingArrays
from tests.runtime.engines import (
    LOAD_VOCAB_SIZE,
    VOCAB_SIZE,
    Load,
    demo_tokenizer,
    serve,
    text_engine,
    token_engine,
)
from tests.simulators.pipelined_executor import FakePipelinedExecutor, FakeStep

NEEDS_LOGITS = SamplingParams(max_tokens=4, logprobs=0)


class RecordingExecutor(FakePipelinedExecutor):
    """Records the order of events; fails, or loses a row of logits, at the steps in `fails`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"vocab_size": VOCAB_SIZE, **options})
        self.events: list[str] = []
        self.fails: dict[str, int] = {}  # number of the step by what fails: "submit", "compute", "row"
        self.computing = -1

    def submit(self, batch: ForwardBatch, sampling: SamplingArrays, carried: Int32Array) -> FakeStep:
        self.events.append(f"submit {self.num_submitted}")
        if self.fails.get("submit") == self.num_submitted:
            del self.fails["submit"]
            raise EngineError("the queue is full")
        return super().submit(batch, sampling, carried)

    def compute(self, step: FakeStep) -> None:
        self.events.append(f"read {step.number}")
        self.computing = step.number
        super().compute(step)

    def forward(self, batch: ForwardBatch) -> FloatArray:
        self.events.append("forward")
        self.computing = -1
        return super().forward(batch)

    def copy_block(self, source: int, target: int) -> None:
        self.events.append("copy")
        super().copy_block(source, target)

    def logits(self, batch: ForwardBatch) -> FloatArray:
        logits = super().logits(batch)
        if self.fails.get("compute") == self.computing:
            raise EngineError("the device is gone")
        if self.fails.get("row") == self.computing:
            logits[0, 5] = np.nan
        return logits


def alone(prompt: list[int], params: SamplingParams, **options: Any) -> Completion:
    """The completion of a request by steps one by one, in an engine of its own."""
    with token_engine(num_blocks=32, **options) as engine:
        return engine.generate(prompt, params)


def finish(engine: Engine) -> dict[int, Completion]:
    """Step until all requests finish; completions by request."""
    done: dict[int, Completion] = {}
    while engine.has_unfinished():
        done |= {output.request_id: output.completion for output in engine.step() if output.completion}
        engine.check()
    return done


def test_a_step_is_queued_before_the_tokens_of_the_one_before_are_read() -> None:
    executor = RecordingExecutor()
    with Engine(executor) as engine:
        completion = engine.generate([1, 2, 3], SamplingParams(max_tokens=4))
        assert completion.token_ids == alone([1, 2, 3], SamplingParams(max_tokens=4)).token_ids
        assert not engine.has_unfinished()
    assert executor.events == [
        *("submit 0", "submit 1", "read 0", "submit 2", "read 1", "submit 3", "read 2"),
        "read 3",  # max_tokens is known ahead: no fifth step
    ]


def test_the_chunks_of_a_prompt_and_arrivals_overlap_as_decoding_does() -> None:
    executor = RecordingExecutor(max_batch_tokens=8)
    with Engine(executor) as engine:
        first = engine.add(list(range(20)), SamplingParams(max_tokens=2))
        engine.step()
        second = engine.add([7, 8], SamplingParams(max_tokens=2))
        done = finish(engine)
    assert done[first].token_ids == alone(list(range(20)), SamplingParams(max_tokens=2)).token_ids
    assert done[second].token_ids == alone([7, 8], SamplingParams(max_tokens=2)).token_ids
    assert executor.events[:3] == ["submit 0", "submit 1", "read 0"]
    assert executor.num_submitted == 4


def test_a_step_sampled_on_the_host_waits_for_the_one_in_flight() -> None:
    executor = RecordingExecutor()
    with Engine(executor) as engine:
        plain = engine.add([1], SamplingParams(max_tokens=9))
        engine.step()
        logged = engine.add([2], NEEDS_LOGITS)
        outputs = engine.step()
        assert [output.request_id for output in outputs] == [plain, plain, logged]
        done = finish(engine)
    assert executor.events[:7] == ["submit 0", "read 0", *["forward"] * 4, "submit 1"]
    assert done[plain].token_ids == alone([1], SamplingParams(max_tokens=9)).token_ids
    assert done[logged].logprobs == alone([2], NEEDS_LOGITS).logprobs


def test_a_request_that_ends_in_flight_is_removed_from_a_step_sampled_on_the_host() -> None:
    params = SamplingParams(max_tokens=20)
    tokens = alone([1], params).token_ids
    with Engine(RecordingExecutor(eos_token_ids=(tokens[1],))) as engine:
        ends = engine.add([1], params)
        engine.step()
        engine.step()  # its end token is in flight
        logged = engine.add([2, 3], replace(NEEDS_LOGITS, ignore_eos=True))
        done = finish(engine)
        assert done[ends].token_ids == tokens[:2]
        assert done[logged].logprobs == alone([2, 3], NEEDS_LOGITS).logprobs
        assert (engine.metrics().computed_tokens, engine.metrics().discarded_tokens) == (2 + 5, 0)


def test_a_discarded_row_that_is_not_finite_is_ignored() -> None:
    params = SamplingParams(max_tokens=20)
    tokens = alone([1], params).token_ids
    executor = RecordingExecutor(eos_token_ids=(tokens[1],))
    executor.fails["row"] = 2  # queued before the end token of step 1 was read
    with Engine(executor) as engine:
        ends, other = engine.add([1], params), engine.add([2, 3], replace(params, ignore_eos=True))
        done = finish(engine)
        assert done[ends].token_ids == tokens[:2]
        assert done[other].token_ids == alone([2, 3], params).token_ids


def test_a_chunk_in_the_middle_of_a_prompt_is_queued_even_if_the_host_must_sample_its_end() -> None:
    executor = RecordingExecutor(max_batch_tokens=8)
    with Engine(executor) as engine:
        completion = engine.generate(list(range(20)), NEEDS_LOGITS, keep_logits=True)
        assert completion.token_ids == alone(list(range(20)), NEEDS_LOGITS).token_ids
    assert executor.events[:6] == ["submit 0", "submit 1", "read 0", "read 1", "forward", "forward"]


def test_a_request_that_ends_while_its_next_token_computes_discards_that_token() -> None:
    params = SamplingParams(max_tokens=20)
    tokens = alone([1, 2, 3], params).token_ids
    with Engine(RecordingExecutor(eos_token_ids=(tokens[5],))) as engine:
        completion = engine.generate([1, 2, 3], params)
        assert (completion.token_ids, completion.finish_reason) == (tokens[:6], "stop")
        assert engine.has_unfinished(), "its last step is in flight"
        assert engine.step() == []
        assert not engine.has_unfinished()
        metrics = engine.metrics()
        assert (metrics.num_steps, metrics.computed_tokens, metrics.discarded_tokens) == (7, 9, 1)
        assert (metrics.output_tokens, metrics.blocks_in_use) == (6, 0)


def test_only_blocks_of_steps_that_were_read_enter_the_prefix_index() -> None:
    params = SamplingParams(max_tokens=20)
    tokens = alone([1, 2, 3], params).token_ids
    with Engine(RecordingExecutor(eos_token_ids=(tokens[4],), block_tokens=4)) as engine:
        engine.generate([1, 2, 3], params)  # 7 tokens read; the eighth is its end token, and fills a block in flight
        finish(engine)
        assert engine.metrics().blocks_cached == 1
        again = engine.generate([1, 2, 3, *tokens[:5]], replace(params, ignore_eos=True))
        assert again.cached_tokens == 4
        assert again.token_ids == tokens[5:] + again.token_ids[15:]


def test_stop_strings_end_a_request_at_the_same_character() -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    tokenizer = demo_tokenizer()
    with text_engine() as plain:
        text = plain.generate("def read", params).text
        params = replace(params, stop=(text[10:14],))
        expected = plain.generate("def read", params)
    with Engine(RecordingExecutor(vocab_size=tokenizer.vocab_size), tokenizer) as engine:
        outputs = list(engine.stream("def read", params))
        assert outputs[-1].completion is not None
        assert outputs[-1].completion.text == expected.text == "".join(output.text for output in outputs)
        assert outputs[-1].completion.token_ids == expected.token_ids
        finish(engine)
        assert engine.metrics().discarded_tokens == 1


def test_an_abort_with_a_step_in_flight_frees_the_blocks_for_others_at_once() -> None:
    params = SamplingParams(max_tokens=30)
    with Engine(RecordingExecutor(num_blocks=3)) as engine:
        doomed = engine.add(list(range(17)), params)
        engine.step()
        engine.step()
        completion = engine.abort(doomed)
        assert completion is not None
        assert completion.token_ids == alone(list(range(17)), params).token_ids[:1]
        assert engine.metrics().blocks_in_use == 0
        other = engine.add(list(range(50, 67)), params)
        assert finish(engine)[other].token_ids == alone(list(range(50, 67)), params).token_ids
        assert engine.metrics().discarded_tokens == 1


def test_a_step_that_cannot_be_queued_is_computed_by_sequence_after_the_one_in_flight_was_read() -> None:
    params = SamplingParams(max_tokens=4)
    executor = RecordingExecutor()
    executor.fails["submit"] = 2
    with Engine(executor) as engine:
        ids = [engine.add([number, 1, 2], params) for number in range(2)]
        done = finish(engine)
        assert [done[number].token_ids for number in ids] == [alone([n, 1, 2], params).token_ids for n in range(2)]
        assert engine.metrics().num_failed_steps == 1
    assert executor.events == [
        *("submit 0", "submit 1", "read 0", "submit 2", "read 1"),
        *("submit 2", "read 2", "submit 3", "read 3"),  # one sequence each
        *("submit 4", "read 4"),
    ]


def test_a_step_that_fails_is_computed_again_and_so_is_the_one_queued_after_it() -> None:
    params = SamplingParams(max_tokens=6)
    executor = RecordingExecutor(max_batch_tokens=16)
    executor.fails["compute"] = 1
    with Engine(executor) as engine:
        failing = engine.add(list(range(15)), params)
        engine.step()
        engine.step()
        later = engine.add([9, 8, 7], params)
        assert [output.request_id for output in engine.step()] == [failing], "step 2, which has both, was undone"
        engine.check()
        done = finish(engine)
        assert done[failing].token_ids == alone(list(range(15)), params).token_ids
        assert done[later].token_ids == alone([9, 8, 7], params).token_ids
        metrics = engine.metrics()
        assert (metrics.blocks_in_use, metrics.num_failed_steps, metrics.discarded_tokens) == (0, 1, 4)


def test_blocks_that_were_copied_for_a_step_survive_the_failure_of_the_one_in_flight() -> None:
    prompt = list(range(32))
    executor = RecordingExecutor()
    executor.fails["compute"] = 1
    with Engine(executor) as engine:
        failing = engine.add(prompt, SamplingParams(max_tokens=9))
        engine.step()
        engine.step()  # from here on, the prompt's blocks are in the prefix index and in use
        sharing = engine.add(prompt, NEEDS_LOGITS)
        done = finish(engine)
        assert done[failing].token_ids == alone(prompt, SamplingParams(max_tokens=9)).token_ids
        assert done[sharing].cached_tokens == 31
        assert done[sharing].token_ids == alone(prompt, NEEDS_LOGITS).token_ids
        assert engine.metrics().num_failed_steps == 1
    assert executor.events.count("copy") == 1


def test_prompt_logits_wait_for_the_step_in_flight() -> None:
    params = SamplingParams(max_tokens=8)
    with token_engine() as plain:
        expected = plain.prompt_logits([5, 6, 7])
    executor = RecordingExecutor()
    with Engine(executor) as engine:
        request_id = engine.add([1, 2], params)
        engine.step()
        assert np.array_equal(engine.prompt_logits([5, 6, 7]), expected)
        assert finish(engine)[request_id].token_ids == alone([1, 2], params).token_ids
    assert executor.events[:4] == ["submit 0", "read 0", "forward", "submit 1"]


def test_an_engine_may_be_closed_with_a_step_in_flight() -> None:
    executor = RecordingExecutor()
    engine = Engine(executor)
    engine.add([1, 2], SamplingParams(max_tokens=8))
    engine.step()
    engine.close()
    assert executor.closed
    assert not engine.has_unfinished()
    assert executor.events == ["submit 0"]


@pytest.mark.parametrize("seeds", [range(start, start + 40) for start in (0, 40, 80)], ids=str)
def test_a_random_load_gets_the_tokens_of_steps_one_by_one(seeds: range) -> None:
    totals = np.zeros(3, np.int64)
    for seed in seeds:
        load = Load(seed)
        with Engine(FakePipelinedExecutor(**load.executor), **load.engine) as engine:
            done = serve(engine, load)
            metrics = engine.metrics()
            assert metrics.blocks_in_use == metrics.num_running == metrics.num_waiting == 0
            assert metrics.output_tokens == sum(len(completion.token_ids) for completion in done.values())
            totals += [metrics.num_preemptions, metrics.prefix_hit_tokens, metrics.discarded_tokens]
        for number, (prompt, params) in enumerate(load.requests):
            expected = alone_in(load, prompt, params)
            if done[number].finish_reason == "abort":
                assert done[number].token_ids == expected.token_ids[: len(done[number].token_ids)]
            else:
                assert (done[number].token_ids, done[number].stop_reason) == (expected.token_ids, expected.stop_reason)
    assert totals.all(), "no preemption, no prefix hit, or nothing discarded in all these loads"


def alone_in(load: Load, prompt: list[int], params: SamplingParams) -> Completion:
    return alone(prompt, params, vocab_size=LOAD_VOCAB_SIZE, eos_token_ids=load.executor["eos_token_ids"])


def test_without_discards_the_same_tokens_are_computed_as_in_steps_one_by_one() -> None:
    def computed(make: Callable[..., Engine]) -> tuple[int, int, int]:
        with make() as engine:
            for number in range(6):
                engine.add([number] * (5 * number + 1), SamplingParams(max_tokens=4 * number + 1))
            finish(engine)
            metrics = engine.metrics()
            return metrics.num_steps, metrics.computed_tokens, metrics.discarded_tokens

    plain = computed(lambda: token_engine(prefix_cache=False))
    assert computed(lambda: Engine(RecordingExecutor(), prefix_cache=False)) == plain
