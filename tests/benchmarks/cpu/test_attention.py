"""The attention benchmark: every contender computes the same attention, at its precision."""

from typing import get_args

import pytest
from benchmarks.cpu.attention import Problem, Result, make_table, measure

from ingot.artifact.programs.cpu_program import Arithmetic
from ingot.runtime.cpu.native.attention import attention_backend

ERRORS = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2, "fp8": 0.1, "int8": 3e-2, "int4": 0.5, "k8v4": 0.5}


@pytest.mark.parametrize(
    "problem",
    [
        Problem("decode", 4, 2, 32, 80),
        Problem("several", 4, 2, 32, 48, sequences=3),
        Problem("prompt", 4, 2, 32, 64, tokens=9),
    ],
)
def test_contenders_agree_within_their_precision(problem: Problem) -> None:
    results = {result.contender: result for result in measure(problem, 1, 0.01, None)}
    roundings = {f"Ingot float16, in {arithmetic}" for arithmetic in get_args(Arithmetic)[1:]}
    ours = {f"Ingot {dtype}" for dtype in ERRORS} | (roundings if attention_backend() != "numpy" else set())
    assert set(results) == {*ours, "onnxruntime float32"}, attention_backend()
    for name, result in results.items():
        assert result.error <= (ERRORS["bfloat16"] if name in roundings else ERRORS[name.split()[1]]), name


def test_rates_follow_from_bytes_and_operations() -> None:
    problem = Problem("prompt", heads=4, kv_heads=2, dim=8, context=10, tokens=3)
    assert problem.operations == 4 * 4 * 8 * (8 + 9 + 10)


def test_a_row_of_the_table_is_a_contender_and_a_column_a_problem() -> None:
    rows = [Result("p", name, 2, 1.25, 1.5, 3.5, 44.4, 0.0) for name in ("a", "b")]
    assert make_table(rows).splitlines()[2:] == ["| a | 1.25 ms, 3.5, 44 |", "| b | 1.25 ms, 3.5, 44 |"]
