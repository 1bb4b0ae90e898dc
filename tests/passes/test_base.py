"""Options are checked against the fields' annotations; a pass prints itself as one entry of a recipe's list."""

import math
from typing import Annotated, Any

import onnx_ir as ir
import pytest
import yaml

from ingot.errors import PassError, UsageError
from ingot.passes.base import Range, convert_option, describe
from tests.each_case import each_case
from tests.passes.example_passes import AllOptions, NegToAbs
from tests.passes.snippets import Snippet


def test_a_pass_without_changed_options_prints_its_name() -> None:
    assert str(AllOptions()) == "all-options"


def test_changed_options_are_printed_in_the_order_of_the_fields() -> None:
    pass_ = AllOptions(layers=("a", "*.b"), count=3, ratio=1e-5, overrides={"lm_head": {"bits": 8}})
    assert str(pass_) == "all-options: {count: 3, ratio: 1.0e-05, layers: [a, '*.b'], overrides: {lm_head: {bits: 8}}}"


def test_the_printed_form_can_be_read_back() -> None:
    pass_ = AllOptions(flag=True, label="yes", mode="exact", bits="none", layers=("x",), limit=7)
    (options,) = yaml.safe_load(str(pass_)).values()
    assert AllOptions(**{**options, "layers": tuple(options["layers"])}) == pass_


def test_options_hold_every_field_as_plain_data() -> None:
    options = AllOptions(layers=("x",)).options()
    assert options["layers"] == ["x"]
    assert list(options) == ["flag", "count", "ratio", "label", "mode", "bits", "layers", "limit", "overrides"]


def test_a_pass_is_frozen() -> None:
    with pytest.raises(AttributeError):
        AllOptions().count = 2  # type: ignore[misc]


def test_a_broken_precondition_is_a_pass_error_with_the_name() -> None:
    with pytest.raises(PassError, match=r"^neg-to-abs: the graph has no inputs; import a checkpoint first$"):
        NegToAbs()(Snippet().model)


def test_a_pass_takes_a_result_as_well_as_a_model() -> None:
    s = Snippet()
    model = s.output(s.node("Neg", "y", [s.input("x", "T", 4)], "T", 4))
    assert AllOptions()(ir.passes.PassResult(model, modified=True)).model is model


@each_case(
    ("option", "value", "allowed"),
    [
        ("flag", 1, "true or false"),
        ("count", True, "a whole number"),
        ("count", 1.5, "a whole number"),
        ("ratio", "half", "a number"),
        ("label", 3, "a text"),
        ("mode", "exat", "'fast' or 'exact'. Did you mean 'exact'?"),
        ("bits", 5, "'none' or 4 or 8"),
        ("layers", "a", "a list, each a text"),
        ("layers", (1,), "a list, each a text"),
        ("limit", "none", "a whole number or null"),
        ("overrides", {"a": 1}, "a mapping from names to a mapping from names to a whole number"),
        ("overrides", {1: {}}, "a mapping from names to a mapping from names to a whole number"),
    ],
)
def test_a_wrong_value_is_refused_with_option_value_and_allowed_values(option: str, value: Any, allowed: str) -> None:
    with pytest.raises(UsageError) as caught:
        AllOptions(**{option: value})
    assert str(caught.value).startswith(f"all-options: {option} is {value!r}; allowed: {allowed}")


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


def test_options_are_stored_in_their_types() -> None:
    made = AllOptions(layers=["a"], ratio=1, count=2.0)  # type: ignore[arg-type]
    assert (made.layers, made.ratio, made.count) == (("a",), 1.0, 2)
    assert type(made.count) is int


def test_true_is_not_the_number_one() -> None:
    with pytest.raises(UsageError, match="bits is True"):
        AllOptions(bits=True)  # type: ignore[arg-type]
