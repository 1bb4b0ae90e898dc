"""Scales of a linear layer's input channels, as AWQ and SmoothQuant choose them.

    x -> Gemm(x, W)      as      x / s -> Gemm(x / s, W * s)

Scales are centred: the geometric mean of the smallest and the largest is 1.
"""

from collections.abc import Sequence

import numpy as np

from ingot.passes.numerics.arrays import Float32Array, Float64Array

LEAST = 1e-5  # floor of max|x| and max|w| in smoothing_scale, for channels that are always zero
_LEAST_MEAN = 1e-4  # floor of mean|x| and mean|w| in awq_scale


def smoothing_scale(inputs: Float64Array, weights: Float64Array, alpha: float) -> Float32Array:
    """s = max|x|^alpha / max|w|^(1 - alpha) of each channel [in]: SmoothQuant, arXiv:2211.10438.

    inputs, weights    the largest |x| over calibration tokens and the largest |w| over all rows: [in]
    alpha              0 evens out the weights' channels, 1 the inputs'
    """
    return _centred(np.maximum(inputs, LEAST) ** alpha / np.maximum(weights, LEAST) ** (1 - alpha))


def awq_scale(inputs: Float64Array, weights: Float64Array | None, exponent: float) -> Float32Array:
    """s = mean|x|^a, or mean|x|^a / mean|w|^(1 - a) where weights are given: AWQ, arXiv:2306.00978.

    inputs     mean |x| over calibration tokens: [in]
    weights    relative_magnitudes of the layers' weights: [in]
    """
    scale = np.maximum(inputs, _LEAST_MEAN) ** exponent
    if weights is not None:
        scale = scale / np.maximum(weights, _LEAST_MEAN) ** (1 - exponent)
    return _centred(scale)


def relative_magnitudes(weights: Sequence[Float32Array], block_columns: int) -> Float64Array:
    """Mean over all rows of |w| over the largest |w| of its block: [in], for weights [out, in]."""
    parts = []
    for weight in weights:
        magnitude, columns = np.abs(weight), weight.shape[1]
        largest = np.maximum.reduceat(magnitude, np.arange(0, columns, block_columns), axis=1)
        parts.append(magnitude / np.maximum(np.repeat(largest, block_columns, axis=1)[:, :columns], 1e-30))
    mean: Float64Array = np.concatenate(parts).mean(axis=0, dtype=np.float64)
    return mean


def _centred(scale: Float64Array) -> Float32Array:
    centred: Float32Array = (scale / np.sqrt(scale.max() * scale.min())).astype(np.float32)
    return centred
