"""Beam search in the engine: the same result in any pool, with any mates, and in any state that it may be ended in."""

import asyncio
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from ingot.errors import RequestError, RequestFailed
from ingot.runtime.asking.outputs import Completion
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.hosting.async_engine import AsyncEngine
from ingot.runtime.requests.beam_search import BeamParams, BeamSearch, candidates_of
from tests.runtime.engines import random_pool, random_requests, text_engine, token_engine
from tests.runtime.steps.test_deadlines import Clock
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.faulty_executors import Faults, FaultyExecutor, FaultyPipelinedExecutor
from tests.simulators.pipelined_executor import FakePipelinedExecutor

ENDS = (7, 9, 11, 13)
EXECUTORS = pytest.mark.parametrize("executor", [FakeExecutor, FakePipelinedExecutor])
FAULTY = pytest.mark.parametrize("executor", [FaultyExecutor, FaultyPipelinedExecutor])


@cache
def by_rule(prompt: tuple[int, ...], params: BeamParams, vocab_size: int = 256) -> tuple[tuple[int, ...], ...]:
    """The tokens of the search with logits that are computed from scratch for every beam and step."""
    search = BeamSearch(params, frozenset(ENDS))
    with token_engine(eos_token_ids=ENDS, num_blocks=256, vocab_size=vocab_size) as engine:
        while not search.is_done:
            rows = [engine.prompt_logits([*prompt, *beam.tokens])[-1] for beam in search.beams]
            search.advance([candidates_of(row, search.num_candidates) for row in rows])
    return tuple(one.tokens for one in search.ranked()[: params.num_return])


def tokens_of(completion: Completion) -> tuple[tuple[int, ...], ...]:
    return tuple(choice.token_ids for choice in completion.choices)


def finish(engine: Engine) -> dict[int, Completion]:
    results: dict[int, Completion] = {}
    while engine.has_unfinished():
        results |= {output.request_id: output.result for output in engine.step() if output.result}
        engine.check()
    assert engine.metrics().blocks_in_use == 0
    return results


@EXECUTORS
@pytest.mark.parametrize("seed", range(10))
def test_searches_among_other_requests_in_random_pools_give_what_the_rule_gives(
    executor: type[FakeExecutor], seed: int
) -> None:
    rng = random.Random(seed)
    requests = random_requests(4, seed)
    searches = []
    for number in range(4):
        width = rng.randrange(1, 6)
        params = BeamParams(width, rng.randrange(1, 12), rng.choice([0.0, 1.0]), rng.choice([True, False]), width)
        searches.append((tuple(rng.randrange(256) for _ in range(rng.choice([1, 4, 16, 17, 30]))), params, number % 2))
    pool: dict[str, Any] = random_pool(rng, longest=100)
    with Engine(
        executor(vocab_size=256, eos_token_ids=ENDS, **pool),
        max_sequences=rng.choice([1, 3, 20]),
        prefix_cache=rng.random() < 0.6,
    ) as engine:
        plain = [engine.add(prompt, params) for prompt, params in requests]
        ids = [
            engine.add(list(prompt), params, options=RequestOptions(prefix_cache=bool(shared)))
            for prompt, params, shared in searches
        ]
        results = finish(engine)
    for request_id, (prompt, params, _) in zip(ids, searches, strict=True):
        assert tokens_of(results[request_id]) == by_rule(prompt, params)
    for request_id, (tokens, sampling) in zip(plain, requests, strict=True):
        with token_engine(eos_token_ids=ENDS) as alone:
            assert results[request_id].token_ids == alone.generate(tokens, sampling).token_ids


@EXECUTORS
def test_a_pool_that_holds_one_beam_serves_a_wide_search(executor: type[FakeExecutor]) -> None:
    params, prompt = BeamParams(5, 20, num_return=5, ignore_eos=True), tuple(range(20))
    with Engine(executor(num_blocks=3, block_tokens=16, vocab_size=256)) as engine:
        request_id = engine.add(list(prompt), params)
        results = finish(engine)
        assert engine.metrics().num_preemptions > 0
    search = BeamSearch(params, frozenset())
    with token_engine() as other:
        while not search.is_done:
            rows = [other.prompt_logits([*prompt, *beam.tokens])[-1] for beam in search.beams]
            search.advance([candidates_of(row, search.num_candidates) for row in rows])
    assert tokens_of(results[request_id]) == tuple(one.tokens for one in search.ranked())


def test_a_search_computes_each_beam_once_and_all_beams_of_a_step_together() -> None:
    with token_engine() as engine:
        engine.beam_search([*range(40)], BeamParams(4, 10))
        metrics = engine.metrics()
    assert metrics.num_steps == 10
    assert metrics.computed_tokens == 40 + 4 * 9


