"""The compiler refuses what it cannot express, by name, and keeps what it compiled."""

import json
import re
from dataclasses import replace

import pytest

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

from ingot.errors import RequestError
from ingot.runtime.constraints import Constraint
from ingot.runtime.constraints.compiler import ConstraintCompiler
from tests.each_case import each_case
from tests.runtime.constraints.grammars import NAMES, compiler, matcher
from tests.runtime.engines import demo_tokenizer, sentencepiece_tokenizer


@each_case(
    ("constraint", "reason"),
    [
        (Constraint.json_schema({"uniqueItems": True, "contains": {}}), 'not supported: "contains", "uniqueItems"'),
        (
            Constraint.json_schema({"properties": {"a": {"not": {}}}, "required": ["a"]}),
            'not supported: "not"; leave them out',
        ),
        (Constraint.json_schema({"type": "strin"}), 'at #/type it is "strin"; it must be array, boolean'),
        (
            Constraint.json_schema({"type": "integer", "minimum": 5, "maximum": 3}),
            "minimum (5) is greater than maximum",
        ),
        (Constraint.json_schema({"$ref": "http://example.com/x.json"}), "does not fetch resources"),
        (
            Constraint.json_schema({"type": "string", "format": "rhyme"}),
            'at #/format it is "rhyme"; it must be date, date-time',
        ),
        (Constraint.regex("(ab"), "unclosed group"),
        (Constraint.regex("(?=a)b"), "look-around"),
        (Constraint.json_schema({"oneOf": [True, {"type": "null"}]}), '"x-guidance": {"coerce_one_of": true} to the'),
        (Constraint.grammar("start: ("), "Expected token"),
        (Constraint.grammar("start: word"), 'unknown name: "word"'),
        (
            Constraint.json_schema(
                {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(4)]} for i in range(8)]}
            ),
            "schema too large",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(constraint: Constraint, reason: str) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)) as refused:
        compiler().compile(constraint)
    assert refused.value.field == "constraint"
    said = str(refused.value)
    assert said.startswith(f"the {constraint.kind} cannot be compiled: ")
    assert "no_forcing" not in said
    assert ("start:" in said) == (constraint.kind == "grammar")  # places are given in what the client wrote alone


def test_an_artifact_without_a_tokenizer_takes_no_constraint() -> None:
    with pytest.raises(RequestError, match="has no tokenizer"):
        ConstraintCompiler(None, 100).compile(Constraint.json_object())


@each_case(
    ("constraint", "reason"),
    [
        (Constraint.json_object(), "spells '{', which all its texts begin with"),
        (Constraint.json_schema({"type": "object"}), "spells '{', which all its texts begin with"),
        (Constraint.regex("[xy]a"), "spells the beginning of its texts"),
        (Constraint.choice(["a", "xb"]), ""),
    ],
)
def test_a_constraint_whose_texts_no_token_begins_is_refused(constraint: Constraint, reason: str) -> None:
    tokenizer = sentencepiece_tokenizer("ab", byte_fallback=False)
    own = ConstraintCompiler(tokenizer, tokenizer.vocab_size)
    if not reason:
        own.compile(constraint)
        return
    with pytest.raises(RequestError, match=re.escape(f"no token of the model's vocabulary {reason}")) as refused:
        own.compile(constraint)
    assert refused.value.field == "constraint"


def test_a_repeated_constraint_is_compiled_once() -> None:
    constraint = Constraint.json_schema({"type": "object"})
    assert compiler().compile(constraint) is compiler().compile(Constraint.json_schema('{"type": "object"}'))


@each_case("text", NAMES)
def test_each_choice_can_be_spelled_and_nothing_else(text: str) -> None:
    ids = demo_tokenizer().encode(text, add_special_tokens=False)
    assert matcher(Constraint.choice(NAMES)).num_allowed(ids) == len(ids)
    other = demo_tokenizer().encode(f"{text}!", add_special_tokens=False)
    assert matcher(Constraint.choice(NAMES)).num_allowed(other) < len(other)


def allows(constraint: Constraint, text: str) -> bool:
    ids = demo_tokenizer().encode(text, add_special_tokens=False)
    return matcher(constraint).num_allowed(ids) == len(ids)


def test_a_json_object_is_not_an_array() -> None:
    assert allows(Constraint.json_object(), json.dumps({"a": [1, {"b": None}]}))
    assert not allows(Constraint.json_object(), "[1]")


PAIR = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}, "required": ["a", "b"]}
DATED = {"type": "object", "properties": {"a": {}, "b": {}, "c": {"type": "string", "format": "date"}}}


@each_case("constraint", [Constraint.json_schema(PAIR), Constraint.json_schema(DATED), Constraint.json_object()])
@each_case(
    ("text", "is_compact"),
    [
        ('{"a": 1, "b": [1, 2]}', True),
        ('{"a":1,"b":[1,2]}', True),
        ('{"a": 1,"b":[1, {"c": "d  e"}]}', True),
        ('{"a":  1, "b": []}', False),
        ('{ "a": 1, "b": [] }', False),
        ('{"a": 1, "b": [ 1]}', False),
        ('{\n  "a": 1,\n  "b": []\n}', False),
    ],
)
def test_compact_json_has_at_most_a_space_after_a_comma_and_a_colon(
    text: str, is_compact: bool, constraint: Constraint
) -> None:
    assert allows(constraint, text) == is_compact
    assert allows(replace(constraint, whitespace="flexible"), text)


def test_a_schema_keeps_its_own_options_of_llguidance() -> None:
    assert allows(Constraint.json_schema({**PAIR, "x-guidance": {"whitespace_flexible": True}}), '{\n"a" : 1')
    assert allows(Constraint.json_schema(True), "[1, 2]")
    assert allows(Constraint.json_schema({}), "[1, 2]")
    assert not allows(Constraint.json_schema({}), "[ 1")
