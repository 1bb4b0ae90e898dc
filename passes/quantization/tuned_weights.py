"""Parameters that a gradient tunes: the scales and codes of a quantized weight, and a norm's weight.

All are tuned as factors or codes, so that a step means the same everywhere: a scale and a norm's weight as exp(x) times
what they were, a code as a real number that is rounded where it is used (the gradient passes through the rounding:
Bengio et al., arXiv:1308.3432). Steps are Adam's (Kingma and Ba, arXiv:1412.6980).
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.calibration import Float32Array
from ingot.passes.quantization.quantized_tensors import code_tensor, weight_bits
from ingot.passes.quantization.scale_search import Scheme

_MOMENTUM, _SPREAD, _TINY = 0.9, 0.95, 1e-12


@dataclass
class Adam:
    """The running mean and mean square of a gradient."""

    mean: Float32Array
    square: Float32Array
    steps: int = 0

    @classmethod
    def of(cls, parameter: Float32Array) -> "Adam":
        """For a parameter of that shape."""
        return cls(np.zeros_like(parameter), np.zeros_like(parameter))

    def step(self, parameter: Float32Array, gradient: Float32Array, rate: float) -> None:
        """Change the parameter in place, by about `rate`."""
        self.steps += 1
        self.mean += np.float32(1 - _MOMENTUM) * (gradient - self.mean)
        self.square += np.float32(1 - _SPREAD) * (np.square(gradient) - self.square)
        size = np.sqrt(self.square / np.float32(1 - _SPREAD**self.steps)) + np.float32(_TINY)
        parameter -= np.float32(rate / (1 - _MOMENTUM**self.steps)) * self.mean / size


class Tuned(Protocol):
    """A stored value that is tuned."""

    def values(self) -> Float32Array:
        """What it is by now, in float32."""
        ...

    def step(self, gradient: Float32Array, codes_rate: float, scales_rate: float) -> None:
        """One step against dL/d(values)."""
        ...


@dataclass
class TunedNorm:
    """A norm's weight [channels]."""

    start: Float32Array
    log_factor: Float32Array = field(init=False)
    _adam: Adam = field(init=False)

    def __post_init__(self) -> None:
        self.log_factor = np.zeros_like(self.start)
        self._adam = Adam.of(self.start)

    def values(self) -> Float32Array:
        """The weight times the factor."""
        return self.start * np.exp(self.log_factor)

    def step(self, gradient: Float32Array, codes_rate: float, scales_rate: float) -> None:
        """One step of the factor."""
        self._adam.step(self.log_factor, gradient * self.values(), scales_rate)


@dataclass
class TunedWeight:
    """A quantized weight: its codes [out, in] less the zero point, as real numbers, and its scales [out, blocks]."""

    node: ir.Node
    tune_codes: bool
    keep_zeros: bool
    _levels: Float32Array = field(init=False)
    _scale: Float32Array = field(init=False)
    _low: Float32Array = field(init=False)
    _high: Float32Array = field(init=False)
    _log_factor: Float32Array = field(init=False)
    _free: NDArray[np.bool_] | None = field(init=False)
    _adams: tuple[Adam | None, Adam] = field(init=False)

    def __post_init__(self) -> None:
        codes, scale, *rest = (_array(value) for value in self.node.inputs if value is not None)
        self._block = self.node.attributes.get_int("block_size", 0) or codes.shape[1]
        self._scale = scale.reshape(len(codes), -1).astype(np.float32)
        zero = rest[0].reshape(self._scale.shape).astype(np.float32) if rest else np.zeros_like(self._scale)
        low, high = Scheme(self.bits, 0, not rest).code_range
        self._low, self._high = np.float32(low) - zero, np.float32(high) - zero
        self._zero = zero
        self._levels = codes.astype(np.float32) - self._wide(zero)
        self._free = self._levels != 0 if self.keep_zeros else None
        self._log_factor = np.zeros_like(self._scale)
        self._adams = (Adam.of(self._levels) if self.tune_codes else None, Adam.of(self._scale))

    @property
    def bits(self) -> Any:
        """Bits of the codes."""
        return weight_bits(self.node)

    def values(self) -> Float32Array:
        """(code - zero point) * scale: [out, in]."""
        return self._rounded() * self._wide(self._scales())

    def step(self, gradient: Float32Array, codes_rate: float, scales_rate: float) -> None:
        """One step of the scales and, where they are tuned, of the codes."""
        rounded, scales = self._rounded(), self._scales()
        starts = np.arange(0, gradient.shape[1], self._block)
        by_scale = np.add.reduceat(gradient * rounded, starts, axis=1) * scales
        codes_adam, scales_adam = self._adams
        scales_adam.step(self._log_factor, by_scale, scales_rate)
        if codes_adam is not None:
            by_code = gradient * self._wide(scales)
            codes_adam.step(self._levels, by_code if self._free is None else by_code * self._free, codes_rate)
            np.clip(self._levels, self._wide(self._low), self._wide(self._high), out=self._levels)

    def write(self) -> float:
        """Put what was found into the IR; the share of codes that are others than before."""
        codes, scale = (value for value in self.node.inputs[:2] if value is not None)
        before, stored_scale = _array(codes), _array(scale)
        after = (self._rounded() + self._wide(self._zero)).astype(before.dtype)
        codes.const_value = code_tensor(after, self.bits, codes.name or "")
        scale.const_value = ir.Tensor(self._scales().reshape(stored_scale.shape), name=scale.name)
        return float(np.mean(after != before))

    def _rounded(self) -> Float32Array:
        rounded: Float32Array = np.rint(self._levels)
        return rounded

    def _scales(self) -> Float32Array:
        scales: Float32Array = self._scale * np.exp(self._log_factor)
        return scales

    def _wide(self, by_block: Float32Array) -> Float32Array:
        """[out, blocks] -> [out, in]."""
        return np.repeat(by_block, self._block, axis=1)[:, : self._columns]

    @property
    def _columns(self) -> int:
        codes = self.node.inputs[0]
        assert codes is not None
        assert codes.shape is not None
        return int(codes.shape.numpy()[1])


def _array(value: ir.Value) -> NDArray[Any]:
    """Stored numbers; 4-bit codes as int8 or uint8."""
    assert value.const_value is not None
    array = value.const_value.numpy()
    if value.dtype in (ir.DataType.INT4, ir.DataType.INT8):
        return array.astype(np.int8)
    return array.astype(np.uint8) if value.dtype in (ir.DataType.UINT4, ir.DataType.UINT8) else array
