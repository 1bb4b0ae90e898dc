"""Sections of a recipe that are made from declared options."""

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter, ValidationError

from ingot.artifact.section import section_of
from ingot.options import Doc, Items, Range
from tests.each_case import each_case


def _ascending(values: tuple[int, ...]) -> None:
    if list(values) != sorted(values):
        raise ValueError(f"levels {list(values)} are not in order")


@dataclass(frozen=True)
class Inner:
    """What is inside."""

    share: Annotated[float, Range(gt=0, le=1), Doc("how much")]


@dataclass(frozen=True)
class Declared:
    """One option of each kind; one without a meaning is not a key.

    More about them.
    """

    count: Annotated[int, Range(ge=1, le=9), Doc("how many")] = 3
    size: Annotated[int, Range(ge=0, le=1 << 40, bytes=True), Doc("how large")] = 0
    levels: Annotated[tuple[Annotated[int, Range(ge=1, le=9)], ...], Items(1, 2, _ascending), Doc("which")] = (1, 2)
    inner: Annotated[Inner | None, Doc("the rest; null for none")] = None
    seed: int = 0


SECTION: TypeAdapter[Any] = TypeAdapter(section_of(Declared))


def test_a_section_is_read_as_the_dataclass_and_written_as_its_keys() -> None:
    given = {"count": 4.0, "size": "1kB", "levels": (1, 3), "inner": {"share": 0.5}}
    made = SECTION.validate_python(given)
    assert made == Declared(4, 1000, (1, 3), Inner(0.5))
    assert SECTION.validate_python(made) is made
    assert SECTION.dump_python(made, mode="json") == {
        "count": 4,
        "size": 1000,
        "levels": [1, 3],
        "inner": {"share": 0.5},
    }
    assert SECTION.validate_python({}) == Declared()


def test_the_schema_has_meanings_bounds_and_defaults() -> None:
    schema = SECTION.json_schema()
    assert schema["description"] == "One option of each kind; one without a meaning is not a key."
    assert schema["additionalProperties"] is False
    count, levels = schema["properties"]["count"], schema["properties"]["levels"]
    assert (count["minimum"], count["maximum"], count["default"]) == (1, 9, 3)
    assert count["description"] == "how many"
    assert (levels["minItems"], levels["maxItems"], levels["items"]["maximum"]) == (1, 2, 9)


@each_case(
    ("given", "place", "kind"),
    [
        ({"count": 0}, ("count",), "greater_than_equal"),
        ({"count": True}, ("count",), "int_type"),
        ({"levels": ()}, ("levels",), "too_short"),
        ({"levels": (1, 2, 3)}, ("levels",), "too_long"),
        ({"levels": (2, 1)}, ("levels",), "value_error"),
        ({"levels": (1, 0)}, ("levels", 1), "greater_than_equal"),
        ({"inner": {}}, ("inner", "share"), "missing"),
        ({"inner": {"share": 0}}, ("inner", "share"), "greater_than"),
        ({"seed": 1}, ("seed",), "extra_forbidden"),
        (3, (), "model_type"),
    ],
)
def test_a_mistake_is_reported_at_its_key(given: object, place: tuple[str | int, ...], kind: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SECTION.validate_python(given)
    assert [(error["loc"], error["type"]) for error in caught.value.errors()] == [(place, kind)]
