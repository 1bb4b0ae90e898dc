"""Options are checked against the fields' annotations; a pass prints itself as one entry of a recipe's list."""

from typing import Any

import onnx_ir as ir
import pytest
import yaml

from ingot.errors import PassError, UsageError
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


def test_options_are_stored_in_their_types() -> None:
    made = AllOptions(layers=["a"], ratio=1, count=2.0)  # type: ignore[arg-type]
    assert (made.layers, made.ratio, made.count) == (("a",), 1.0, 2)
    assert type(made.count) is int


def test_true_is_not_the_number_one() -> None:
    with pytest.raises(UsageError, match="bits is True"):
        AllOptions(bits=True)  # type: ignore[arg-type]
