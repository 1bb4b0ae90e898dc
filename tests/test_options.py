"""How options are declared, and how their values are converted and refused."""

import math
from typing import Annotated, Any

import pytest

from ingot.errors import UsageError
from ingot.options import Range, convert_option, describe
from tests.each_case import each_case


@pytest.mark.parametrize(
    ("value", "annotation", "converted"),
    [
        ([1, 2], tuple[int, ...], (1, 2)),
        (3, float, 3.0),
        (None, int | None, None),
        ({"a": [1]}, dict[str, tuple[int, ...]], {"a": (1,)}),
        ([1], object, [1]),
    ],
)
def test_plain_data_is_converted_to_the_annotation(value: Any, annotation: Any, converted: Any) -> None:
    result = convert_option("owner", "option", value, annotation)
    assert result == converted
    assert type(result) is type(converted)


@each_case(
    ("value", "annotation", "converted"),
    [
        (1e4, int, 10_000),
        (1e4, int | None, 10_000),
        (1e4, float, 1e4),
        (1.0, int | float, 1.0),
        (3.0, Annotated[int, Range(ge=1, le=3)], 3),
        (2.0, Annotated[int, Range(ge=1, le=3)] | Annotated[float, Range(gt=0, le=1)], 2),
        (1.0, Annotated[int, Range(ge=1, le=3)] | Annotated[float, Range(gt=0, le=1)], 1.0),
        (1, Annotated[int, Range(ge=1, le=3)] | Annotated[float, Range(gt=0, le=1)], 1),
    ],
)
def test_a_number_without_a_fraction_is_whole_where_only_that_fits(value: Any, annotation: Any, converted: Any) -> None:
    result = convert_option("owner", "option", value, annotation)
    assert (result, type(result)) == (converted, type(converted))


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "words"),
    [
        (Range(ge=0, le=2), [0, 1, 2], [-1, 3], "a number from 0 to 2"),
        (Range(gt=0, le=2), [0.1, 2], [0, 2.1], "a number above 0, up to 2"),
        (Range(ge=0, lt=1, usual=0.5), [0, 0.9], [1], "a number from 0 to below 1 (0.5 is usual)"),
        (Range(gt=0, lt=1), [0.5], [0, 1], "a number above 0, up to below 1"),
    ],
)
def test_a_number_out_of_its_range_is_refused(
    bounds: Range, inside: list[float], outside: list[float], words: str
) -> None:
    annotation = Annotated[float, bounds]
    assert describe(annotation) == words
    assert [convert_option("owner", "option", value, annotation) for value in inside] == inside
    for value in (*outside, math.nan, math.inf, -math.inf):
        with pytest.raises(UsageError, match=f"owner: option is {value}; allowed: "):
            convert_option("owner", "option", value, annotation)


def test_a_whole_number_out_of_its_range_is_shown_as_one() -> None:
    with pytest.raises(UsageError, match="owner: option is 1000000000; allowed: a whole number from 1 to 3"):
        convert_option("owner", "option", 1e9, Annotated[int, Range(ge=1, le=3)])
