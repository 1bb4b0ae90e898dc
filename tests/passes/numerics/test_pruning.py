"""Pruning of one layer: zeros are where the scores are smallest, kept columns are the least squares fit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.passes.numerics.gptq_rounding import damped_gram
from ingot.passes.numerics.pruning import Sparsity, keep_columns, sparse_gpt, wanda

RANDOM = np.random.default_rng(3)


def inputs(columns: int, rank: int, tokens: int = 400) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Inputs whose channels depend on one another."""
    return RANDOM.standard_normal((tokens, rank)) @ RANDOM.standard_normal((rank, columns))


def test_columns_that_others_express_are_dropped_without_loss() -> None:
    x, weight = inputs(24, rank=10), RANDOM.standard_normal((7, 24))
    kept = keep_columns(weight, x.T @ x, 1, 10, refit=True, damping=1e-9)
    assert kept.output_error < 1e-3
    np.testing.assert_allclose(x[:, kept.columns] @ kept.weight.T, x @ weight.T, rtol=1e-2, atol=1e-2)


@given(seed=st.integers(0, 50), keep=st.integers(1, 11), unit=st.sampled_from([1, 2, 3]))
def test_units_stay_whole_and_the_error_is_that_of_the_outputs(seed: int, keep: int, unit: int) -> None:
    random = np.random.default_rng(seed)
    x, weight = (
        random.standard_normal((64, 12 * unit)) * random.uniform(0.1, 3, 12 * unit),
        random.standard_normal((5, 12 * unit)),
    )
    gram = x.T @ x
    plain, fitted = (keep_columns(weight, gram, unit, keep, refit=refit, damping=0.001) for refit in (False, True))
    for kept in (plain, fitted):
        assert len(kept.units) == keep
        assert kept.weight.shape == (5, keep * unit)
        np.testing.assert_array_equal(kept.columns.reshape(-1, unit)[:, 0], kept.units * unit)
        measured = np.linalg.norm(x @ weight.T - x[:, kept.columns] @ kept.weight.T) / np.linalg.norm(x @ weight.T)
        np.testing.assert_allclose(kept.output_error, measured, rtol=1e-4)
    np.testing.assert_array_equal(plain.weight, weight[:, plain.columns].astype(np.float32))


def test_the_fit_is_the_least_squares_solution() -> None:
    x, weight = inputs(9, rank=9), RANDOM.standard_normal((4, 9))
    kept = keep_columns(weight, x.T @ x, 1, 5, refit=True, damping=1e-12)
    expected = np.linalg.lstsq(x[:, kept.columns], x @ weight.T, rcond=None)[0].T
    np.testing.assert_allclose(kept.weight, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("gram", [np.zeros((4, 4)), np.full((4, 4), np.nan)])
def test_inputs_of_zero_or_nan_are_refused(gram: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> None:
    with pytest.raises(ValueError, match="zero on all of the calibration data, or not finite"):
        keep_columns(np.ones((2, 4)), gram, 1, 2, refit=True, damping=0.01)


@given(seed=st.integers(0, 50), share=st.sampled_from([0.25, 0.5, 0.75]))
def test_masks_are_where_the_scores_are_smallest(seed: int, share: float) -> None:
    random = np.random.default_rng(seed)
    weight, x = random.standard_normal((6, 16)).astype(np.float32), random.standard_normal((40, 16))
    norms = np.linalg.norm(x, axis=0).astype(np.float32)
    result = wanda(weight, norms, Sparsity(share))
    scores = np.abs(weight) * norms
    for row in range(6):
        gone = result[row] == 0
        assert gone.sum() == round(share * 16)
        assert scores[row][gone].max() <= scores[row][~gone].min()


def test_sparsegpt_changes_no_weight_where_inputs_are_independent() -> None:
    weight = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    result = sparse_gpt(weight, damped_gram(np.eye(8), 1e-6, act_order=False), Sparsity(0.5))
    np.testing.assert_allclose(result[result != 0], weight[result != 0], rtol=1e-5)
    assert np.abs(weight[result == 0]).max() <= np.abs(weight[result != 0]).min()
