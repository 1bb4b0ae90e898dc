"""Schemas are followed to the digit, keywords that change nothing are left out, and refusals name their place."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

from ingot.errors import RequestError
from ingot.runtime.constraints import Constraint
from ingot.runtime.constraints.compiler import lark_of, source_of
from ingot.runtime.constraints.constraint import WHITESPACE
from ingot.runtime.constraints.dates import PATTERNS
from ingot.runtime.constraints.numbers import NumberRange
from ingot.runtime.constraints.schemas import FORMATS
from ingot.runtime.constraints.worker import ConstraintSource, compiled
from tests.each_case import each_case
from tests.runtime.constraints.grammars import compiler
from tests.runtime.engines import demo_tokenizer

LARGE = 1234567890123456789
NESTED = {"s": {"type": "array", "items": {"$ref": "#/$defs/s"}}}
INT64 = {"type": "integer", "format": "int64", "minimum": -(2**63), "maximum": 2**63 - 1}


def allows(constraint: Constraint, text: str) -> bool:
    """Whether a text is one of the constraint's."""
    native = compiled(source_of(constraint), compiler().read_vocabulary())
    assert not native.is_error(), native.get_error()
    ids = demo_tokenizer().encode(text, add_special_tokens=False)
    if native.validate_tokens(ids) < len(ids):
        return False
    for token in ids:
        native.consume_token(token)
    accepting: bool = native.is_accepting()
    return accepting


