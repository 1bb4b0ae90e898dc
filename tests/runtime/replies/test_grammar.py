"""A model that prefers blanks to everything else still ends its calls and its JSON: none may follow another."""

import re
from typing import Any

from ingot.runtime.constraints import Constraint
from ingot.runtime.constraints.constraint import JsonWhitespace
from ingot.runtime.replies import FORMATS
from ingot.runtime.replies.grammar import Calls, Reasoning, reply_constraint
from tests.each_case import each_case
from tests.runtime.constraints.grammars import END, allowed, matcher, spelled

_SPELLINGS = {name: each.calls for name, each in FORMATS.items() if each.calls}
_MOST_TOKENS = 250
_LARGE = 2**70  # too large for llguidance, so that the schema is written as rules
_CLOSED: dict[str, Any] = {"required": ["b"], "additionalProperties": False}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer", "minimum": 0, "maximum": 9}},
    "nested": {"a": {"type": "object", "properties": {"b": {"type": "null"}}, **_CLOSED}},
    "list": {"a": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}},
    "choice": {"a": {"anyOf": [{"const": {"b": [1, 2]}}, {"type": "null"}]}},
    "rules": {"a": {"enum": [_LARGE, _LARGE + 1]}, "b": {"type": "array", "items": {"const": _LARGE}, "maxItems": 2}},
    "reference": {"a": {"$ref": "#/$defs/b"}},
}


def blank_writer(constraint: Constraint) -> tuple[str, bool]:
    """The text of a model that writes a blank where one is allowed, and whether it ended."""
    follow, text = matcher(constraint), b""
    for _ in range(_MOST_TOKENS):
        tokens = allowed(follow.mask())
        if END in tokens:
            return text.decode(), True
        token = max(tokens, key=lambda token: (_starts_blank(spelled(token)), len(spelled(token)), -token))
        follow.consume(token)
        text += spelled(token)
    return text.decode(errors="replace"), False


def _starts_blank(text: bytes) -> int:
    """1 for a blank alone, 2 for a token of several: the most that a model can waste."""
    return min(len(text), 2) if text and not text.strip(b" \t\r\n") else 0


def calls_of(properties: dict[str, Any], spelling: str, whitespace: JsonWhitespace = "compact") -> Calls:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema_of(properties)}}
    return Calls([tool], _SPELLINGS[spelling], many=False, whitespace=whitespace)


def schema_of(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": [*properties], "additionalProperties": False,
        "$defs": {"b": {"type": "object", "properties": {"b": {"const": 1}}, **_CLOSED}},
    }  # fmt: skip


@each_case("properties", _SCHEMAS.values(), ids=_SCHEMAS)
@each_case("spelling", _SPELLINGS)
def test_a_required_call_ends_however_fond_the_model_is_of_blanks(spelling: str, properties: dict[str, Any]) -> None:
    constraint = reply_constraint(None, calls_of(properties, spelling), None, {})
    assert constraint is not None
    text, has_ended = blank_writer(constraint)
    assert has_ended, text
    assert not re.search(r"[ \t\r\n]{2}", text), text


@each_case("properties", _SCHEMAS.values(), ids=_SCHEMAS)
def test_an_answer_by_a_schema_ends_however_fond_the_model_is_of_blanks(properties: dict[str, Any]) -> None:
    text, has_ended = blank_writer(Constraint.json_schema(schema_of(properties)))
    assert has_ended, text
    assert not re.search(r"[ \t\r\n]{2}", text), text


def test_few_blanks_may_follow_the_reasoning_before_a_call() -> None:
    constraint = reply_constraint(
        None, calls_of(_SCHEMAS["flat"], "json-list"), Reasoning("<think>", "</think>", is_open=True, is_off=True), {}
    )
    assert constraint is not None
    text, has_ended = blank_writer(constraint)
    assert has_ended, text
    assert 0 < len(text.removeprefix("</think>").partition("[")[0]) <= 4


def test_flexible_white_space_has_no_end() -> None:
    """The control: where any white space is allowed, such a model writes nothing else."""
    constraint = reply_constraint(None, calls_of(_SCHEMAS["flat"], "json-list", "flexible"), None, {})
    assert constraint is not None
    text, has_ended = blank_writer(constraint)
    assert not has_ended
    assert re.search(r"\s{100}", text)
