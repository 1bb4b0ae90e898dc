"""Fits the terms of a step model to measured steps: a non-negative factor for each term, by relative error.

    minimize  sum over measurements of (predicted / measured - 1)^2      with every factor at least 0

Terms are given in seconds of an ideal machine or in plain counts; a factor turns them into seconds of this engine. The
active-set algorithm is that of Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingot.errors import UsageError
from ingot.planning.step_model import StepModel, StepShape, Term, Use

FloatArray = NDArray[np.float64]
_NORMAL_QUANTILE = 1.959964
_TOLERANCE = 1e-10
_MOST_CHANGES = 30
"""Changes of the active set, for each column."""


@dataclass(frozen=True)
class MeasuredStep:
    """A step, or the average of many, and its seconds."""

    step: StepShape
    seconds: float


@dataclass(frozen=True)
class Fit:
    """Factors of the columns, and the relative error of a prediction: half the width of its 95 % interval."""

    factors: FloatArray
    relative_error: float


def fit_steps(terms: Sequence[Term], measured: Sequence[MeasuredStep], source: str) -> StepModel:
    """Scale each term so that their sum predicts the measured steps. Terms with factor 0 are left out.

    UsageError for fewer measurements than would leave one over to judge the fit by.
    """
    columns = np.array([[term.of(one.step).seconds for term in terms] for one in measured], dtype=np.float64)
    fit = fit_factors(columns, np.array([one.seconds for one in measured]))
    kept = (scaled(term, float(factor)) for term, factor in zip(terms, fit.factors, strict=True) if factor > 0)
    return StepModel(tuple(kept), source, fit.relative_error)


def scaled(term: Term, factor: float) -> Term:
    """The term with every use multiplied by the factor."""
    return Term(term.name, tuple(Use(use.resource, use.count, use.seconds * factor, use.reach) for use in term.uses))


def fit_factors(columns: FloatArray, seconds: FloatArray) -> Fit:
    """Fit `columns` [measurements, terms] to seconds [measurements], both non-negative."""
    if len(seconds) < 3:
        raise UsageError(f"{len(seconds)} measured steps; a step model is fitted to at least 3")
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise UsageError("measured seconds must be finite and above 0")
    relative = columns / seconds[:, None]
    sizes = np.linalg.norm(relative, axis=0)
    used = sizes > 0
    factors = np.zeros(columns.shape[1])
    factors[used] = non_negative_least_squares(relative[:, used] / sizes[used], np.ones(len(seconds))) / sizes[used]
    return Fit(factors, _relative_error(relative[:, factors > 0], relative @ factors - 1))


def non_negative_least_squares(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """Return x of least |matrix x - target| with x >= 0: [columns]."""
    passive = np.zeros(matrix.shape[1], dtype=bool)
    x = np.zeros(matrix.shape[1])
    for _ in range(_MOST_CHANGES * matrix.shape[1]):
        gradient = matrix.T @ (target - matrix @ x)
        if passive.all() or gradient[~passive].max() <= _TOLERANCE:
            break
        passive[np.argmax(np.where(passive, -np.inf, gradient))] = True
        x = _restored(matrix, target, passive, x)
    return x


def _restored(matrix: FloatArray, target: FloatArray, passive: NDArray[np.bool_], x: FloatArray) -> FloatArray:
    """Move from x to the least squares of the passive columns, as far as all stay positive; change `passive`."""
    while passive.any():
        best = np.zeros_like(x)
        best[passive] = np.linalg.lstsq(matrix[:, passive], target, rcond=None)[0]
        falling = passive & (best <= 0)
        if not falling.any():
            return best
        steps = x[falling] / (x[falling] - best[falling])
        x = x + steps.min() * (best - x)
        passive &= x > _TOLERANCE
        x[~passive] = 0
    return x


def _relative_error(columns: FloatArray, residuals: FloatArray) -> float:
    """Half of a 95 % interval: each residual as if its measurement had been left out, and Student's quantile."""
    leverage = np.einsum("ij,ji->i", columns, np.linalg.pinv(columns)) if columns.shape[1] else np.zeros(len(residuals))
    left_out = residuals / np.maximum(1 - leverage, 0.1)
    freedom = max(1, len(residuals) - columns.shape[1])
    return student_quantile(freedom) * float(np.sqrt(np.mean(left_out**2)))


def student_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: exact for 1 and 2 degrees of freedom, else Hill's expansion (1970)."""
    if freedom == 1:
        return 12.7062
    if freedom == 2:
        return 4.30265
    z = _NORMAL_QUANTILE
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
