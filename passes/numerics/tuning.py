"""Parameters that distill tunes by gradient: a norm's weight, and the codes and scales of a quantized weight.

Each is tuned on a scale where a step means the same everywhere: scales and norms' weights as exp(x) times their start,
codes as real numbers that are rounded where they are used, as are scales of float16. The gradient passes straight
through that rounding (Bengio et al., arXiv:1308.3432). Steps are Adam's (Kingma and Ba, arXiv:1412.6980).
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ingot.passes.numerics.arrays import CodeArray, Float32Array
from ingot.passes.numerics.scheme import ScaleDtype, to_float16

_MOMENTUM, _SPREAD, _TINY = 0.9, 0.95, 1e-12


class Tuned(Protocol):
    """A stored value that is tuned."""

    def values(self) -> Float32Array:
        """The current value, in float32."""
        ...

    def step(self, gradient: Float32Array, codes_rate: float, scales_rate: float) -> None:
        """Take one step against the gradient dL/d(values)."""
        ...


@dataclass
class TunedNorm:
    """A norm's weight [channels], as a factor of its start."""

    start: Float32Array
    log_factor: Float32Array = field(init=False)

    def __post_init__(self) -> None:
        self.log_factor = np.zeros_like(self.start)
        self._adam = _Adam.of(self.start)

    def values(self) -> Float32Array:
        """The start times the factor."""
        return self.start * np.exp(self.log_factor)

    def step(self, gradient: Float32Array, codes_rate: float, scales_rate: float) -> None:
        """Take one step of the factor."""
        self._adam.step(self.log_factor, gradient * self.values(), scales_rate)


class TunedWeight:
    """A quantized weight: its codes [out, in] less the zero point, as real numbers, and its scales [out, blocks]."""

    def __init__(
        self,
        codes: CodeArray,
        scale: Float32Array,
        zero_point: Float32Array,
        code_range: tuple[int, int],
        block_columns: int,
        *,
        tune_codes: bool,
        keep_zeros: bool,
        scale_dtype: ScaleDtype = "float32",
    ) -> None:
        low, high = code_range
        self._block, self._columns = block_columns, codes.shape[1]
        self._scale, self._zero, self._scale_dtype = scale, zero_point, scale_dtype
        self._low, self._high = np.float32(low) - zero_point, np.float32(high) - zero_point
        self._levels = codes.astype(np.float32) - self._by_column(zero_point)
        self._free: NDArray[np.bool_] | None = self._levels != 0 if keep_zeros else None
        self._log_factor = np.zeros_like(scale)
        self._codes_adam = _Adam.of(self._levels) if tune_codes else None
        self._scales_adam = _Adam.of(scale)

    @property
    def codes(self) -> Float32Array:
        """Rounded codes [out, in], zero point included, in float32."""
        return self._rounded() + self._by_column(self._zero)

    @property
    def scales(self) -> Float32Array:
        """Return the scales [out, blocks], in their stored form."""
        scales: Float32Array = self._scale * np.exp(self._log_factor)
        return scales if self._scale_dtype == "float32" else to_float16(scales)

    def values(self) -> Float32Array:
        """(code - zero point) * scale: [out, in]."""
        return self._rounded() * self._by_column(self.scales)

    def step(self, gradient: Float32Array, codes_rate: float, scales_rate: float) -> None:
        """Take one step of the scales and, where they are tuned, of the codes."""
        rounded, scales = self._rounded(), self.scales
        starts = np.arange(0, self._columns, self._block)
        by_scale = np.add.reduceat(gradient * rounded, starts, axis=1) * scales
        self._scales_adam.step(self._log_factor, by_scale, scales_rate)
        if self._codes_adam is not None:
            by_code = gradient * self._by_column(scales)
            self._codes_adam.step(self._levels, by_code if self._free is None else by_code * self._free, codes_rate)
            np.clip(self._levels, self._by_column(self._low), self._by_column(self._high), out=self._levels)

    def _rounded(self) -> Float32Array:
        rounded: Float32Array = np.rint(self._levels)
        return rounded

    def _by_column(self, by_block: Float32Array) -> Float32Array:
        """[out, blocks] -> [out, in]."""
        return np.repeat(by_block, self._block, axis=1)[:, : self._columns]


@dataclass
class _Adam:
    """The running mean and mean square of a gradient."""

    mean: Float32Array
    square: Float32Array
    steps: int = 0

    @classmethod
    def of(cls, parameter: Float32Array) -> "_Adam":
        """Start at zero, for a parameter of that shape."""
        return cls(np.zeros_like(parameter), np.zeros_like(parameter))

    def step(self, parameter: Float32Array, gradient: Float32Array, rate: float) -> None:
        """Change the parameter in place, by about `rate`."""
        self.steps += 1
        self.mean += np.float32(1 - _MOMENTUM) * (gradient - self.mean)
        self.square += np.float32(1 - _SPREAD) * (np.square(gradient) - self.square)
        size = np.sqrt(self.square / np.float32(1 - _SPREAD**self.steps)) + np.float32(_TINY)
        parameter -= np.float32(rate / (1 - _MOMENTUM**self.steps)) * self.mean / size
