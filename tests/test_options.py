"""How options are declared, and how their values are converted and refused."""

import math
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from ingot.errors import RequestError, UsageError
from ingot.options import (
    Doc,
    Flag,
    Items,
    Range,
    Reader,
    check_options,
    convert_option,
    describe,
    documented,
    options_of,
    read_option,
)
from ingot.runtime import EngineOptions, RequestOptions, SamplingParams, SpeculationOptions
from ingot.runtime.server.options import ServerOptions
from tests.each_case import each_case


def _even(value: int) -> int:
    if value % 2:
        raise ValueError(f"{value} is odd")
    return value


def _rising(values: tuple[int, ...]) -> None:
    if values[-1] < values[0]:
        raise ValueError(f"{values[-1]} is less than {values[0]}")


@documented
@dataclass(frozen=True, kw_only=True)
class Declared:
    """One option of each kind."""

    count: Annotated[int | None, Range(ge=1, le=9), Doc("how many", none="all")] = None
    share: Annotated[float, Range(gt=0), Doc("how much")] = 0.5
    size: Annotated[int, Range(ge=0, le=1 << 40, bytes=True), Doc("how large", none="nothing")] = 0
    steps: Annotated[int, Range(ge=1, advice="leave it out for one"), Doc("how long")] = 1
    mode: Annotated[Literal["fast", "exact"], Doc("how")] = "fast"
    is_on: Annotated[bool, Flag("--on"), Doc("whether")] = False
    pair: Annotated[int, Reader(_even), Doc("an even number")] = 0
    ranks: Annotated[tuple[Annotated[int, Range(ge=1, le=9)], ...], Items(1, 2, _rising), Doc("in order")] = (1, 2)

    def __post_init__(self) -> None:
        check_options(self)


@each_case(
    ("given", "message"),
    [
        ({"count": 0}, "count is 0; it must be from 1 to 9, or None for the default"),
        ({"count": "1"}, "count is '1'; it must be a whole number from 1 to 9, or None for the default"),
        ({"count": True}, "count is True; it must be a whole number from 1 to 9"),
        ({"count": 1.0}, "count is 1.0; it must be a whole number"),
        ({"share": 0}, "share is 0; it must be above 0"),
        ({"share": math.inf}, "share is inf; it must be above 0"),
        ({"share": None}, "share is None; it must be a finite number above 0"),
        ({"size": "4GiB"}, "size is '4GiB'; it must be a whole number from 0 to"),
        ({"steps": 0}, "steps is 0; it must be a whole number, at least 1: leave it out for one"),
        ({"mode": "slow"}, "mode is 'slow'; it must be one of fast, exact"),
        ({"is_on": 1}, "is_on is 1; it must be True or False"),
        ({"pair": 3}, "pair: 3 is odd"),
        ({"ranks": ()}, "ranks is (); it must be a list of 1 to 2 values, each a whole number from 1 to 9"),
        ({"ranks": (0,)}, "ranks is (0,); it must be a list of 1 to 2 values, each a whole number from 1 to 9"),
        ({"ranks": (2, 1)}, "ranks: 1 is less than 2"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_with_what_is(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Declared(**given)
    assert str(caught.value).startswith(message)


def test_values_are_kept_in_the_types_of_their_options() -> None:
    given: dict[str, Any] = {"count": np.int64(3), "share": np.float32(0.5), "size": 8, "pair": 2}
    made = Declared(**given)
    assert made == Declared(count=3, share=0.5, size=8, pair=2)
    assert [type(value) for value in (made.count, made.share)] == [int, float]


def test_a_caller_chooses_the_error_and_whether_a_range_comes_with_its_type() -> None:
    made = object.__new__(Declared)
    for name, option in options_of(Declared).items():
        object.__setattr__(made, name, 0 if name == "count" else option.default)
    with pytest.raises(RequestError, match="count is 0; it must be a whole number from 1 to 9") as caught:
        check_options(made, refuse=lambda message, name: RequestError(message, field=name), full=True)
    assert caught.value.field == "count"


@each_case(
    ("name", "value", "read"),
    [("size", "4GiB", 4 << 30), ("size", 8.0, 8), ("count", None, None), ("share", 1, 1.0), ("is_on", True, True)],
)
def test_plain_data_may_have_units(name: str, value: object, read: object) -> None:
    assert read_option(options_of(Declared)[name], value, plain=True) == read


@each_case(
    ("name", "value", "message"),
    [
        ("size", "4XB", "size: '4XB' is not a size; write a number of bytes, or one with a unit: kB, "),
        ("count", "x", "count is 'x'; it must be a whole number from 1 to 9, or null for the default"),
        ("is_on", "x", "is_on is 'x'; it must be true or false"),
        ("mode", "x", "mode is 'x'; it must be 'fast' or 'exact'"),
    ],
)
def test_messages_about_plain_data_are_in_the_words_of_yaml(name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=r"^") as caught:
        read_option(options_of(Declared)[name], value, plain=True)
    assert str(caught.value).startswith(message)


def test_help_lists_the_options() -> None:
    assert (Declared.__doc__ or "").splitlines()[:5] == [
        "One option of each kind.",
        "",
        "count  how many; None: all",
        "share  how much",
        "size   how large; 0: nothing",
    ]
    assert options_of(Declared)["size"].meaning == "how large; null: nothing"
    assert options_of(Declared)["mode"].meaning == "how; null: fast"


@each_case("declaring", [EngineOptions, ServerOptions, RequestOptions, SamplingParams, SpeculationOptions])
def test_every_option_has_a_meaning_and_a_default_that_is_allowed(declaring: type) -> None:
    for option in options_of(declaring).values():
        assert option.doc.text, option.name
        assert not option.doc.text.endswith("."), option.name
        if option.default is not MISSING:
            assert read_option(option, option.default) == option.default


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
