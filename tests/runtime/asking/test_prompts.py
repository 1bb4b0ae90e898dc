"""Prompts: single or in a list, with parameters. test_engine.py tests the messages of refusals."""

from typing import Any

import numpy as np
import pytest

from ingot.errors import RequestError
from ingot.runtime.asking.prompts import checked_params, checked_prompt, each_with_params, is_single
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from tests.each_case import each_case
from tests.simulators.fake_executor import FakeExecutor

MODEL = FakeExecutor(context_tokens=10, vocab_size=8).model


def test_a_text_or_a_list_of_ids_is_a_single_prompt_and_a_list_of_these_is_not() -> None:
    assert is_single("text")
    assert is_single([1, 2])
    assert is_single(np.array([1, 2]))
    assert not is_single(["text"])
    assert not is_single([[1, 2], [3]])


def test_one_set_of_parameters_serves_all_prompts() -> None:
    params = SamplingParams(max_tokens=3)
    options = RequestOptions(cache_salt="a")
    assert each_with_params(["a", "b"], params, options) == [("a", params, options), ("b", params, options)]
    assert each_with_params([1, 2], None) == [([1, 2], SamplingParams(), RequestOptions())]


def test_each_prompt_may_have_parameters_and_options_of_its_own() -> None:
    params, options = [SamplingParams(), SamplingParams(top_k=1)], [RequestOptions(), RequestOptions(cache_salt="a")]
    assert each_with_params(["a", "b"], params, options) == [("a", params[0], options[0]), ("b", params[1], options[1])]
    with pytest.raises(RequestError, match="2 prompts and 1 RequestOptions; give one for all, or one for each"):
        each_with_params(["a", "b"], params, options[:1])
    with pytest.raises(RequestError, match=r"must be RequestOptions\(...\), not {'cache_salt': 'a'}"):
        each_with_params(["a"], None, {"cache_salt": "a"})  # type: ignore[arg-type]


def test_arrays_of_any_integer_type_become_int64() -> None:
    tokens = checked_prompt(np.array([1, 7], np.uint16), MODEL)
    assert tokens.dtype == np.int64
    assert tokens.tolist() == [1, 7]


def test_the_whole_context_may_be_evaluated_but_not_prompted() -> None:
    assert len(checked_prompt([1] * 10, MODEL, room=0)) == 10
    with pytest.raises(RequestError, match=r"context length is 10 tokens.*with 10 tokens.*at most 9"):
        checked_prompt([1] * 10, MODEL)


@each_case("tokens", [[[1], [2, 3]], [[1, 2]], ["1"], [None], [2**70], None, 5, {1}, {1: 2}])
def test_tokens_must_be_a_flat_list_of_integers(tokens: Any) -> None:
    with pytest.raises(RequestError, match="flat list of whole token ids"):
        checked_prompt(tokens, MODEL)


@pytest.mark.parametrize("prompt", [None, 5, {1}, {0: 1}, iter([1])])
def test_a_prompt_must_be_a_prompt_or_a_list_of_prompts(prompt: Any) -> None:
    with pytest.raises(RequestError, match="must be a text or a flat list of whole token ids, not"):
        each_with_params(prompt, None)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, 5, "greedy", SamplingParams])
def test_parameters_must_be_sampling_params(params: Any) -> None:
    with pytest.raises(RequestError, match=r"must be SamplingParams\(\.\.\.\), not"):
        checked_params(params)
    with pytest.raises(RequestError, match=r"must be SamplingParams\(\.\.\.\), not"):
        each_with_params([1], params)
