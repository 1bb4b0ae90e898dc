"""SamplingParams: what is refused, and with which words."""

import math
from typing import Any

import numpy as np
import pytest

from ingot.errors import RequestError
from ingot.runtime.sampling import MAX_LOGPROBS, MAX_SEED, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams


def test_the_default_is_greedy_and_valid() -> None:
    assert SamplingParams().is_greedy
    assert not SamplingParams(temperature=0.1).is_greedy


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 1, "top_p": 1, "min_p": 0},
        {"temperature": np.float32(0.5), "top_k": np.int64(3), "seed": np.uint64(MAX_SEED)},
        {"temperature": 1e-300, "repetition_penalty": 1e-6, "presence_penalty": -2.0},
        {"seed": MAX_SEED, "logprobs": MAX_LOGPROBS},
        {"stop": ("a",) * MAX_STOP_STRINGS, "stop_token_ids": (0, 7)},
    ],
)
def test_the_ends_of_every_range_are_accepted(given: dict[str, Any]) -> None:
    SamplingParams(**given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "7"),
        ("max_tokens", None),
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
        ("stop", "END"),
        ("stop", ["END"]),
        ("stop", ("END", "")),
        ("stop", (b"END",)),
        ("stop_token_ids", [2]),
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
    assert message.startswith(f"{name} is {value!r}; it must be ")
    assert ": " in message.removeprefix(f"{name} is {value!r}; it must be "), "it says what to do"


def test_too_many_stops_are_refused_by_their_number() -> None:
    with pytest.raises(RequestError, match=f"stop is '{MAX_STOP_STRINGS + 1} strings'.*at most {MAX_STOP_STRINGS}"):
        SamplingParams(stop=("a",) * (MAX_STOP_STRINGS + 1))
    with pytest.raises(RequestError, match=f"at most {MAX_STOP_TOKEN_IDS}"):
        SamplingParams(stop_token_ids=(1,) * (MAX_STOP_TOKEN_IDS + 1))
