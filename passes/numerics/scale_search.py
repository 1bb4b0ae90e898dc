"""Scales and zero points of blocks: from the largest value, or by search for the smallest squared error.

Blocks come in units of their largest magnitude, so that no square over- or underflows; `axis` runs along a block's
elements, and what there is one of per block keeps that axis at length 1.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
WeightBits = Literal[2, 3, 4, 8]

_SHRINK_FACTORS = tuple(1.0 - 0.05 * step for step in range(11))  # 1.0 (no clip) down to 0.5
_NO_CLIP = (1.0,)


@dataclass(frozen=True)
class Scheme:
    """How one weight is quantized. block_size 0: per channel. Symmetric: signed codes, no zero point."""

    bits: WeightBits
    block_size: int
    symmetric: bool
    clip: bool = True

    @property
    def code_range(self) -> tuple[int, int]:
        """Smallest and largest code: -8..7 or 0..15 with 4 bits, and so on."""
        levels = 1 << self.bits
        return (-levels // 2, levels // 2 - 1) if self.symmetric else (0, levels - 1)

    def block_columns(self, columns: int) -> int:
        """Columns that share a scale in a row of that many."""
        return self.block_size or columns

    def num_blocks(self, columns: int) -> int:
        """Scales of a row; the last block may be partial."""
        return -(-columns // self.block_columns(columns))


@dataclass
class Fit:
    """Per block: step in units of the block's peak, code bounds less the zero point, squared error in peak^2."""

    step: FloatArray
    low: FloatArray
    high: FloatArray
    error: FloatArray


def unclipped(values: FloatArray, axis: int, scheme: Scheme) -> Fit:
    """The fit whose largest code is the block's largest value; error is not yet known."""
    return _shrunk(*_extremes(values, axis, scheme), np.float32(1), scheme)


def _extremes(values: FloatArray, axis: int, scheme: Scheme) -> tuple[FloatArray, FloatArray]:
    """Smallest and largest value to be represented; zero always lies between them. Zero blocks get [0, 1]."""
    if scheme.symmetric:
        ones = np.ones_like(values.max(axis, keepdims=True))  # values are in units of the block's peak
        return -ones, ones
    lowest = np.minimum(values.min(axis, keepdims=True), np.float32(0))
    highest = np.maximum(values.max(axis, keepdims=True), np.float32(0))
    return lowest, np.where(lowest == highest, np.float32(1), highest)


def _shrunk(lowest: FloatArray, highest: FloatArray, factor: np.float32, scheme: Scheme) -> Fit:
    """The fit that represents `factor` times the range."""
    first, last = scheme.code_range
    error = np.full_like(lowest, np.inf)
    if scheme.symmetric:
        step = highest * factor / np.float32(last)
        return Fit(step, np.full_like(step, first), np.full_like(step, last), error)
    step = (highest - lowest) * factor / np.float32(last)
    zero_point = np.rint(-lowest * factor / step)
    return Fit(step, -zero_point, last - zero_point, error)


def best_fit(values: FloatArray, axis: int, scheme: Scheme) -> Fit:
    """Search the shrink factors; then refit the scale to the codes by least squares and keep it where it is better."""
    lowest, highest = _extremes(values, axis, scheme)
    best = _shrunk(lowest, highest, np.float32(1), scheme)
    for factor in _SHRINK_FACTORS if scheme.clip else _NO_CLIP:
        trial = _shrunk(lowest, highest, np.float32(factor), scheme)
        trial.error, _ = _measure(values, axis, trial)
        _keep_better(best, trial)
    if scheme.clip:
        _keep_better(best, _refitted(values, axis, best))
    return best


def _refitted(values: FloatArray, axis: int, fit: Fit) -> Fit:
    """argmin over s of sum (w - code * s)^2 for the codes of `fit`, with codes then rounded again."""
    _, codes = _measure(values, axis, fit)
    weight = np.square(codes).sum(axis, keepdims=True)
    step = (codes * values).sum(axis, keepdims=True) / np.where(weight == 0, np.float32(1), weight)
    refit = Fit(np.where(step > 0, step, fit.step), fit.low, fit.high, fit.error)
    refit.error, _ = _measure(values, axis, refit)
    return refit


def _measure(values: FloatArray, axis: int, fit: Fit) -> tuple[FloatArray, FloatArray]:
    """Squared error of each block under a fit, and the codes less their zero point, as float32."""
    exact = values / fit.step
    codes = np.rint(exact)
    np.maximum(codes, fit.low, out=codes)
    np.minimum(codes, fit.high, out=codes)
    np.subtract(exact, codes, out=exact)
    np.square(exact, out=exact)
    return exact.sum(axis, keepdims=True) * np.square(fit.step), codes


def _keep_better(best: Fit, trial: Fit) -> None:
    """Take over the blocks where the trial's error is strictly smaller."""
    better = trial.error < best.error
    for field in ("step", "low", "high", "error"):
        np.copyto(getattr(best, field), getattr(trial, field), where=better)
