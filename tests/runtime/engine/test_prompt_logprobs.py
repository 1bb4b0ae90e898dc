"""Log-probabilities of prompts: those of generation to the bit, in any chunks and company, and through failures."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from ingot.errors import RequestError, RequestFailed
from ingot.runtime.asking.outputs import Completion, SampledToken
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.speculation.speculator import Speculator
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.runtime.engines import random_pool, random_requests, token_engine
from tests.simulators.fake_drafters import KnowingDrafter
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.faulty_executors import Faults, FaultyExecutor, FaultyPipelinedExecutor
from tests.simulators.layered_executor import LayeredExecutor, LayeredPipelinedExecutor
from tests.simulators.pipelined_executor import FakePipelinedExecutor

STATEFUL = [partial(each, "all") for each in (LayeredExecutor, LayeredPipelinedExecutor)]
EXECUTORS = pytest.mark.parametrize("executor", [FaultyExecutor, FaultyPipelinedExecutor])


def expected(engine: Engine, prompt: list[int], count: int) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """The log-softmax of the logits before each token of a prompt after the first, and the most likely tokens."""
    found = []
    for row, token in zip(engine.prompt_logits(prompt)[:-1], prompt[1:], strict=True):
        wide = row.astype(np.float64)
        logprobs = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
        best = sorted(range(len(row)), key=lambda each: (-wide[each], each))[:count]
        found.append((token, logprobs[token], [(each, logprobs[each]) for each in best]))
    return found


def assert_expected(found: tuple[SampledToken, ...] | None, right: list[tuple[int, float, Any]]) -> None:
    assert found is not None
    assert [each.token_id for each in found] == [token for token, _, _ in right]
    assert [each.logprob for each in found] == pytest.approx([logprob for _, logprob, _ in right], rel=1e-12)
    assert [[top.token_id for top in each.top] for each in found] == [[one for one, _ in top] for _, _, top in right]


def run(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[Completion]:
    """Completions of requests that are served together."""
    numbers = [engine.add(prompt, params) for prompt, params in requests]
    found: dict[int, Completion] = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.result:
                found[output.request_id] = output.result
        engine.check()
    return [found[number] for number in numbers]


@each_case("executor", [FakeExecutor, FakePipelinedExecutor, *STATEFUL])
@each_case("seed", range(4))
def test_they_are_right_in_any_pool_and_company_and_change_no_token(
    seed: int, executor: Callable[..., FakeExecutor]
) -> None:
    rng = random.Random(seed)
    requests = [
        (prompt, replace(params, prompt_logprobs=rng.choice([None, 0, 3]), n=rng.choice([1, 1, 3])))
        for prompt, params in random_requests(8, seed=seed)
    ]
    pool = random_pool(rng, longest=100)
    with Engine(executor(vocab_size=256, block_tokens=pool["block_tokens"])) as plain:
        alone = [run(plain, [(prompt, replace(params, prompt_logprobs=None))])[0] for prompt, params in requests]
        right = [expected(plain, prompt, params.prompt_logprobs or 0) for prompt, params in requests]
    texts = {tuple(prompt): one.token_ids for (prompt, _), one in zip(requests, alone, strict=True)}
    drafter = KnowingDrafter(lambda prompt, params: texts[prompt], 256, error_rate=0.2, seed=seed)
    with Engine(executor(vocab_size=256, **pool), speculator=Speculator(drafter, vocab_size=256)) as engine:
        together = run(engine, requests)
        assert engine.metrics().blocks_in_use == 0
    for (_, params), one, other, rows in zip(requests, together, alone, right, strict=True):
        for choice, choice_alone in zip(one.choices, other.choices, strict=True):
            assert choice.token_ids == choice_alone.token_ids
            if params.prompt_logprobs is None:
                assert choice.prompt_logprobs is None
            else:
                assert_expected(choice.prompt_logprobs, rows)


def test_they_are_those_of_generation_to_the_bit(build_unmeasured: BuildArtifact, two_layers: Any) -> None:
    artifact = build_unmeasured("int8-cpu", two_layers)
    with Engine.load(artifact) as engine:
        prompt = [5, 6, 7, 8]
        first = engine.generate(
            prompt, SamplingParams(max_tokens=40, logprobs=2, ignore_eos=True, temperature=1, seed=3)
        )
        params = SamplingParams(max_tokens=1, prompt_logprobs=2)
        again = engine.generate([*prompt, *first.token_ids], params)
        assert again.prompt_logprobs is not None
        assert again.prompt_logprobs[len(prompt) - 1 :] == first.logprobs
        assert again.cached_tokens == 0


def test_cached_prefixes_are_not_used_but_made() -> None:
    prompt = [*range(48)]
    with token_engine() as engine:
        plain = engine.generate(prompt, SamplingParams(max_tokens=2))
        params = SamplingParams(max_tokens=2, prompt_logprobs=0)
        completion = engine.generate(prompt, params)
        assert (completion.cached_tokens, completion.token_ids) == (0, plain.token_ids)
        assert len(completion.prompt_logprobs or ()) == 47
    with token_engine() as engine:
        engine.generate(prompt, params)
        assert engine.generate(prompt, SamplingParams(max_tokens=2)).cached_tokens == 47


@each_case(("length", "best_of"), [(1, None), (2, None), (1, 3), (17, 3)])
def test_each_choice_has_them_and_a_prompt_of_one_token_has_none(length: int, best_of: int | None) -> None:
    params = SamplingParams(max_tokens=3, temperature=1, seed=1, n=2, best_of=best_of, prompt_logprobs=1)
    with token_engine() as engine:
        completion = engine.generate([*range(length)], params)
    assert [len(choice.prompt_logprobs or ()) for choice in completion.choices] == [length - 1] * 2


@EXECUTORS
def test_a_prompt_whose_logits_are_not_finite_fails_alone(executor: type[FaultyExecutor]) -> None:
    prompt, params = [1, 2, 3] * 7, SamplingParams(max_tokens=3, prompt_logprobs=0)
    with Engine(executor(Faults(lost_rows={6}), max_batch_tokens=8)) as engine:
        broken, whole = run(engine, [(prompt, params), ([4, 5], SamplingParams(max_tokens=3))])
        assert whole.error is None
        assert isinstance(broken.error, RequestFailed)
        assert "logits must be finite" in str(broken.error)
        assert len(broken.prompt_logprobs or ()) == 6
        assert engine.generate(prompt, params).error is None


@EXECUTORS
@each_case("failed", [{0}, {1}, {2}, {0, 2}])
def test_a_step_that_fails_is_repeated(failed: set[int], executor: type[FaultyExecutor]) -> None:
    prompt, params = [1, 2, 3] * 7, SamplingParams(max_tokens=3, prompt_logprobs=1)
    with Engine(executor()) as plain:
        right = expected(plain, prompt, 1)
    with Engine(executor(Faults(failed_steps=failed), max_batch_tokens=8)) as engine:
        completion = engine.generate(prompt, params)
    assert_expected(completion.prompt_logprobs, right)


@each_case("value", [-1, 1.5, True, 10**6])
def test_a_wrong_number_is_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="prompt_logprobs is"):
        SamplingParams(prompt_logprobs=value)
