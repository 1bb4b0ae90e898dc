"""fold-constants: IR before and after, equal bits, refusals."""

import logging
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import UsageError
from ingot.passes.fusion.fold_constants import FoldConstants
from ingot.passes.printing import model_to_text
from tests.passes.snippets import FLOAT, Snippet, op_types, random, run

AFTER = """\
input  x: FLOAT[T,8]
weight norm.one_plus: FLOAT[8]
%norm = RMSNormalization(%x, %norm.one_plus) {axis=-1, epsilon=1e-06}  # norm, FLOAT[T,8]
output norm: FLOAT[T,8]
"""


def _gemma_norm(weight: Any) -> ir.Model:
    """RMSNormalization(x, 1 + float32(weight)) with a 16-bit weight [8]."""
    s = Snippet()
    x = s.input("x", "T", 8)
    cast = s.node("Cast", "norm.weight.float32", [s.weight("norm.weight", weight)], 8, to=FLOAT)
    one_plus = s.node("Add", "norm.one_plus", [cast, s.weight("one", np.array(1, np.float32))], 8)
    return s.output(s.node("RMSNormalization", "norm", [x, one_plus], "T", 8, axis=-1, epsilon=1e-6))


def test_one_plus_weight_becomes_one_constant() -> None:
    model = _gemma_norm(np.full(8, 0.5, np.float16))
    assert FoldConstants()(model).modified
    assert model_to_text(model) == AFTER


def test_outputs_are_equal_to_the_last_bit() -> None:
    model, x = _gemma_norm(random(8, dtype=np.float16)), random(5, 8, seed=1)
    before = run(model, x=x)
    FoldConstants()(model)
    assert op_types(model) == ["RMSNormalization"]
    np.testing.assert_array_equal(run(model, x=x)[0], before[0])


def test_a_second_run_changes_nothing() -> None:
    model = _gemma_norm(random(8, dtype=np.float16))
    FoldConstants()(model)
    text = model_to_text(model)
    assert not FoldConstants()(model).modified
    assert model_to_text(model) == text


@pytest.mark.parametrize(
    ("op_type", "left", "right"),
    [(op, 7.0, 3.0) for op in ("Add", "Sub", "Mul", "Div")],
)
def test_scalar_arithmetic_equals_the_engine_s(op_type: str, left: float, right: float) -> None:
    s = Snippet()
    operands = [s.weight("a", np.array(left, np.float32)), s.weight("b", np.array(right, np.float32))]
    scalar = s.node(op_type, "scalar", operands)
    model, x = s.output(s.node("Mul", "y", [s.input("x", "T", 4), scalar], "T", 4)), random(3, 4)
    before = run(model, x=x)
    FoldConstants()(model)
    assert op_types(model) == ["Mul"]
    np.testing.assert_array_equal(run(model, x=x)[0], before[0])


@pytest.mark.parametrize(("left", "right", "quotient"), [(7, 2, 3), (-7, 2, -3), (7, -2, -3), (-8, 2, -4)])
def test_integers_are_divided_towards_zero(left: int, right: int, quotient: int) -> None:
    s = Snippet()
    operands = [s.weight("a", np.array([left], np.int64)), s.weight("b", np.array([right], np.int64))]
    width = s.node("Div", "width", operands, 1, dtype=ir.DataType.INT64)
    s.output(s.node("Unsqueeze", "y", [s.input("x", "T", 4), width], "T", 4))
    FoldConstants()(s.model)
    tensor = s.graph.initializers["width"].const_value
    assert tensor is not None
    assert tensor.numpy().tolist() == [quotient]


def test_the_matrix_of_a_matmul_stays_in_the_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    s = Snippet()
    cast = s.node("Cast", "w.float32", [s.weight("w", random(4, 8, dtype=np.float16))], 4, 8, to=FLOAT)
    model = s.output(s.node("Gemm", "proj", [s.input("x", "T", 8), cast], "T", 4, transB=1))
    caplog.set_level(logging.INFO, "ingot.passes")
    assert not FoldConstants()(model).modified
    assert op_types(model) == ["Cast", "Gemm"]
    expected = "node 'w.float32' makes the matrix of a matmul or embedding, which stays in the checkpoint"
    assert f"fold-constants: left alone: {expected}" in caplog.messages


def test_a_result_above_the_limit_stays_a_node(caplog: pytest.LogCaptureFixture) -> None:
    model = _gemma_norm(random(8, dtype=np.float16))
    caplog.set_level(logging.INFO, "ingot.passes")
    assert not FoldConstants(max_bytes=31)(model).modified
    assert "node 'norm.weight.float32' makes 32 bytes, more than max_bytes 31" in caplog.text


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(UsageError, match="fold-constants: max_bytes is -1; allowed: a whole number from 0 to"):
        FoldConstants(max_bytes=-1)
