"""clean-up: IR before and after, equal bits, and ops that stay."""

import numpy as np
import onnx_ir as ir

from ingot.passes.fusion.clean_up import CleanUp
from ingot.passes.printing import model_to_text
from tests.passes.snippets import FLOAT, Snippet, op_types, random, run

AFTER = """\
input  x: FLOAT[T,4]
weight w: FLOAT[4] = [1.0, 2.0, 3.0, 0.1]
%mul = Mul(%x, %w)  # mul, FLOAT[T,4]
%y = Add(%mul, %mul)  # y, FLOAT[T,4]
output y: FLOAT[T,4]
"""


def _untidy() -> ir.Model:
    """2 * x * w, with a twin, an identity, a cast to float32, a squeezed unsqueeze, a dead node and a dead weight."""
    s = Snippet()
    x, w, axes = (
        s.input("x", "T", 4),
        s.weight("w", np.array([1, 2, 3, 0.1], np.float32)),
        s.weight("axes", np.array([0], np.int64)),
    )
    s.weight("unused", random(4))
    wide = s.node("Unsqueeze", "wide", [x, axes], 1, "T", 4)
    flat = s.node("Squeeze", "flat", [wide, axes], "T", 4)
    first = s.node("Mul", "mul", [flat, w], "T", 4)
    second = s.node("Mul", "twin", [s.node("Identity", "same", [x], "T", 4), w], "T", 4)
    cast = s.node("Cast", "cast", [second], "T", 4, to=FLOAT)
    s.node("Neg", "dead", [first], "T", 4)
    return s.output(s.node("Add", "y", [first, cast], "T", 4))


def test_ops_without_effect_are_removed() -> None:
    model = _untidy()
    assert CleanUp()(model).modified
    assert model_to_text(model) == AFTER


def test_outputs_are_equal_to_the_last_bit() -> None:
    model, x = _untidy(), random(3, 4, seed=5)
    before = run(model, x=x)
    CleanUp()(model)
    np.testing.assert_array_equal(run(model, x=x)[0], before[0])


def test_a_second_run_changes_nothing() -> None:
    model = _untidy()
    CleanUp()(model)
    assert not CleanUp()(model).modified
    assert model_to_text(model) == AFTER


def test_nodes_out_of_order_are_sorted() -> None:
    s = Snippet()
    negative = s.node("Neg", "negative", [s.input("x", "T", 4)], "T", 4)
    model = s.output(s.node("Abs", "y", [negative], "T", 4))
    first = model.graph.node(0)
    model.graph.remove(first)
    model.graph.append(first)
    assert op_types(model) == ["Abs", "Neg"]
    assert CleanUp()(model).modified
    assert op_types(model) == ["Neg", "Abs"]


def test_a_cast_that_makes_an_output_stays() -> None:
    s = Snippet()
    model = s.output(s.node("Cast", "y", [s.input("x", "T", 4)], "T", 4, to=FLOAT))
    assert not CleanUp()(model).modified


def test_squeezes_over_other_axes_stay() -> None:
    s = Snippet()
    first, second = s.weight("first", np.array([0], np.int64)), s.weight("second", np.array([1], np.int64))
    wide = s.node("Unsqueeze", "wide", [s.input("x", 1, 4), first], 1, 1, 4)
    model = s.output(s.node("Neg", "y", [s.node("Squeeze", "flat", [wide, second], 1, 4)], 1, 4))
    assert not CleanUp()(model).modified


def test_equal_weights_stay_two_because_they_are_not_read() -> None:
    s = Snippet()
    x = s.input("x", "T", 4)
    left = s.node("Mul", "left", [x, s.weight("a", random(4))], "T", 4)
    right = s.node("Mul", "right", [x, s.weight("b", random(4))], "T", 4)
    model = s.output(s.node("Add", "y", [left, right], "T", 4))
    assert not CleanUp()(model).modified
