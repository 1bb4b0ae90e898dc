"""SamplingParams: what is refused, and with which words."""

import math
import pickle
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from ingot.errors import RequestError, shown
from ingot.runtime.asking.sampling_params import (
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from tests.each_case import each_case


def test_the_default_is_greedy_and_valid() -> None:
    assert SamplingParams().is_greedy
    assert not SamplingParams(temperature=0.1).is_greedy


@each_case(
    "given",
    [
        {"temperature": 1, "top_p": 1, "min_p": 0},
        {"temperature": np.float32(0.5), "top_k": np.int64(3), "seed": np.uint64(MAX_SEED)},
        {"temperature": 1e-300, "repetition_penalty": 1e-6, "presence_penalty": -2.0},
        {"seed": MAX_SEED, "logprobs": MAX_LOGPROBS},
        {"stop": ("a",) * MAX_STOP_STRINGS, "stop_token_ids": (0, 7)},
        {"frequency_penalty": -2, "logit_bias": {np.int64(5): 100, 3: -100}},
    ],
)
def test_the_ends_of_every_range_are_accepted(given: dict[str, Any]) -> None:
    SamplingParams(**given)


@each_case(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "7"),
        ("max_tokens", None),
        ("min_tokens", -1),
        ("min_tokens", 129),
        ("min_tokens", 1.0),
        ("allowed_token_ids", 3),
        ("allowed_token_ids", (-1,)),
        ("allowed_token_ids", ("a",)),
        ("skip_special_tokens", 1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("temperature", False),
        ("temperature", "hot"),
        ("temperature", 10**400),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("min_p", math.nan),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("seed", True),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("presence_penalty", -math.inf),
        ("frequency_penalty", math.nan),
        ("frequency_penalty", "0.5"),
        ("logit_bias", {3: 101}),
        ("logit_bias", {3: -100.5}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: True}),
        ("logit_bias", {"3": 1}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", [3, 1]),
        ("logit_bias", "3"),
        ("logit_bias", 3),
        ("stop", ""),
        ("stop", ("END", "")),
        ("stop", (b"END",)),
        ("stop", b"END"),
        ("stop", {"END"}),
        ("stop", 3),
        ("stop_token_ids", 2),
        ("stop_token_ids", "2"),
        ("stop_token_ids", (-2,)),
        ("stop_token_ids", (True,)),
        ("ignore_eos", 1),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("logprobs", True),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_itself_and_what_is_allowed(name: str, value: object) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    message = str(caught.value)
    assert caught.value.field == name
    assert message.startswith(f"{name} is {shown(value)}; it must be ")
    assert ": " in message.removeprefix(f"{name} is {shown(value)}; it must be "), "it says what to do"


def test_stops_may_be_a_string_or_any_sequence() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3, 2]) == SamplingParams(
        stop=("a", "b"), stop_token_ids=(3, 2)
    )


def test_allowed_tokens_are_kept_in_order_and_none_is_refused() -> None:
    assert SamplingParams(allowed_token_ids=[7, 3, 7]).allowed_token_ids == (3, 7)
    assert SamplingParams().allowed_token_ids is None
    with pytest.raises(RequestError, match="at least one token id"):
        SamplingParams(allowed_token_ids=[])


def test_biases_are_kept_as_pairs_in_order_so_that_parameters_can_be_hashed_copied_and_pickled() -> None:
    given = {7: 1, 3: -100}
    params = SamplingParams(logit_bias=given)
    given[9] = 100
    assert params.logit_bias == ((3, -100.0), (7, 1.0))
    assert params == replace(params) == pickle.loads(pickle.dumps(params)) == SamplingParams(**asdict(params))
    assert hash(params) == hash(replace(params))
    with pytest.raises(RequestError, match="1025 biases"):
        SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))
    with pytest.raises(RequestError, match="one bias for each token"):
        SamplingParams(logit_bias=((1, 1.0), (1, 2.0)))


def test_too_many_stops_are_refused_by_their_number() -> None:
    with pytest.raises(RequestError, match=f"stop is '{MAX_STOP_STRINGS + 1} strings'.*at most {MAX_STOP_STRINGS}"):
        SamplingParams(stop=("a",) * (MAX_STOP_STRINGS + 1))
    with pytest.raises(RequestError, match=f"at most {MAX_STOP_TOKEN_IDS}"):
        SamplingParams(stop_token_ids=(1,) * (MAX_STOP_TOKEN_IDS + 1))
