"""A pass prints itself as one entry of a recipe's list."""

import onnx_ir as ir
import pytest
import yaml

from ingot.errors import PassError
from tests.passes.example_passes import AllOptions, NegToAbs
from tests.passes.snippets import Snippet


def test_a_pass_without_changed_options_prints_its_name() -> None:
    assert str(AllOptions()) == "all-options"


def test_changed_options_are_printed_in_the_order_of_the_fields() -> None:
    pass_ = AllOptions(layers=("a", "*.b"), count=3, ratio=1e-5, overrides={"lm_head": {"bits": 8}})
    assert str(pass_) == "all-options: {count: 3, ratio: 1.0e-05, layers: [a, '*.b'], overrides: {lm_head: {bits: 8}}}"


def test_what_is_printed_can_be_read_back() -> None:
    pass_ = AllOptions(flag=True, label="yes", mode="exact", bits="none", layers=("x",), limit=7)
    (options,) = yaml.safe_load(str(pass_)).values()
    assert AllOptions(**{**options, "layers": tuple(options["layers"])}) == pass_


def test_options_hold_every_field_as_plain_data() -> None:
    options = AllOptions(layers=("x",)).options()
    assert options["layers"] == ["x"]
    assert list(options) == ["flag", "count", "ratio", "label", "mode", "bits", "layers", "limit", "overrides"]


def test_a_pass_cannot_be_changed_after_birth() -> None:
    with pytest.raises(AttributeError):
        AllOptions().count = 2  # type: ignore[misc]


def test_a_broken_precondition_is_a_pass_error_with_the_name() -> None:
    with pytest.raises(PassError, match=r"^neg-to-abs: the graph has no inputs; import a checkpoint first$"):
        NegToAbs()(Snippet().model)


def test_a_pass_takes_a_result_as_well_as_a_model() -> None:
    s = Snippet()
    model = s.output(s.node("Neg", "y", [s.input("x", "T", 4)], "T", 4))
    assert AllOptions()(ir.passes.PassResult(model, modified=True)).model is model