@each_case(
    ("schema", "right", "wrong"),
    [
        ({"const": LARGE}, [f"{LARGE}"], [f"{LARGE - 21}", f"{LARGE + 1}"]),
        ({"enum": [LARGE, "a", 1.5]}, [f"{LARGE}", '"a"', "1.5"], [f"{LARGE + 1}"]),
        ({"const": {"a": [LARGE, None]}}, [f'{{"a": [{LARGE}, null]}}'], [f'{{"a": [{LARGE + 1}, null]}}']),
        ('{"const": 0.1234567890123456789}', ["0.1234567890123456789"], ["0.12345678901234568"]),
        ({"enum": [LARGE, LARGE + 1], "maximum": LARGE}, [f"{LARGE}"], [f"{LARGE + 1}"]),
        (INT64, ["0", f"{-(2**63)}", f"{2**63 - 1}"], [f"{-(2**63) - 1}", f"{2**63}", "1.5"]),
        ({"type": ["integer", "null"], "minimum": 2**64}, ["null", f"{2**64}"], [f"{2**64 - 1}", '"a"']),
        ({"maximum": 290.709}, ["290.7", "290.709", '"a"', "[true]", "{}"], ["290.71", "291"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, ["0.5", "1", "1.0"], ["0", "-0", "0.0", "1.01"]),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, ["1.5", "1.50"], ["1", "1.0"]),
        ({"type": "number", "maximum": 1.7976931348623157e308}, ["5", "-5.5"], ['"a"']),
        ({"type": "number", "minimum": 0.5, "multipleOf": 0.25}, ["0.5", "0.750", "2"], ["0.25", "0.6"]),
        (
            {"type": "object", "properties": {"id": INT64, "n": {"type": "string"}}, "required": ["id"]},
            ['{"id": 7}', f'{{"id":{2**63 - 1}, "n": "a"}}', '{"id": 7, "other": [1]}'],
            ["{}", f'{{"id": {2**63}}}', '{"n": "a"}', '{"id": 7, "id": 8}'],
        ),
        (
            {"type": "object", "additionalProperties": INT64},
            ["{}", '{"a": 1}', f'{{"a": 1, "b":{2**63 - 1}}}'],
            [f'{{"a": {2**63}}}', '{"a": "b"}'],
        ),
        (
            {"type": "array", "prefixItems": [INT64, {"const": LARGE}], "items": {"type": "null"}, "minItems": 1},
            ["[1]", f"[1, {LARGE}]", f"[1, {LARGE}, null,null]"],
            ["[]", "[1, 2]", f"[1, {LARGE}, 3]"],
        ),
        ({"type": "array", "items": {"const": LARGE}, "maxItems": 1}, ["[]", f"[{LARGE}]"], [f"[{LARGE}, {LARGE}]"]),
        (
            {"$defs": {"t": {"properties": {"v": INT64, "next": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t"},
            ['{"v": 1, "next": {"next": {"v": 2}}}'],
            [f'{{"next": {{"v": {2**63}}}}}'],
        ),
        (
            {"anyOf": [INT64, {"$ref": "#/$defs/s"}], "$defs": NESTED},
            ["5", "[[],[[]]]"],
            ["[5]", f"{2**63}"],
        ),
        ({"anyOf": [{"minimum": 2**70, "maximum": 2**69, "type": "integer"}, {"type": "null"}]}, ["null"], ["5"]),
    ],
)  # fmt: skip
def test_numbers_are_exact_wherever_they_are(schema: Any, right: list[str], wrong: list[str]) -> None:
    constraint = Constraint.json_schema(schema)
    in_grammar = Constraint.grammar(f'start: "<" %json {constraint.source} ">" // "%json" {{\n')
    for text in right:
        assert allows(constraint, text), text
        assert allows(in_grammar, f"<{text}>"), text
    for text in wrong:
        assert not allows(constraint, text), text
        assert not allows(in_grammar, f"<{text}>"), text


NEUTRAL: list[dict[str, Any]] = [
    {"propertyNames": {"type": "string"}},
    {"propertyNames": True},
    {"propertyNames": {"type": ["string", "null"], "minLength": 0, "title": "key"}},
    {"uniqueItems": False},
    {"uniqueItems": True, "maxItems": 1},
    {"dependentRequired": {}},
    {"dependentRequired": {"a": [], "b": ["c"]}, "required": ["c"]},
    {"dependentSchemas": {"a": True, "b": {}}},
    {"dependencies": {"a": [], "b": {}}},
    {"not": False},
    {"not": {"not": {}}},
    {"if": {"type": "null"}},
    {"then": {"type": "null"}, "else": False},
    {"if": {"type": "null"}, "then": True, "else": {"description": "any"}},
    {"minContains": 2, "maxContains": 3},
    {"contains": {"type": "null"}, "minContains": 0},
    {"unevaluatedItems": True},
    {"unevaluatedProperties": {}},
    {"unevaluatedProperties": False, "additionalProperties": True},
    {"$dynamicAnchor": "here"},
    {"$recursiveAnchor": True},
    {"maxLength": None, "minimum": None, "$ref": None, "items": None},
    {"minLength": 0.0, "minItems": 0.0},
    {"format": "int32"},
    {"format": "password"},
]


@each_case("keywords", NEUTRAL)
def test_a_keyword_whose_value_changes_nothing_is_left_out_wherever_a_schema_is(keywords: dict[str, Any]) -> None:
    places: list[Any] = [
        keywords,
        {"properties": {"not": keywords}},
        {"type": "array", "items": keywords, "prefixItems": [keywords]},
        {"anyOf": [{"type": "null"}, {"type": "object", "additionalProperties": keywords}]},
        {"$ref": "#/$defs/if", "$defs": {"if": keywords, "unused": {"not": {}}}},
    ]
    for schema in places:
        native = compiled(source_of(Constraint.json_schema(schema)), compiler().read_vocabulary())
        assert not native.is_error(), (schema, native.get_error())


def test_what_only_looks_like_a_schema_stays() -> None:
    value = {"not": False, "uniqueItems": None, "format": "date"}
    schema = {"const": value, "default": value, "examples": [value], "enum": [value]}
    assert json.dumps(value) in lark_of(Constraint.json_schema(schema))
    assert allows(Constraint.json_schema({"const": value}), json.dumps(value))
    named = {"type": "object", "properties": {"not": {"type": "null"}, "format": {"const": "date"}}}
    assert json.dumps(named)[1:] in lark_of(Constraint.json_schema(named))


def test_unevaluated_properties_without_other_schemas_are_additional_ones() -> None:
    schema = {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}
    assert allows(Constraint.json_schema(schema), '{"a": 1}')
    assert not allows(Constraint.json_schema(schema), '{"b": 1}')


def test_a_date_is_a_pattern_unless_there_is_one() -> None:
    schema = {"properties": {"format": {"format": "date", "minLength": 3}, "own": {"format": "date", "pattern": "^2"}}}
    found = json.loads(lark_of(Constraint.json_schema(schema, whitespace="flexible")).removeprefix("start: %json "))
    assert found["properties"]["format"] == {"pattern": PATTERNS["date"], "minLength": 3}
    assert found["properties"]["own"] == schema["properties"]["own"]


@each_case(
    ("schema", "reason"),
    [
        (
            {"items": {"not": {}, "if": True, "then": False}},
            'at #/items it uses keywords that are not supported: "if", "not"',
        ),
        (
            {"properties": {"a/b": {"uniqueItems": True}}},
            'at #/properties/a~1b it uses keywords that are not supported: "un',
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"contains": {}}}}, "at #/$defs/a it uses keywords that are not"),
        ({"properties": {"a": {"type": "int"}}}, 'at #/properties/a/type it is "int"; it must be array, boolean'),
        ({"properties": {"a": 5}}, "at #/properties/a it is 5; a schema is an object, true or false"),
        ({"minimum": "5"}, 'at #/minimum it is "5"; it must be a number'),
        ({"anyOf": [{"multipleOf": 0}]}, "at #/anyOf/0/multipleOf it is 0; it must be a number above 0"),
        ({"maxLength": 1.5}, "at #/maxLength it is 1.5; it must be a whole number from 0 to 4294967296"),
        ({"required": "a"}, 'at #/required it is "a"; it must be a list of texts'),
        ({"enum": []}, "at #/enum it is []; it must be a list of at least one value"),
        (
            '{"type": "number", "minimum": 1e200}',
            "at # its numbers (minimum 1E+200) cannot be followed: it is 1E+200; numb",
        ),
        ({"type": "integer", "minimum": 2**60, "maximum": 2**59}, "at # no number is between its bounds"),
        (
            {"type": "integer", "minimum": 2**60, "multipleOf": 7},
            "at # its numbers (minimum 1152921504606846976, multipleOf 7)",
        ),
        ({"allOf": [{"type": "number"}, {"minimum": 0.5}]}, "at # allOf cannot be combined with a number that is too"),
        (
            {"properties": {"a": INT64}, "patternProperties": {"b": {}}},
            "at # patternProperties cannot be combined with",
        ),
        ({"oneOf": [INT64, {"type": "integer", "minimum": 5}]}, 'add "x-guidance": {"coerce_one_of": true}'),
    ],
)
def test_a_refusal_names_the_place_the_value_and_what_is_allowed(schema: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)) as refused:
        lark_of(Constraint.json_schema(schema))
    assert str(refused.value).startswith("the json_schema cannot be compiled: at #")
    assert refused.value.field == "constraint"


