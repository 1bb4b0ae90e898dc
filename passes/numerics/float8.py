"""Round-to-nearest quantization of a weight matrix to float8_e4m3fn.

A row [in], or the whole weight, shares one scale s; the codes are round(w / s), ties to even, saturating at 448. Plain
rounding takes s = max|w| / 448; the search tries smaller ones, as for integers (rounding.py).

Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433: e4m3fn has 3 bits of mantissa, no infinities, and
448 as its largest number.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ingot.passes.numerics.arrays import Float32Array

LARGEST = np.float32(448)

_SHRINK_FACTORS = tuple(np.float32(1.0 - 0.05 * step) for step in range(11))
_ZERO_BELOW = np.float32(1e-30)


@dataclass(frozen=True)
class Float8Weight:
    """codes [out, in] float8_e4m3fn; scale [out] float32; sums over all elements in float64."""

    codes: NDArray[Any]
    scale: Float32Array
    squared_error: float
    squared_norm: float
    clipped_share: float

    @property
    def relative_error(self) -> float:
        """||W - W'|| / ||W||, Frobenius norms; 0 for a zero weight."""
        return (self.squared_error / self.squared_norm) ** 0.5 if self.squared_norm else 0.0


def to_float8(values: Float32Array) -> NDArray[Any]:
    """Round to the nearest float8_e4m3fn, ties to even, saturating at 448."""
    return np.clip(values, -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn)


def round_float8(weight: Float32Array, *, per_tensor: bool, clip: bool) -> Float8Weight:
    """Quantize weight [out, in]; `clip` searches the scale.

    Raises ValueError without the weight's name when a value is NaN or infinite.
    """
    peak = np.abs(weight).max(axis=None if per_tensor else 1, keepdims=True)  # [1, 1] or [out, 1]
    if not np.isfinite(peak).all():
        raise ValueError("NaN or infinite")
    peak = np.where(peak < _ZERO_BELOW, LARGEST, peak)
    best, factor = np.full(peak.shape, np.inf), np.ones_like(peak)
    for trial in _SHRINK_FACTORS if clip else _SHRINK_FACTORS[:1]:
        error = _squared_error(weight, peak * trial / LARGEST, per_tensor)
        better = error < best
        best, factor = np.where(better, error, best), np.where(better, trial, factor)
    scale: Float32Array = (peak * factor / LARGEST).astype(np.float32)
    return Float8Weight(
        codes=to_float8(weight / scale),
        scale=np.ascontiguousarray(np.broadcast_to(scale[:, 0], len(weight))),
        squared_error=float(best.sum()),
        squared_norm=float(np.square(weight, dtype=np.float64).sum()),
        clipped_share=float((factor < 1).mean()),
    )


def _squared_error(weight: Float32Array, scale: Float32Array, per_tensor: bool) -> NDArray[np.float64]:
    error = weight - to_float8(weight / scale).astype(np.float32) * scale
    total: NDArray[np.float64] = np.square(error, dtype=np.float64).sum(axis=None if per_tensor else 1, keepdims=True)
    return total
