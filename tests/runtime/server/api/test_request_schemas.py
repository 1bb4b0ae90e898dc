"""Fields of requests that become variables of the chat template, and those that are accepted and not used."""

import json
from typing import Any

import pytest

from ingot.errors import RequestError
from ingot.runtime.server.api.bodies import parse
from ingot.runtime.server.api.request_schemas import ChatRequest, CompletionRequest, TokenizeRequest
from ingot.runtime.server.http.api_error import ApiError
from tests.each_case import each_case
from tests.runtime.engines import HELLO


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": HELLO, **fields}).encode())


@each_case(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high", "a": 1}},
         {"reasoning_effort": "low", "a": 1}),
        ({"add_generation_prompt": False, "continue_final_message": True},
         {"add_generation_prompt": False, "continue_final_message": True}),
    ],
)  # fmt: skip
def test_fields_for_the_chat_template_are_its_variables(fields: dict[str, Any], variables: dict[str, Any]) -> None:
    assert chat(**fields).chat.variables == variables


def test_a_chat_to_count_has_its_tools_and_variables() -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    body = {"messages": HELLO, "tools": [tool], "add_generation_prompt": False}
    found = parse(TokenizeRequest, json.dumps(body).encode()).chat
    assert (found.messages, found.tools, found.variables) == (HELLO, [tool], {"add_generation_prompt": False})


@each_case(
    "fields",
    [
        {"store": True},
        {"store": False},
        {"verbosity": "medium"},
        {"service_tier": "flex"},
        {"service_tier": "priority"},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"bad_words": []},
        {"spaces_between_special_tokens": True},
        {"use_beam_search": False},
        {"functions": None, "guided_json": None},
    ],
)
def test_fields_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields).sampling_params(100).max_tokens == 100


@each_case(
    "fields",
    [
        {"verbosity": "low"},
        {"verbosity": "high"},
        {"web_search_options": {}},
        {"verbosity": "low", "web_search_options": {}},
    ],
)
def test_fields_that_the_model_cannot_follow_are_named_and_change_nothing(fields: dict[str, Any]) -> None:
    found = chat(**fields)
    assert found.ignored == tuple(fields)
    assert found.model_dump() == chat().model_dump()


@each_case(
    ("fields", "param"),
    [
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"verbosity": "terse"}, "verbosity"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
        ({"functions": []}, "functions"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
    ],
)
def test_other_values_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError, match=param) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_seeds_have_a_sign_and_minus_one_is_a_random_one() -> None:
    def seed_of(seed: int) -> int | None:
        return CompletionRequest(prompt="a", seed=seed).sampling_params(512).seed

    assert [seed_of(seed) for seed in (7, 0, -1, -2, -(2**63))] == [7, 0, None, 2**64 - 2, 2**63]
    with pytest.raises(RequestError, match="seed"):
        seed_of(-(2**63) - 1)
