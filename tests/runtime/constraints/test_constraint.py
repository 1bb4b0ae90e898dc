"""Constraints are checked when they are made, without the compiler."""

from typing import Any

import pytest

from ingot.errors import RequestError
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.constraints import Constraint
from tests.each_case import each_case

NESTED: dict[str, Any] = {}
for _ in range(200):
    NESTED = {"items": NESTED}


@each_case(
    ("make", "message"),
    [
        (lambda: Constraint("xml", "a"), "its kind is 'xml'; it must be"),  # type: ignore[arg-type]
        (lambda: Constraint.json_object(whitespace="none"), "its whitespace is 'none'; it must be"),  # type: ignore[arg-type]
        (lambda: Constraint.json_schema("[1"), "the json_schema is not JSON"),
        (lambda: Constraint.json_schema("[1]"), "the json_schema is [1]; it must be an object, or true"),
        (lambda: Constraint.json_schema({"const": float("nan")}), "the json_schema is not JSON"),
        (lambda: Constraint.json_schema(NESTED), "nested more than 100 levels deep"),
        (lambda: Constraint.json_schema({"enum": ["x" * 300_000]}), "at most 262,144 are allowed"),
        (lambda: Constraint.regex(""), "the regex is empty"),
        (lambda: Constraint.regex("\ud800"), "half a surrogate pair at character 0"),
        (lambda: Constraint.choice("abc"), "it must be a list of texts"),
        (lambda: Constraint.choice([]), "it must be a list of texts"),
        (lambda: Constraint.choice(["a", ""]), "none of them empty"),
        (lambda: SamplingParams(constraint={"type": "object"}), "make one by Constraint.json_schema"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_a_constraint_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        make()
    assert message in str(refused.value)
    assert refused.value.field == "constraint"


def test_properties_keep_the_order_of_the_schema() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert Constraint.json_schema(schema).source.index('"b"') < Constraint.json_schema(schema).source.index('"a"')
    assert Constraint.json_schema(schema) == Constraint.json_schema(
        '{"type": "object", "properties": {"b": {}, "a": {}}}'
    )
