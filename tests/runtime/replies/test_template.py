"""Templates are checked: each mistake has one message that names the field."""

from typing import Any

import pytest

from ingot.errors import ArtifactError
from ingot.runtime.replies import FORMATS, ReplyDelta, ReplyParser, ReplyTemplate, format_of
from tests.each_case import each_case

GOOD: dict[str, Any] = {"start_anchor": "A:", "fields": {"content": {}}}


def with_field(**field: Any) -> dict[str, Any]:
    return {**GOOD, "fields": {"content": {}, "tool_calls": {"open": "<c>", **field}}}


@each_case(
    ("source", "message"),
    [
        ({**GOOD, "version": 2}, "version: Input should be 1"),
        ({**GOOD, "fields": {}}, "fields: Dictionary should have at least 1 item"),
        ({**GOOD, "color": 1}, "color: Extra inputs are not permitted"),
        (with_field(content="yaml"), "fields.tool_calls.content: Input should be 'text'"),
        (with_field(open_pattern="<d>"), "it has both open and open_pattern"),
        (with_field(close_pattern="("), "is not a pattern (missing )"),
        (with_field(transform="a {content}"), "mixes a placeholder with text"),
        (with_field(transform_each=True), "it has transform_each but no transform"),
        ({**GOOD, "fields": {"content": {}, "more": {}}}, "the fields content, more have no open"),
        ("text", "Input should be a valid dictionary"),
    ],
)
def test_a_mistake_is_named(source: Any, message: str) -> None:
    with pytest.raises(ArtifactError) as refused:
        ReplyTemplate.load(source)
    assert message in str(refused.value)
    assert str(refused.value).startswith("response_template: ")


def test_every_format_compiles() -> None:
    assert all(row.template.fields for row in FORMATS.values())


@each_case(
    ("source", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call>\n<function=", "qwen-xml"),
        ("[TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral-args"),
        ("<|python_tag|>", "llama-json"),
        ("{% if '</think>' in content %}", "reasoning"),
    ],
)
def test_a_chat_template_tells_the_format(source: str, name: str) -> None:
    found = format_of(source)
    assert found is not None
    assert found.name == name


def test_other_chat_templates_have_none() -> None:
    assert format_of("{{ messages }}") is None


def test_dialects_of_json_are_read() -> None:
    """Gemma's: names as keys, and quotes of its own."""
    field = {
        "open_pattern": r"<call:(?P<name>\w+)",
        "close": "<end>",
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [["<q>", "<q>"]]},
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
    }
    parser = ReplyParser(ReplyTemplate.load({**GOOD, "fields": {"content": {}, "tool_calls": field}}))
    found = parser.feed('<call:f{place:<q>a "b", {c: d}<q>,n:[1]}<end>')
    assert found.calls[0].arguments == '{"place": "a \\"b\\", {c: d}", "n": [1]}'
    assert parser.finish() == ReplyDelta()
