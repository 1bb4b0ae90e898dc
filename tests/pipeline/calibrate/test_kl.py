"""KL divergence between logits, against its definition in float64, and its gradient against finite differences."""

import numpy as np
import pytest
from numpy.typing import NDArray

from ingot.passes.numerics.arrays import Float32Array
from ingot.pipeline.calibrate.kl import kl_of_rows, mean_kl_and_gradient

ROWS, VOCAB = 130, 33  # more rows than are computed at once


def logits(seed: int, size: float = 3.0) -> Float32Array:
    made: Float32Array = (size * np.random.default_rng(seed).standard_normal((ROWS, VOCAB))).astype(np.float32)
    return made


def by_definition(reference: Float32Array, found: Float32Array) -> NDArray[np.float64]:
    log_p, log_q = (
        rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)
        for rows in (reference.astype(np.float64), found.astype(np.float64))
    )
    result: NDArray[np.float64] = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
    return result


@pytest.mark.parametrize("change", [1.0, 1e-2, 1e-4])
def test_the_kl_of_each_row_is_that_of_its_definition_even_when_tiny(change: float) -> None:
    reference = logits(0)
    found = reference + change * logits(1, 1.0)
    np.testing.assert_allclose(kl_of_rows(reference, found), by_definition(reference, found), rtol=2e-3)


def test_equal_logits_have_no_divergence_and_a_constant_changes_nothing() -> None:
    reference = logits(0)
    assert not kl_of_rows(reference, reference).any()
    assert kl_of_rows(reference, reference + np.float32(8)).max() < 1e-6


def test_a_divergence_too_large_for_exp_is_finite() -> None:
    reference = logits(0)
    found = -200 * reference
    np.testing.assert_allclose(kl_of_rows(reference, found), by_definition(reference, found), rtol=1e-4)


def test_the_gradient_is_the_slope_of_the_mean() -> None:
    reference, found = logits(0), logits(1)
    mean, gradient = mean_kl_and_gradient(reference, found)
    assert mean == pytest.approx(by_definition(reference, found).mean(), rel=1e-5)
    way = logits(2, 0.01)
    plus, minus = (by_definition(reference, found + sign * way).mean() for sign in (1, -1))
    assert (gradient * way).sum() == pytest.approx((plus - minus) / 2, rel=1e-3)
