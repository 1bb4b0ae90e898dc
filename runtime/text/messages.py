"""Messages of a conversation, as callers give them: checked, and copied into plain data that a template may read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.errors import RequestError
from ingot.runtime.text.template_budget import (
    ITEM_UNITS,
    MAX_INPUT_UNITS,
    MAX_INTEGER_BITS,
    MAX_NESTING,
    NODE_UNITS,
    text_units,
)

Message = Mapping[str, object]
"""One turn of a conversation, in the form that OpenAI's API and transformers share.

role            "system", "user", "assistant", "tool", or another that the model's template reads
content         a text, or a list of parts {"type": "text", "text": ...}; None where there are tool_calls
tool_calls      of the assistant: {"type": "function", "id": ..., "function": {"name": ..., "arguments": ...}}
tool_call_id    of the tool's answer

A template may read other keys, such as name or reasoning_content. They hold plain data.
"""

_EXAMPLE = '{"role": "user", "content": "Hello"}'
_CALL_EXAMPLE = '{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}'
_TEXT_KEYS = ("name", "tool_call_id", "reasoning_content", "thinking")
_SPEAKERS = ("user", "system", "developer")  # who have nothing to say but a content; others may call tools, or return
_TOOL_ROLES = ("tool", "ipython", "function")  # whose content is what a function returned


class PlainCopy:
    """Copies values into plain data: text, numbers, lists, mappings and None, so that no template reaches an object.

    `units` is the size of everything that was copied.
    """

    def __init__(self) -> None:
        self.units = 0

    def of(self, value: object, where: str, depth: int = 0) -> Any:
        """The copy. RequestError, with `where`, for another type, or for what is too large or nested too deep."""
        if depth > MAX_NESTING:
            raise RequestError(f"{where} is nested more than {MAX_NESTING} deep; give flatter data")
        self.units += ITEM_UNITS
        if isinstance(value, str):
            self.units += text_units(value)
            copy: Any = str.__str__(value)
        elif isinstance(value, int | float | None):
            copy = _plain_number(value, where)
        elif isinstance(value, Mapping):
            self.units += NODE_UNITS
            copy = {self._key(key, where): self.of(item, where, depth + 1) for key, item in value.items()}
        elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
            self.units += NODE_UNITS
            copy = [self.of(item, where, depth + 1) for item in value]
        else:
            raise RequestError(
                f"{where} contains a {type(value).__name__}; allowed are texts, numbers, lists, mappings and None"
            )
        if self.units > MAX_INPUT_UNITS:
            raise RequestError(
                f"the conversation, with its tools and variables, is larger than {MAX_INPUT_UNITS >> 20} million "
                "characters; shorten it"
            )
        return copy

    def _key(self, key: object, where: str) -> Any:
        if not isinstance(key, str | int | float | None):
            raise RequestError(f"{where} has a {type(key).__name__} as a key; keys are texts")
        return self.of(key, where)


def _plain_number(value: int | float | None, where: str) -> int | float | None:
    """The number without a subclass's methods."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value.bit_length() > MAX_INTEGER_BITS:
            raise RequestError(f"{where} contains a number of {value.bit_length()} bits; at most {MAX_INTEGER_BITS}")
        return int.__int__(value)
    return float.__float__(value)


def plain_messages(messages: object, copy: PlainCopy) -> list[dict[str, Any]]:
    """The messages as plain data. RequestError, with the message's number, for what is not a message."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes | bytearray):
        raise RequestError(f"the messages are a {type(messages).__name__}; give a list such as [{_EXAMPLE}]")
    return [_plain_message(message, f"message {index}", copy) for index, message in enumerate(messages)]


def _plain_message(message: object, where: str, copy: PlainCopy) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where} is {_shown(message)}; it must be a mapping such as {_EXAMPLE}")
    plain: dict[str, Any] = copy.of(message, where)
    _check_content(plain, where)
    for key in _TEXT_KEYS:
        if plain.get(key) is not None and not isinstance(plain[key], str):
            raise RequestError(f"{where}: {key} is {_shown(plain[key])}; it must be a text")
    if plain.get("tool_calls") is not None:
        plain["tool_calls"] = _plain_calls(plain["tool_calls"], where)
    return plain


def _check_content(message: dict[str, Any], where: str) -> None:
    content = message.get("content")
    if content is None and message["role"] in _SPEAKERS:
        raise RequestError(f"{where} has no content; give a text or a list of parts")
    if content is None or isinstance(content, str) or message["role"] in _TOOL_ROLES:
        return
    if not isinstance(content, list):
        raise RequestError(f"{where}: content is {_shown(content)}; it must be a text or a list of parts")
    for index, part in enumerate(content):
        is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not is_text:
            raise RequestError(
                f'{where}, part {index} of the content is {_shown(part)}; it must be {{"type": "text", "text": ...}}: '
                "the model reads text alone"
            )


def _plain_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{where}: tool_calls is {_shown(calls)}; it must be a list such as [{_CALL_EXAMPLE}]")
    return [_plain_call(call, f"{where}, tool call {index}") for index, call in enumerate(calls)]


def _plain_call(call: object, where: str) -> dict[str, Any]:
    """The call; arguments in JSON text, as OpenAI's API has them, become an object, which templates expect."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} is {_shown(call)}; it must be such as {_CALL_EXAMPLE}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _json_object(arguments)
    elif not isinstance(arguments, dict | None):
        raise RequestError(f"{where}: arguments is {_shown(arguments)}; it must be an object, or its JSON text")
    changed = {**function, "arguments": arguments} if "arguments" in function else function
    return {**call, "function": changed} if "function" in call else changed


def _json_object(text: str) -> object:
    """The object that the text spells; the text itself where it spells none, as a model may have written it."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def with_joined_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its parts joined to one text, for a template that reads texts alone."""
    content = message.get("content")
    if not isinstance(content, list) or message["role"] in _TOOL_ROLES:
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def with_text_after(message: dict[str, Any], text: str) -> dict[str, Any]:
    """The message with a text after that of its content, or after that of the last part of it."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + text}
    return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + text}]}


def _shown(value: object) -> str:
    """The value for an error message as JSON, in which most messages come; its type where it is large."""
    if isinstance(value, str | int | float | None):
        shown = json.dumps(value if not isinstance(value, str) else value[:60], ensure_ascii=False)
        return shown if len(shown) <= 64 else f"{shown[:60]}..."
    if isinstance(value, Mapping) and len(value) <= 4 and all(isinstance(key, str) for key in value):
        inner = ", ".join(f"{_short(key)}: {_short(item)}" for key, item in value.items())
        return f"{{{inner}}}"[:120]
    return f"a {type(value).__name__}"


def _short(value: object) -> str:
    return (
        json.dumps(value, ensure_ascii=False)[:40]
        if isinstance(value, str | int | float | None)
        else f"a {type(value).__name__}"
    )
