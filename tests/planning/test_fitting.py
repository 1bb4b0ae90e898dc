"""Factors are non-negative, fit relative errors, and come with an interval that its own data bear out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import UsageError
from ingot.planning.fitting import MeasuredStep, fit_factors, fit_steps, non_negative_least_squares, student_quantile
from ingot.planning.load import Load
from ingot.planning.serving_rows import TERMS


def test_known_factors_are_found_again() -> None:
    random = np.random.default_rng(1)
    columns = random.uniform(0.1, 1, (20, 4)) * [1, 100, 1e-6, 10]
    wanted = np.array([0.5, 0.001, 3e4, 0.0])
    fit = fit_factors(columns, columns @ wanted)
    assert fit.factors == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    assert fit.relative_error == pytest.approx(0, abs=1e-6)


@given(st.integers(0, 2**32 - 1))
def test_no_factor_is_negative_and_none_could_be_better(seed: int) -> None:
    random = np.random.default_rng(seed)
    matrix, target = random.normal(size=(12, 5)), random.normal(size=12)
    x = non_negative_least_squares(matrix, target)
    gradient = matrix.T @ (target - matrix @ x)
    assert (x >= 0).all()
    assert (gradient <= 1e-6).all()
    assert gradient[x > 0] == pytest.approx(0, abs=1e-6)


def test_a_fit_of_noisy_steps_predicts_others_inside_its_interval() -> None:
    random = np.random.default_rng(3)
    loads = [Load(c, i, o) for c in (1, 8, 64) for i in (256, 2048) for o in (64, 512)]
    seconds = [0.01 + 1e-4 * load.concurrency + 1e-8 * load.average_step().context_tokens for load in loads]
    noisy = [s * random.uniform(0.97, 1.03) for s in seconds]
    measured = [MeasuredStep(load.average_step(), s) for load, s in zip(loads, noisy, strict=True)]
    model = fit_steps(TERMS, measured, "a test")
    low, high = model.interval(Load(32, 512, 128).decode_step())
    assert low < 0.01 + 32e-4 + 1e-8 * 32 * 576 < high
    assert 0.01 < model.relative_error < 0.15


def test_too_few_steps_and_times_of_zero_are_refused() -> None:
    with pytest.raises(UsageError, match="2 measured steps; a step model is fitted to at least 3"):
        fit_factors(np.ones((2, 1)), np.ones(2))
    with pytest.raises(UsageError, match="must be finite and above 0"):
        fit_factors(np.ones((3, 1)), np.array([1.0, 0.0, 1.0]))


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (3, 3.182), (5, 2.571), (10, 2.228), (100, 1.984)])
def test_quantiles_of_students_t(freedom: int, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, rel=0.01)