def chained(number: int) -> dict[str, Any]:
    definitions = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(number)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{number}": INT64}}


@each_case(
    ("schema", "reason"),
    [
        (chained(3000), "it refers through too many steps"),
        ('{"const": 1e9999999}', "it has the number 1E+9999999; at most 400 characters and exponents up to 400"),
        ('{"maxLength": 1e300}', "at #/maxLength it is 1E+300; it must be a whole number"),
        ({"prefixItems": [{"minimum": n + 0.5, "multipleOf": 0.01} for n in range(3000)]}, "take too many rules"),
        (
            {
                "$defs": {"large": {"enum": ["x" * 20] * 4000}},
                "properties": {"n": INT64, **{f"{n}": {"$ref": "#/$defs/large"} for n in range(3000)}},
            },
            "it takes too many rules",
        ),
    ],
)
def test_a_schema_that_takes_many_rules_is_refused_before_they_are_written(schema: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)):
        lark_of(Constraint.json_schema(schema))


def test_the_formats_that_are_allowed_are_those_of_llguidance() -> None:
    others = ("idn-email", "uri-reference", "iri", "json-pointer", "regex", "byte", "uri-template", "idn-hostname")
    for name in (*FORMATS, *others):
        grammar = f'start: %json {{"type": "string", "format": "{name}"}}'
        native = compiled(ConstraintSource(grammar), compiler().read_vocabulary())
        assert native.is_error() == (name in others), name


