"""Several choices of one prompt: each equals the request with its seed, whatever pool, batch mates and failures."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from ingot.errors import EngineBusy, EngineError, RequestFailed
from ingot.runtime.asking.outputs import Completion, RequestOutput
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.hosting.async_engine import AsyncEngine
from ingot.runtime.requests.sampler import choice_seed
from tests.each_case import each_case
from tests.runtime.engines import random_pool, random_requests, text_engine, token_engine
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.faulty_executors import Faults, FaultyExecutor, FaultyPipelinedExecutor
from tests.simulators.pipelined_executor import FakePipelinedExecutor

WARM = SamplingParams(max_tokens=12, temperature=1.0, seed=5)
EXECUTORS = pytest.mark.parametrize("executor", [FaultyExecutor, FaultyPipelinedExecutor])


def alone(prompt: list[int], params: SamplingParams, index: int, vocab_size: int = 256) -> Completion:
    """Choice `index` as a request of its own, in an engine of its own."""
    seed = choice_seed(params.seed or 0, index)
    with token_engine(vocab_size=vocab_size) as engine:
        return engine.generate(prompt, replace(params, n=1, best_of=None, seed=seed), keep_logits=True)


def assert_choices(completion: Completion, prompt: list[int], params: SamplingParams) -> None:
    """Tokens, seeds, reasons and, where they were kept, the bits of the logits are those of single requests."""
    assert [choice.index for choice in completion.choices] == [*range(params.n)]
    for choice in completion.choices:
        expected = alone(prompt, params, choice.index)
        assert (choice.token_ids, choice.seed) == (expected.token_ids, expected.seed)
        assert (choice.finish_reason, choice.stop_reason) == (expected.finish_reason, expected.stop_reason)
        if choice.logits is not None and expected.logits is not None:
            assert choice.logits.tobytes() == expected.logits.tobytes()


class CountingExecutor(FakeExecutor):
    """Counts the tokens that it computes and the blocks that it copies."""

    num_tokens = num_copies = 0

    def logits(self, batch: Any) -> Any:
        self.num_tokens += batch.num_tokens
        return super().logits(batch)

    def copy_block(self, source: int, target: int) -> None:
        self.num_copies += 1
        super().copy_block(source, target)


@each_case("prefix_cache", [True, False])
@each_case("length", [1, 15, 16, 17, 32, 50])
def test_the_prompt_is_computed_once_and_each_choice_equals_the_request_with_its_seed(
    length: int, prefix_cache: bool
) -> None:
    prompt, params = [*range(length)], replace(WARM, n=4)
    executor = CountingExecutor()
    with Engine(executor, prefix_cache=prefix_cache) as engine:
        completion = engine.generate(prompt, params, keep_logits=True)
        assert engine.metrics().blocks_in_use == 0
    assert_choices(completion, prompt, params)
    assert len({choice.token_ids for choice in completion.choices}) == 4
    assert executor.num_tokens == length + 4 * 11, "the last token of a choice is not computed"
    assert executor.num_copies == (0 if length % 16 == 0 else 3), "the last holder of a block writes in place"


def test_the_first_choice_is_the_plain_request() -> None:
    with token_engine() as engine:
        plain = engine.generate([1, 2, 3], WARM)
        first = engine.generate([1, 2, 3], replace(WARM, n=3))
        unseeded = engine.generate([1, 2, 3], replace(WARM, n=2, seed=None))
        again = engine.generate([1, 2, 3], replace(WARM, seed=unseeded.others[0].seed))
    assert (first.token_ids, first.seed) == (plain.token_ids, 5)
    assert plain.choices == (plain,)
    assert again.token_ids == unseeded.others[0].token_ids
    assert unseeded.others[0].seed == choice_seed(unseeded.seed, 1)


def test_the_rule_of_the_seeds_is_fixed() -> None:
    assert [choice_seed(5, index) for index in range(3)] == [5, 7958746351771864857, 17935697650268806889]


@each_case("executor", [FakeExecutor, FakePipelinedExecutor])
@each_case("seed", range(12))
def test_random_requests_in_random_pools_get_the_choices_that_they_get_alone(
    executor: type[FakeExecutor], seed: int
) -> None:
    rng = random.Random(seed)
    requests = [(prompt, replace(params, n=rng.randrange(1, 6))) for prompt, params in random_requests(8, seed)]
    pool: dict[str, Any] = random_pool(rng, longest=100)
    places, prefix_cache = rng.choice([1, 2, 7]), rng.random() < 0.5
    with Engine(executor(vocab_size=256, **pool), max_sequences=places, prefix_cache=prefix_cache) as engine:
        ids = [
            engine.add(prompt, params, keep_logits=number % 2 == 0) for number, (prompt, params) in enumerate(requests)
        ]
        results: dict[int, Completion] = {}
        while engine.has_unfinished():
            results |= {output.request_id: output.result for output in engine.step() if output.result}
            engine.check()
        assert engine.metrics().blocks_in_use == 0
    for request_id, (prompt, params) in zip(ids, requests, strict=True):
        assert_choices(results[request_id], prompt, params)


@pytest.mark.parametrize(("length", "num_again"), [(64, 0), (70, 2 * 6), (9, 2 * 9)])
def test_choices_that_wait_for_a_place_find_a_private_prompt_again(length: int, num_again: int) -> None:
    """With one place the choices run one after the other; they compute the prompt's last partial block again."""
    executor = CountingExecutor(num_blocks=8)
    prompt, params = [*range(length)], replace(WARM, n=3)
    with Engine(executor, max_sequences=1, prefix_cache=False) as engine:
        assert_choices(engine.generate(prompt, params), prompt, params)
        assert engine.metrics().blocks_cached == 0
    assert executor.num_tokens == length + 3 * 11 + num_again