def test_results_are_ranked_with_text_scores_and_reasons() -> None:
    params = BeamParams(4, 12, length_penalty=0.7, num_return=3)
    with text_engine() as engine:
        result = engine.beam_search("def read", params)
        texts = [engine.generate("def read", SamplingParams(max_tokens=12)).text]
        greedy = engine.beam_search("def read", replace(params, width=1, num_return=1))
    assert [choice.index for choice in result.choices] == [0, 1, 2]
    assert greedy.text == texts[0]
    for choice in result.choices:
        assert choice.score is not None
        assert choice.mean_logprob is not None
        length = len(choice.token_ids)
        assert choice.score == pytest.approx(choice.mean_logprob * length / length**0.7)
        assert choice.finish_reason == ("stop" if choice.stop_reason is not None else "length")
        assert choice.text
    scores = [choice.score or 0.0 for choice in result.choices]
    assert scores == sorted(scores, reverse=True)


def test_a_search_that_reaches_the_context_ends_there() -> None:
    with token_engine(context_tokens=24, num_blocks=16) as engine:
        result = engine.beam_search([*range(20)], BeamParams(3, 100))
    assert (len(result.token_ids), result.finish_reason) == (4, "length")


@EXECUTORS
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_abort_ends_all_beams_and_returns_the_best_so_far(executor: type[FakeExecutor], num_steps: int) -> None:
    with Engine(executor(vocab_size=256, max_batch_tokens=16)) as engine:
        request_id = engine.add([*range(20)], BeamParams(3, 30, num_return=2))
        for _ in range(num_steps):
            engine.step()
            engine.check()
        result = engine.abort(request_id)
        assert engine.abort(request_id) is None
        engine.check()
        assert (engine.metrics().blocks_in_use, engine.has_unfinished()) == (0, engine._loop.in_flight is not None)
    assert result is not None
    assert {choice.finish_reason for choice in result.choices} == {"abort"}


@FAULTY
def test_logits_that_are_not_finite_end_the_search_alone(executor: type[FaultyExecutor]) -> None:
    with Engine(executor(Faults(lost_rows={4}))) as engine:
        search, other = engine.add([1, 2, 3], BeamParams(3, 8)), engine.add([4], SamplingParams(max_tokens=8))
        results = finish(engine)
        assert isinstance(results[search].error, RequestFailed)
        assert f"request {search} failed after 1 tokens" in str(results[search].error)
        assert results[other].finish_reason == "length"
        assert engine.metrics().num_failed_requests == 1


@FAULTY
@pytest.mark.parametrize("number", range(6))
def test_a_failed_step_or_copy_changes_nothing_or_ends_the_search_alone(
    executor: type[FaultyExecutor], number: int
) -> None:
    prompt, params = [1, 2, 3], BeamParams(3, 8, ignore_eos=True)
    with Engine(executor()) as engine:
        expected = tokens_of(engine.beam_search(prompt, params))
    with Engine(executor(Faults(failed_steps={number}))) as engine:
        assert tokens_of(engine.beam_search(prompt, params)) == expected
        engine.check()
    with Engine(executor(Faults(failed_copies={number}))) as engine:
        search, other = engine.add(prompt, params), engine.add([4], SamplingParams(max_tokens=8))
        results = finish(engine)
        assert results[search].error or tokens_of(results[search]) == expected
        assert results[other].finish_reason == "length"


def test_a_broken_executor_ends_a_search_with_one_output() -> None:
    executor = FaultyExecutor()
    with Engine(executor) as engine:
        engine.add([1, 2, 3], BeamParams(3, 8))
        for _ in range(3):
            engine.step()
        executor.faults.is_broken = True
        (output,) = engine.step()
        assert output.error is engine.error


def test_a_search_expires_with_its_best_beam() -> None:
    clock = Clock()
    with Engine(FakeExecutor(), clock=clock) as engine:
        engine.add([1, 2, 3], BeamParams(3, 30), options=RequestOptions(timeout_seconds=1))
        for _ in range(4):
            engine.step()
        clock.now = 2.0
        (output,) = engine.step()
    assert output.completion is not None
    assert (output.completion.finish_reason, len(output.completion.token_ids)) == ("timeout", 4)


def test_parameters_of_another_kind_are_refused() -> None:
    with token_engine() as engine, pytest.raises(RequestError, match=r"must be BeamParams"):
        engine.beam_search([1], SamplingParams())  # type: ignore[arg-type]


def test_logits_of_a_search_are_refused() -> None:
    with token_engine() as engine:
        with pytest.raises(RequestError, match="keep_logits is set, but a beam search does not keep logits"):
            engine.add([1, 2], BeamParams(width=2), keep_logits=True)
        assert not engine.has_unfinished()


def test_async_searches_run_side_by_side_and_a_cancelled_one_is_aborted() -> None:
    params = BeamParams(4, 10, num_return=4)

    async def use() -> tuple[list[Completion], int]:
        async with AsyncEngine(token_engine(eos_token_ids=ENDS)) as engine:
            results = await asyncio.gather(*(engine.beam_search([number, 1], params) for number in range(3)))
            task = asyncio.create_task(engine.beam_search([5], BeamParams(4, 400, ignore_eos=True)))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await engine.generate([9], SamplingParams(max_tokens=2))
            return results, engine.metrics().blocks_in_use

    results, blocks_in_use = asyncio.run(use())
    assert blocks_in_use == 0
    for number, result in enumerate(results):
        assert tokens_of(result) == by_rule((number, 1), params)
