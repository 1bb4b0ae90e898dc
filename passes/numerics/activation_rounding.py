"""Rounding of activations to 8 bits: schemes, ranges of static scales, outlier channels.

Static ranges, from calibration data:

    absmax        the largest |x| of all calibration tokens: nothing is cut off
    percentile    that percentile of |x| over a sample of tokens: larger values saturate
    mse           the range, at most absmax, whose rounding has the smallest squared error on the sample

A few channels with large values would set the scale for all others. Outlier channels keep their precision, and without
them the rest is rounded finely (Dettmers et al., LLM.int8, arXiv:2208.07339).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ingot.passes.numerics.arrays import Float32Array, Float64Array
from ingot.passes.numerics.float8 import to_float8

Kind = Literal["int", "float"]
RangeMethod = Literal["absmax", "percentile", "mse"]
Channels = NDArray[np.int64]

LEAST_PEAK = np.float32(1e-30)  # a row whose every value is smaller is zero; keeps its scale a normal number
LARGEST: dict[Kind, float] = {"int": 127.0, "float": 448.0}

_SHRINK_FACTORS = tuple(1.0 - 0.025 * step for step in range(37))  # 1.0 down to 0.1


@dataclass(frozen=True)
class ActivationScheme:
    """Quantization of activations. scale: that of a static scheme; None when every token has its own."""

    kind: Kind = "int"
    scale: float | None = None

    @property
    def dynamic(self) -> bool:
        """Whether scales are computed per token."""
        return self.scale is None

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8

    @property
    def facts(self) -> dict[str, object]:
        """The scheme as metadata and statistics hold it."""
        strategy = "token" if self.dynamic else "tensor"
        facts: dict[str, object] = {"bits": self.bits, "kind": self.kind, "dynamic": self.dynamic, "strategy": strategy}
        return facts if self.scale is None else facts | {"scale": self.scale}


def round_activations(x: Float32Array, scheme: ActivationScheme) -> Float32Array:
    """x' of x [rows, in], whose values must be finite: the bits that the nodes of activation_nodes.py compute."""
    largest = np.float32(LARGEST[scheme.kind])
    peak = np.maximum(np.abs(x).max(axis=1, keepdims=True), LEAST_PEAK)
    scale = peak / largest if scheme.scale is None else np.float32(scheme.scale)
    codes = x / scale
    if scheme.kind == "int":
        return np.clip(np.rint(codes), -128, 127) * scale
    return to_float8(codes).astype(np.float32) * scale


def static_scheme(kind: Kind, method: RangeMethod, peak: float, percentile: float, x: Float32Array) -> ActivationScheme:
    """Find the static scale of inputs whose largest |x| is `peak`, above 0; `x` [rows, in] is a sample of them."""
    if method == "mse":
        trials = [_scheme(kind, peak * factor) for factor in _SHRINK_FACTORS]
        return min(trials, key=lambda trial: _squared_error(x, trial))
    inside = peak if method == "absmax" else float(np.quantile(np.abs(x), percentile / 100))
    return _scheme(kind, min(inside or peak, peak))


def outlier_channels(peaks: Float64Array, outliers: float, threshold: float) -> Channels:
    """Select the channels that keep their precision, ascending, by the largest |x| of each [in].

    outliers     at most this number of channels from 1 up, or this share of them below 1; 0: all above the threshold
    threshold    select only channels whose |x| exceeds it; 0: no threshold. With both 0, nothing is selected
    """
    count = int(outliers) if outliers >= 1 else round(outliers * len(peaks))
    if outliers == 0:
        count = len(peaks) if threshold else 0
    # At least one channel is rounded.
    largest = np.argsort(-peaks, kind="stable")[: min(count, len(peaks) - 1)]
    return np.sort(largest[peaks[largest] > threshold]).astype(np.int64)


def _squared_error(x: Float32Array, scheme: ActivationScheme) -> float:
    """Sum of (x - x')^2 over x [rows, in]."""
    return float(np.square(x - round_activations(x, scheme), dtype=np.float64).sum())


def _scheme(kind: Kind, largest: float) -> ActivationScheme:
    return ActivationScheme(kind, float(np.float32(largest / LARGEST[kind])))