def test_a_pool_of_minimal_size_serves_more_choices_than_fit() -> None:
    prompt, params = [*range(20)], replace(WARM, max_tokens=45, n=6)
    with token_engine(num_blocks=4) as engine:
        completion = engine.generate(prompt, params)
        assert engine.metrics().num_preemptions > 0
    assert_choices(completion, prompt, params)


def test_a_stream_yields_the_outputs_of_all_choices_and_ends_with_the_last() -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=2, n=3)
    with text_engine() as engine:
        whole = engine.generate("def read", params)
        outputs = list(engine.stream("def read", params))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for choice in whole.choices:
        own = [output for output in outputs if output.index == choice.index]
        assert "".join(output.text for output in own) == choice.text
        assert [token for output in own for token in output.token_ids] == list(choice.token_ids)
        assert [output.completion is not None for output in own] == [False] * (len(own) - 1) + [True]
    result = outputs[-1].result
    assert result is not None
    assert [choice.text for choice in result.choices] == [choice.text for choice in whole.choices]


def test_each_choice_has_its_own_stop_string_log_probabilities_and_metrics() -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=2, n=3, ignore_eos=True)
    with text_engine() as engine:
        whole = engine.generate("def read", params)
        stop = whole.others[1].text[6:9]
        stopped = engine.generate("def read", replace(params, stop=stop, logprobs=1))
    choice = stopped.others[1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert choice.text == whole.others[1].text[: whole.others[1].text.index(stop)]
    for one in stopped.choices:
        assert one.logprobs is not None
        assert tuple(token.token_id for token in one.logprobs) == one.token_ids
        assert one.metrics.num_output_tokens == len(one.token_ids)
        assert (one.prompt_tokens, one.cached_tokens) == (stopped.prompt_tokens, stopped.cached_tokens)


def test_best_of_returns_the_choices_with_the_highest_mean_log_probability_at_the_end() -> None:
    params = replace(WARM, n=2, best_of=6)
    with token_engine(eos_token_ids=(7, 9, 11)) as engine:
        every = engine.generate([1, 2], replace(WARM, n=6, logprobs=0)).choices
        best = engine.generate([1, 2], params)
        outputs = list(engine.stream([1, 2], params))
    ranked = sorted(
        every, key=lambda choice: -sum(t.logprob or 0 for t in choice.logprobs or ()) / len(choice.token_ids)
    )
    assert [choice.token_ids for choice in best.choices] == [choice.token_ids for choice in ranked[:2]]
    assert [choice.seed for choice in best.choices] == [choice.seed for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.mean_logprob is not None
    assert best.mean_logprob == pytest.approx(ranked[0].mean_logprob)
    assert best.logprobs is None
    assert [(output.index, output.token_ids) for output in outputs] == [(c.index, c.token_ids) for c in best.choices]
    assert [output.finished for output in outputs] == [False, True]
    num_all = sum(len(choice.token_ids) for choice in every)
    assert best.generated_tokens == sum(output.new_tokens for output in outputs) == num_all
    assert best.unreturned_tokens == sum(len(choice.token_ids) for choice in ranked[2:])


def test_equally_good_choices_keep_their_order() -> None:
    with token_engine() as engine:
        best = engine.generate([1, 2], SamplingParams(max_tokens=3, n=2, best_of=4, seed=1))
    assert [choice.seed for choice in best.choices] == [1, choice_seed(1, 1)]


@pytest.mark.parametrize("num_steps", [0, 1, 3, 9])
def test_abort_ends_every_choice_in_every_state(num_steps: int) -> None:
    with token_engine(max_sequences=2, max_batch_tokens=16) as engine:
        request_id = engine.add([*range(20)], replace(WARM, n=4))
        for _ in range(num_steps):
            engine.step()
        result = engine.abort(request_id)
        assert engine.abort(request_id) is None
        engine.check()
        assert (engine.metrics().blocks_in_use, engine.has_unfinished()) == (0, False)
    assert result is not None
    assert [choice.finish_reason for choice in result.choices] == ["abort"] * 4
    for choice in result.choices:
        assert choice.token_ids == alone([*range(20)], WARM, choice.index).token_ids[: len(choice.token_ids)]


def test_the_ids_of_later_choices_name_no_request() -> None:
    with token_engine() as engine:
        request_id = engine.add([1], replace(WARM, n=3))
        engine.step()
        assert [engine.abort(request_id + number) for number in (1, 2)] == [None, None]
        assert engine.abort(request_id) is not None


def test_a_request_with_several_choices_counts_once_towards_max_requests() -> None:
    with Engine(FakeExecutor(), max_requests=2) as engine:
        engine.add([1], replace(WARM, n=5))
        engine.step()
        engine.add([2], WARM)
        with pytest.raises(EngineBusy):
            engine.add([3], WARM)


def outputs_of(engine: Engine) -> Iterable[RequestOutput]:
    while engine.has_unfinished():
        yield from engine.step()
        engine.check()


@EXECUTORS
def test_a_choice_that_fails_ends_alone(executor: type[FaultyExecutor]) -> None:
    params = replace(WARM, n=3)
    with Engine(executor(Faults(lost_rows={1 + 3 + 1}))) as engine:  # row 1 of the second step after the prompt's
        with pytest.raises(
            RequestFailed, match=r"choice 1 of request 0 failed after 2 .*\(1 of 3 choices failed\)"
        ) as error:
            engine.generate([1, 2, 3], params)
        assert engine.metrics().blocks_in_use == 0
        assert engine.metrics().num_failed_requests == 1
        expected = engine.generate([1, 2, 3], params)
    choices = error.value.completions
    assert [choice.finish_reason for choice in choices] == ["length", "error", "length"]
    assert [choice.token_ids for choice in (choices[0], choices[2])] == [
        choice.token_ids for choice in (expected.choices[0], expected.choices[2])
    ]
    assert choices[1].token_ids == expected.choices[1].token_ids[:2]


@EXECUTORS
def test_a_stream_shows_the_other_choices_before_it_raises(executor: type[FaultyExecutor]) -> None:
    shown = Counter[int]()
    with Engine(executor(Faults(lost_rows={1 + 3 + 1}))) as engine:
        with pytest.raises(RequestFailed, match="choice 1 of request"):
            for output in engine.stream([1, 2, 3], replace(WARM, n=3)):
                shown[output.index] += len(output.tokens)
    assert shown == {0: 12, 1: 2, 2: 12}


@EXECUTORS
def test_a_prompt_that_fails_ends_all_choices_and_no_other_request(executor: type[FaultyExecutor]) -> None:
    for faults in (Faults(lost_rows={0}), Faults(failed_steps={0, 1})):
        with Engine(executor(faults)) as engine:
            request_id, other = engine.add([1, 2, 3], replace(WARM, n=3)), engine.add([4], WARM)
            found = list(outputs_of(engine))
            own = [output for output in found if output.request_id == request_id]
            assert [(output.index, output.error is not None) for output in own] == [(0, True), (1, True), (2, True)]
            assert own[-1].finished
            assert engine.metrics().num_failed_requests == 3
            (result,) = [output.result for output in found if output.request_id == other and output.result]
            assert (result.error, len(result.token_ids)) == (None, 12)


@EXECUTORS
def test_a_copy_that_fails_ends_its_choice_alone(executor: type[FaultyExecutor]) -> None:
    with Engine(executor(Faults(failed_copies={0}))) as engine:
        engine.add([1, 2, 3], replace(WARM, n=3))
        found = list(outputs_of(engine))
    (result,) = [output.result for output in found if output.result]
    assert sorted(choice.finish_reason for choice in result.choices) == ["error", "length", "length"]


def test_a_broken_executor_ends_every_choice_and_the_engine() -> None:
    executor = FaultyExecutor()
    with Engine(executor) as engine:
        engine.add([1, 2, 3], replace(WARM, n=3))
        engine.add([1, 2], replace(WARM, n=2))
        engine.step()
        executor.faults.is_broken = True
        found = engine.step()
        assert [output.error is engine.error for output in found] == [True] * 5
        assert [output.finished for output in found].count(True) == 2
        with pytest.raises(EngineError):
            engine.step()


def test_private_choices_share_the_prompt_and_leave_nothing_to_others() -> None:
    executor = CountingExecutor()
    params, prompt = replace(WARM, n=3), [*range(40)]
    with Engine(executor) as engine:
        completion = engine.generate(prompt, params, options=RequestOptions(prefix_cache=False))
        assert executor.num_tokens == 40 + 3 * 11
        assert engine.generate(prompt, params).cached_tokens == 0
    assert_choices(completion, prompt, params)


def test_async_streams_carry_all_choices_and_leaving_one_aborts_them() -> None:
    params = replace(WARM, n=3)

    async def use() -> tuple[Completion, list[RequestOutput], int]:
        async with AsyncEngine(token_engine()) as engine:
            completion = await engine.generate([1, 2], params)
            outputs = [output async for output in engine.stream([1, 2], params)]
            async with aclosing(engine.stream([1, 2], replace(params, max_tokens=400))) as stream:
                await anext(stream)
            await engine.generate([9], SamplingParams(max_tokens=2))
            return completion, outputs, engine.metrics().blocks_in_use

    completion, outputs, blocks_in_use = asyncio.run(use())
    assert_choices(completion, [1, 2], params)
    assert (sum(len(output.tokens) for output in outputs), blocks_in_use) == (36, 0)
    assert [output.finished for output in outputs].count(True) == 1


def test_async_failures_show_the_other_choices_before_they_raise() -> None:
    async def use() -> tuple[Counter[int], RequestFailed]:
        shown = Counter[int]()
        async with AsyncEngine(Engine(FaultyExecutor(Faults(lost_rows={1 + 3 + 1})))) as engine:
            with pytest.raises(RequestFailed) as error:
                async for output in engine.stream([1, 2, 3], replace(WARM, n=3)):
                    shown[output.index] += len(output.tokens)
        return shown, error.value

    shown, error = asyncio.run(use())
    assert shown == {0: 12, 1: 2, 2: 12}
    assert [choice.finish_reason for choice in error.completions] == ["length", "error", "length"]
