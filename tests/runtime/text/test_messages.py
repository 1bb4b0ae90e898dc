"""Messages: what a message may hold, one error for each thing that it may not, and the plain copy of it."""

from collections import UserDict
from enum import StrEnum
from typing import Any

import numpy as np
import pytest

from ingot.errors import RequestError
from ingot.runtime.text.messages import PlainCopy, plain_messages
from ingot.runtime.text.template_budget import MAX_INPUT_UNITS
from tests.each_case import each_case

CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}


def plain(*messages: object) -> list[dict[str, Any]]:
    return plain_messages(list(messages), PlainCopy())


def with_call(**function: object) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}


def test_a_conversation_with_tools_is_copied() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": {"sum": 1}},
    ]
    copied = plain(*messages)
    assert copied == messages
    assert copied[1]["tool_calls"][0]["function"]["arguments"] is not CALL["function"]["arguments"]  # type: ignore[index]


def test_arguments_in_json_text_become_an_object() -> None:
    assert plain(with_call(name="add", arguments='{"a": 1}'))[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert plain(with_call(name="add", arguments="{a"))[0]["tool_calls"][0]["function"]["arguments"] == "{a"
    short = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": '{"a": 1}'}]}
    assert plain(short)[0]["tool_calls"] == [{"name": "add", "arguments": {"a": 1}}]


@each_case(
    ("message", "expected"),
    [
        ("Hello", 'message 0 is "Hello"; it must be a mapping such as'),
        ({"content": "x"}, 'message 0 is {"content": "x"}; it must be a mapping such as'),
        ({"role": 3}, 'message 0 is {"role": 3}'),
        ({"role": "user"}, "message 0 has no content; give a text or a list of parts"),
        ({"role": "system", "content": None}, "message 0 has no content"),
        ({"role": "user", "content": 3}, "message 0: content is 3; it must be a text or a list of parts"),
        ({"role": "user", "content": {"a": 1}}, 'message 0: content is {"a": 1}; it must be a text or a list of parts'),
        ({"role": "user", "content": ["a"]}, 'message 0, part 0 of the content is "a"; it must be'),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            'part 0 of the content is {"type": "image_url", "image_url": a dict}; it must be .* reads text alone',
        ),
        ({"role": "tool", "content": "x", "tool_call_id": 7}, "message 0: tool_call_id is 7; it must be a text"),
        ({"role": "user", "content": "x", "name": []}, "message 0: name is a list; it must be a text"),
        ({"role": "assistant", "tool_calls": CALL}, "message 0: tool_calls is .*; it must be a list such as"),
        ({"role": "assistant", "tool_calls": ["add"]}, 'message 0, tool call 0 is "add"; it must be such as'),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, 'message 0, tool call 0 is {"function": a dict}'),
        (with_call(name="add", arguments=3), "tool call 0: arguments is 3; it must be an object, or its JSON text"),
        ({"role": "user", "content": "x", "extra": object()}, "message 0 contains a object; allowed are texts"),
        ({"role": "user", "content": "x", "extra": {(1, 2): 3}}, "message 0 has a tuple as a key; keys are texts"),
        ({"role": "user", "content": "x", "extra": b"x"}, "message 0 contains a bytes; allowed are texts"),
        ({"role": "user", "content": "x", "extra": 10**5000}, "message 0 contains a number of 16610 bits; at most 256"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_what_is_not_a_message_is_refused(message: object, expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        plain(message)


@pytest.mark.parametrize("messages", ["Hello", {"role": "user"}, None, 3, iter([])])
def test_messages_are_a_list(messages: object) -> None:
    with pytest.raises(RequestError, match=f"the messages are a {type(messages).__name__}; give a list such as"):
        plain_messages(messages, PlainCopy())


def test_the_number_of_a_wrong_message_is_given() -> None:
    with pytest.raises(RequestError, match="message 1 is null"):
        plain({"role": "user", "content": "x"}, None)


def test_a_large_value_is_not_shown_whole() -> None:
    with pytest.raises(RequestError) as caught:
        plain({"role": 3, "content": "x" * 10_000})
    assert len(str(caught.value)) < 300


def test_data_that_is_nested_without_end_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    endless: list[Any] = []
    endless.append(endless)
    for value in (deep, endless):
        with pytest.raises(RequestError, match="message 0 is nested more than 100 deep"):
            plain({"role": "user", "content": "x", "extra": value})


def test_a_conversation_has_a_greatest_size() -> None:
    with pytest.raises(RequestError, match="the conversation, with its tools and variables, is larger than 16 million"):
        plain({"role": "user", "content": "x" * MAX_INPUT_UNITS})


class Role(StrEnum):
    USER = "user"


def test_the_copy_has_plain_types() -> None:
    message = UserDict({"role": Role.USER, "content": "x", "share": np.float64(0.5), "seen": True, "pair": (1, 2)})
    (copied,) = plain(message)
    assert copied == {"role": "user", "content": "x", "share": 0.5, "seen": True, "pair": [1, 2]}
    assert [type(value) for value in copied.values()] == [str, str, float, bool, list]
