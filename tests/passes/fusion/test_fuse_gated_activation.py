"""fuse-gated-activation: IR before and after, equal bits, refusals."""

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.fusion.fuse_gated_activation import FuseGatedActivation
from ingot.passes.printing import model_to_text
from tests.each_case import each_case
from tests.passes.snippets import Snippet, op_types, random, run

WIDTH = 20  # no multiple of a vector register's length
AFTER = """\
input  gate: FLOAT[T,20]
input  up: FLOAT[T,20]
%activation = com.microsoft::QuickGelu(%gate) {alpha=1.0}  # activation, FLOAT[T,20]
%gated = Mul(%activation, %up)  # gated, FLOAT[T,20]
output gated: FLOAT[T,20]
"""


def _swiglu(swish: bool = False, swapped: bool = False) -> ir.Model:
    """silu(gate) * up, with SiLU as Swish or as Sigmoid and Mul."""
    s = Snippet()
    gate, up = s.input("gate", "T", WIDTH), s.input("up", "T", WIDTH)
    if swish:
        activation = s.node("Swish", "activation", [gate], "T", WIDTH)
    else:
        sigmoid = s.node("Sigmoid", "sigmoid", [gate], "T", WIDTH)
        factors = [sigmoid, gate] if swapped else [gate, sigmoid]
        activation = s.node("Mul", "activation", factors, "T", WIDTH)
    return s.output(s.node("Mul", "gated", [activation, up], "T", WIDTH))


FORMS = [{}, {"swapped": True}, {"swish": True}]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_silu_becomes_one_quick_gelu(form: dict[str, bool]) -> None:
    model = _swiglu(**form)
    assert FuseGatedActivation()(model).modified
    assert model_to_text(model) == AFTER


@pytest.mark.parametrize("form", FORMS)
def test_outputs_are_equal_to_the_last_bit(form: dict[str, bool]) -> None:
    model = _swiglu(**form)
    feeds = {"gate": 4 * random(7, WIDTH), "up": random(7, WIDTH, seed=1)}
    before = run(model, **feeds)
    FuseGatedActivation()(model)
    np.testing.assert_array_equal(run(model, **feeds)[0], before[0])


@each_case("rows", [1, 2, 3, 5, 8, 33])
def test_a_row_does_not_depend_on_the_other_rows(rows: int) -> None:
    model = _swiglu()
    FuseGatedActivation()(model)
    gate, up = 4 * random(rows, WIDTH), random(rows, WIDTH, seed=1)
    alone = [run(model, gate=gate[row : row + 1], up=up[row : row + 1])[0] for row in range(rows)]
    np.testing.assert_array_equal(run(model, gate=gate, up=up)[0], np.concatenate(alone))


def test_a_second_run_changes_nothing() -> None:
    model = _swiglu()
    FuseGatedActivation()(model)
    assert not FuseGatedActivation(strict=True)(model).modified
    assert model_to_text(model) == AFTER


def test_geglu_is_unchanged() -> None:
    s = Snippet()
    gate, up = s.input("gate", "T", WIDTH), s.input("up", "T", WIDTH)
    activation = s.node("Gelu", "activation", [gate], "T", WIDTH, approximate="tanh")
    model = s.output(s.node("Mul", "gated", [activation, up], "T", WIDTH))
    assert not FuseGatedActivation(strict=True)(model).modified
    assert op_types(model) == ["Gelu", "Mul"]


def test_a_sigmoid_with_a_second_reader_is_refused_by_name() -> None:
    s = Snippet()
    gate, up = s.input("gate", "T", WIDTH), s.input("up", "T", WIDTH)
    sigmoid = s.node("Sigmoid", "sigmoid", [gate], "T", WIDTH)
    activation = s.node("Mul", "activation", [gate, sigmoid], "T", WIDTH)
    model = s.output(
        s.node("Mul", "gated", [activation, up], "T", WIDTH), s.node("Neg", "other", [sigmoid], "T", WIDTH)
    )
    assert not FuseGatedActivation()(model).modified
    with pytest.raises(PassError, match="node 'sigmoid' is a sigmoid that several nodes read"):
        FuseGatedActivation(strict=True)(model)


def test_a_swish_of_another_alpha_is_refused() -> None:
    s = Snippet()
    gate, up = s.input("gate", "T", WIDTH), s.input("up", "T", WIDTH)
    activation = s.node("Swish", "activation", [gate], "T", WIDTH, alpha=1.5)
    model = s.output(s.node("Mul", "gated", [activation, up], "T", WIDTH))
    with pytest.raises(PassError, match="node 'activation' is a Swish with an alpha other than 1"):
        FuseGatedActivation(strict=True)(model)


def test_an_activation_that_gates_nothing_is_refused() -> None:
    s = Snippet()
    model = s.output(s.node("Swish", "activation", [s.input("gate", "T", WIDTH)], "T", WIDTH))
    with pytest.raises(PassError, match="node 'activation' gates nothing: its result is not read by one Mul alone"):
        FuseGatedActivation(strict=True)(model)
