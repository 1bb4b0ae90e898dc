"""Bodies of Anthropic's Messages API become conversations in the form of chat templates."""

import json
from typing import Any

import pytest

from ingot.runtime.server.api.bodies import parse
from ingot.runtime.server.api.messages.schemas import MessagesRequest
from ingot.runtime.server.http.api_error import ApiError
from tests.each_case import each_case

HELLO = {"role": "user", "content": "Hello"}
TOOL = {"name": "now", "description": "The time.", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "t1", "name": "now", "input": {"zone": "UTC"}}
TEXT, THOUGHT = {"type": "text", "text": "a"}, {"type": "thinking", "thinking": "so", "signature": ""}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "noon"}]}
CALL = {"type": "function", "id": "t1", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}


def request(**fields: Any) -> MessagesRequest:
    return parse(MessagesRequest, json.dumps({"max_tokens": 9, "messages": [HELLO], **fields}).encode())


@each_case(
    ("fields", "messages"),
    [
        ({}, [HELLO]),
        ({"system": "Be brief."}, [{"role": "system", "content": "Be brief."}, HELLO]),
        (
            {"system": [{**TEXT, "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]},
            [{"role": "system", "content": "a\nb"}, HELLO],
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}, [HELLO]),
        (
            {"messages": [HELLO, {"role": "assistant", "content": [THOUGHT, USE]},
                          {"role": "user", "content": [RESULT, {"type": "text", "text": "And now?"}]}]},
            [
                HELLO,
                {"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "t1", "content": "noon"},
                {"role": "user", "content": "And now?"},
            ],
        ),
        (
            {"messages": [HELLO, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]},
            [
                HELLO,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "t1", "content": "noon"},
            ],
        ),
    ],
    ids=lambda case: json.dumps(case)[:60],
)  # fmt: skip
def test_turns_become_messages(fields: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert list(request(**fields).chat.messages) == messages


@each_case(
    ("choice", "must_call", "many_calls", "names"),
    [
        (None, False, True, ["now", "go"]),
        ({"type": "auto"}, False, True, ["now", "go"]),
        ({"type": "any"}, True, True, ["now", "go"]),
        ({"type": "any", "disable_parallel_tool_use": True}, True, False, ["now", "go"]),
        ({"type": "tool", "name": "go"}, True, False, ["go"]),
        ({"type": "none"}, False, True, []),
    ],
)
def test_a_choice_of_tools_is_followed(
    choice: dict[str, Any] | None, must_call: bool, many_calls: bool, names: list[str]
) -> None:
    chat = request(tools=[TOOL, {**TOOL, "name": "go", "type": "custom"}], tool_choice=choice).chat
    assert (chat.must_call, chat.many_calls) == (must_call, many_calls)
    assert [tool["function"]["name"] for tool in chat.tools] == names


def test_an_answer_that_has_begun_is_continued_and_thinking_is_a_variable() -> None:
    begun = request(messages=[HELLO, {"role": "assistant", "content": "He"}], thinking={"type": "disabled"}).chat
    assert begun.variables == {"continue_final_message": True, "enable_thinking": False}
    assert not begun.may_reason
    assert request(thinking={"type": "enabled", "budget_tokens": 1024}).chat.may_reason


def test_parameters_are_those_of_sampling() -> None:
    given = request(stop_sequences=["\n", "."], temperature=0.5, top_k=4, metadata={"user_id": None})
    params = given.sampling_params(512)
    assert (params.max_tokens, params.stop, params.temperature, params.top_k) == (9, ("\n", "."), 0.5, 4)
    assert request(context_management={"edits": []}, output_config={"effort": "low"}, speed="standard").ignored == (
        "context_management",
        "output_config",
        "speed",
    )


@each_case(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "messages"),
        ({"max_tokens": None}, "max_tokens", "max_tokens is null; it must be an integer"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages", "image"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages", "a block tool_use of the role user"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages", "tool_result of 't1', and no tool_use"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools", "web_search_20250305"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice", "has the type tool and no name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "nwo"}}, "tool_choice", "unknown tool 'nwo'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "there are no tools"),
        ({"stop": "x", "stop_sequences": ["y"]}, "stop", "leave one out"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "not supported"),
        ({"speed": "fast"}, "speed", "speed"),
    ],
    ids=lambda case: json.dumps(case)[:60],
)
def test_what_cannot_be_served_is_refused_by_its_field(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        found = request(**fields)
        assert found.chat
        found.sampling_params(512)
    assert (refused.value.status, (refused.value.param or "").partition("[")[0]) == (400, param)
