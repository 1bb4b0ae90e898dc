"""Logits at every position: equal to those of generation, and what happens when requests and iterations interfere."""

import numpy as np
import pytest

from ingot.errors import EngineError, RequestError
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.forward_batch import FloatArray
from tests.runtime.engines import token_engine


def test_prompt_logits_equal_those_of_generation_bit_for_bit_in_any_chunks() -> None:
    prompts = [[5, 6, 7], list(range(50)), [9], list(range(100, 121))]
    with token_engine(max_batch_tokens=64) as engine:
        expected = [engine.prompt_logits(prompt) for prompt in prompts]
        completion = engine.generate(prompts[1], SamplingParams(max_tokens=4), keep_logits=True)
        tokens = [*prompts[1], *completion.token_ids]
        assert completion.logits is not None
        assert np.array_equal(engine.prompt_logits(tokens)[49:53], completion.logits)
        assert engine.metrics().blocks_in_use == 0
    assert [len(rows) for rows in expected] == [3, 50, 1, 21]
    with token_engine(max_batch_tokens=7, num_blocks=5) as engine:
        parts: list[list[FloatArray]] = [[] for _ in prompts]
        for index, start, logits in engine.iterate_prompt_logits(prompts):
            assert start == sum(len(part) for part in parts[index])
            parts[index].append(logits.copy())
    for rows, chunks in zip(expected, parts, strict=True):
        assert np.array_equal(rows, np.concatenate(chunks))


def test_closing_an_iteration_over_prompt_logits_frees_its_blocks() -> None:
    with token_engine() as engine:
        iterator = engine.iterate_prompt_logits([list(range(30)), list(range(40))])
        next(iterator)
        iterator.close()  # type: ignore[attr-defined]
        engine.check()
        assert engine.metrics().blocks_in_use == 0


def test_a_step_fails_with_a_reason_when_open_prompt_logits_hold_the_blocks() -> None:
    with token_engine(num_blocks=4) as engine:
        iterator = engine.iterate_prompt_logits([list(range(64))])
        next(iterator)
        request_id = engine.add([1, 2, 3], SamplingParams(max_tokens=2))
        with pytest.raises(EngineError, match="prompt logits holds 4 of 4; finish or close it"):
            engine.step()
        iterator.close()  # type: ignore[attr-defined]
        engine.check()
        assert [output.request_id for output in engine.step()] == [request_id]


def test_overwritten_prompt_logits_raise() -> None:
    with token_engine() as engine:
        iterator = engine.iterate_prompt_logits([[1, 2, 3], [4, 5]])
        assert next(iterator).prompt_index == 0
        engine.generate([7], SamplingParams(max_tokens=2))
        with pytest.raises(EngineError, match="prompt 1 were overwritten"):
            next(iterator)
        engine.check()
        assert engine.metrics().blocks_in_use == 0


def test_prompt_logits_raise_after_the_engine_is_closed() -> None:
    engine = token_engine()
    iterator = engine.iterate_prompt_logits([[1] * 100])
    next(iterator)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        next(iterator)


def test_prompt_logits_fail_with_a_reason_when_running_requests_hold_the_blocks() -> None:
    with token_engine(num_blocks=4) as engine:
        engine.add(list(range(40)), SamplingParams(max_tokens=4))
        engine.step()
        with pytest.raises(EngineError, match="running requests hold 3 of 4"):
            engine.prompt_logits(list(range(30)))
        with pytest.raises(RequestError, match="maximum context length is 512"):
            engine.prompt_logits([1] * 513)