def test_an_older_draft_lacks_newer_keywords() -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "unevaluatedProperties": False}
    assert allows(Constraint.json_schema(schema), '{"a": 1}')
    with pytest.raises(RequestError, match='not supported: "if"'):
        lark_of(Constraint.json_schema({**schema, "if": True, "then": False}))


def random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """A schema with integers in it, of the kinds of objects, lists and unions that have rules."""
    kind = rng.randrange(7 if depth else 3)
    if kind < 2:
        low = rng.randrange(-20, 20)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(50)}
    if kind == 2:
        return rng.choice([{"type": "string", "maxLength": 2}, {"enum": [1, "a", None]}, {"type": ["integer", "null"]}])
    if kind < 5:
        names = rng.sample(["a", "b", "c"], rng.randrange(1, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": [name for name in names if rng.random() < 0.5],
            "additionalProperties": rng.choice([False, {"type": "integer", "minimum": 5}]),
        }
    if kind == 5:
        least = rng.randrange(3)
        items: dict[str, Any] = {"prefixItems": [random_schema(rng, depth - 1)]} if rng.random() < 0.4 else {}
        items["items"] = random_schema(rng, depth - 1)
        return {"type": "array", **items, "minItems": least, "maxItems": least + rng.randrange(3)}
    return {"anyOf": [random_schema(rng, depth - 1), random_schema(rng, depth - 1)]}


def walk(native: Any, rng: random.Random) -> list[int] | None:
    """Tokens of a random text; None where it did not end."""
    end, tokens = compiler().read_vocabulary().eos_token, list[int]()
    for _ in range(60):
        mask = int.from_bytes(native.compute_bitmask(), "little")
        allowed = [token for token in range(end + 1) if mask >> token & 1]
        token = end if end in allowed else rng.choice(allowed)
        if token == end:
            return tokens
        native.consume_token(token)
        tokens.append(token)
    return None


@each_case("whitespace", WHITESPACE)
def test_rules_around_a_number_allow_what_llguidance_allows(whitespace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of both follows random texts of the other."""
    rng, ended = random.Random(5), 0
    for _ in range(30):
        schema = random_schema(rng, 3)
        constraint = Constraint.json_schema(schema, whitespace=whitespace)
        plain = compiled(source_of(constraint), compiler().read_vocabulary())
        with monkeypatch.context() as patched:
            patched.setattr(NumberRange, "is_native", property(lambda self: False))
            ruled = compiled(source_of(constraint), compiler().read_vocabulary())
        for one, other in ((plain, ruled), (ruled, plain)):
            assert not one.is_error(), one.get_error()
            tokens = walk(one.deep_copy(), rng)
            if tokens is None:
                continue
            text = demo_tokenizer().decode(tokens)
            jsonschema.validate(json.loads(text), schema)
            if "\\" in text or re.search(r"-0\b", text):
                continue  # an escape in a name, and -0, are allowed by one alone
            ended += 1
            assert other.deep_copy().validate_tokens(tokens) == len(tokens), (schema, text)
    assert ended > 20
