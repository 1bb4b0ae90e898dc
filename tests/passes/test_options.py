"""Options are checked against the annotations of the fields, in the constructor and from a recipe alike."""

from typing import Any

import pytest

from ingot.errors import UsageError
from ingot.passes.options import convert_option
from tests.passes.example_passes import AllOptions


@pytest.mark.parametrize(
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
def test_a_wrong_value_is_refused_with_option_value_and_what_is_allowed(option: str, value: Any, allowed: str) -> None:
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
def test_plain_data_becomes_what_the_annotation_asks_for(value: Any, annotation: Any, converted: Any) -> None:
    result = convert_option("owner", "option", value, annotation)
    assert result == converted
    assert type(result) is type(converted)


def test_true_is_not_the_number_one() -> None:
    with pytest.raises(UsageError, match="bits is True"):
        AllOptions(bits=True)  # type: ignore[arg-type]
