"""Statistics of a weight and its codes: outliers, the range of the scales, codes at the ends of their range.

    scale_min, scale_median, scale_max    over all blocks
    scale_dtype                           the narrowest type that holds every scale
    outlier_share                         share of weights with |w| above OUTLIER_RMS times the root mean square; 6e-5
                                          for normally distributed weights
    peak_over_rms                         the largest |w| over the root mean square
    end_share                             share of codes at either end of their range

A weight far above the rms costs the other weights of its block their resolution. Codes at the ends are those that a
clip cut off, and, asymmetric, one at each end of every block.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.passes.numerics.arrays import CodeArray, Float32Array
from ingot.passes.numerics.rounding import RoundedWeight
from ingot.passes.numerics.scheme import Scheme, scale_dtype_of

OUTLIER_RMS = 4.0
_CHUNK_ELEMENTS = 1 << 20


def weight_statistics(weight: NDArray[Any], rounded: RoundedWeight, scheme: Scheme) -> dict[str, Any]:
    """All statistics of a weight [out, in] of any float dtype and of its codes."""
    low, high = scheme.code_range
    return {
        **scale_statistics(rounded.scale),
        **outliers(weight),
        "end_share": end_share(rounded.codes, low, high),
    }


def scale_statistics(scales: Float32Array) -> dict[str, Any]:
    """Smallest, median and largest of scales of any shape, and their type."""
    found = {"min": scales.min(), "median": np.median(scales), "max": scales.max()}
    return {f"scale_{name}": float(value) for name, value in found.items()} | {"scale_dtype": scale_dtype_of(scales)}


def outliers(weight: NDArray[Any]) -> dict[str, float]:
    """Share of outliers and peak over rms, computed a few rows at a time; zeros for a zero weight."""
    square = sum(float(np.einsum("ri,ri->", rows, rows, dtype=np.float64)) for rows in _float32_rows(weight))
    rms = (square / weight.size) ** 0.5
    if not rms:
        return {"outlier_share": 0.0, "peak_over_rms": 0.0}
    beyond, peak = 0, 0.0
    for rows in _float32_rows(weight):
        magnitudes = np.abs(rows)
        beyond += int(np.count_nonzero(magnitudes > OUTLIER_RMS * rms))
        peak = max(peak, float(magnitudes.max()))
    return {"outlier_share": beyond / weight.size, "peak_over_rms": peak / rms}


def end_share(codes: CodeArray, low: int, high: int) -> float:
    """Share of codes that are the lowest or the highest of their range."""
    return float(np.count_nonzero(codes == low) + np.count_nonzero(codes == high)) / codes.size


def _float32_rows(weight: NDArray[Any]) -> Iterator[Float32Array]:
    step = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    return (weight[start : start + step].astype(np.float32) for start in range(0, len(weight), step))
