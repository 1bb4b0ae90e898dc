"""The range of a static activation scale, from calibration data.

absmax        the largest |x| of all calibration tokens: nothing is cut off
percentile    that percentile of |x| over a sample of tokens: what lies above saturates
mse           the range, at most absmax, whose rounding has the smallest squared error on the sample
"""

from typing import Literal

import numpy as np

from ingot.passes.calibration import Float32Array
from ingot.passes.quantization.activation_quantization import LARGEST, ActivationScheme, Kind, qdq

RangeMethod = Literal["absmax", "percentile", "mse"]
SAMPLE_ROWS = 2048
_SHRINK_FACTORS = tuple(1.0 - 0.025 * step for step in range(37))  # 1.0 down to 0.1


def static_scheme(kind: Kind, method: RangeMethod, peak: float, percentile: float, x: Float32Array) -> ActivationScheme:
    """The scheme for inputs with that largest |x|, of which `x` [rows, in] is a sample; `peak` is above 0."""
    if method == "mse":
        trials = [_scheme(kind, peak * factor) for factor in _SHRINK_FACTORS]
        return min(trials, key=lambda trial: squared_error(x, trial))
    inside = peak if method == "absmax" else float(np.quantile(np.abs(x), percentile / 100))
    return _scheme(kind, min(inside or peak, peak))


def squared_error(x: Float32Array, scheme: ActivationScheme) -> float:
    """Sum of (x - x')^2 over x [rows, in]."""
    return float(np.square(x - qdq(x, scheme), dtype=np.float64).sum())


def _scheme(kind: Kind, largest: float) -> ActivationScheme:
    return ActivationScheme(kind, float(np.float32(largest / LARGEST[kind])))
