"""Round-to-nearest quantization of a weight matrix with an error-minimising clip, in numpy alone.

A row [in] is cut into blocks of `block_size` columns (the last may be shorter; per channel: one block), and a block
shares one scale s and, when asymmetric, one zero point z:

    code = clip(round(w / s) + z, low, high)        w' = (code - z) * s

Plain round-to-nearest takes s from the block's largest value. The clip tries smaller s, which cut off the extremes and
round everything else more finely, and keeps the one with the smallest sum of (w - w')^2; a closing least-squares step
then fits s to the codes found. (Clip search: OmniQuant, arXiv:2308.13137, section 3.2, here by grid, without data.)

Only elementwise IEEE operations and sums in a fixed order are used: threads and machine do not change a code.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
CodeArray = NDArray[np.integer[Any]]  # int8 or uint8

_CHUNK_ELEMENTS = 1 << 16  # what a chunk's temporaries need stays in the L2 cache
_SHRINK_FACTORS = tuple(1.0 - 0.05 * step for step in range(11))  # 1.0 (no clip) down to 0.5
_NO_CLIP = (1.0,)
_ZERO_BELOW = 1e-30  # a block whose every weight is smaller is zero: its scale would leave float32's normal range


@dataclass(frozen=True)
class Scheme:
    """How one weight is quantized. block_size 0: per channel. Symmetric: signed codes, no zero point."""

    bits: Literal[4, 8]
    block_size: int
    symmetric: bool
    clip: bool = True

    @property
    def code_range(self) -> tuple[int, int]:
        """Smallest and largest code: -8..7, 0..15, -128..127 or 0..255."""
        levels = 1 << self.bits
        return (-levels // 2, levels // 2 - 1) if self.symmetric else (0, levels - 1)

    def block_columns(self, columns: int) -> int:
        """Columns that share a scale in a row of that many."""
        return self.block_size or columns

    def num_blocks(self, columns: int) -> int:
        """Scales of a row; the last block may be partial."""
        return -(-columns // self.block_columns(columns))


@dataclass(frozen=True)
class RoundedWeight:
    """A quantized [out, in] weight.

    codes [out, in] int8 | uint8; scale [out, blocks] float32; zero_point [out, blocks] as codes, None when symmetric.
    The sums are over all elements, in float64; clipped_share is the share of blocks whose scale was shrunk.
    """

    codes: CodeArray
    scale: FloatArray
    zero_point: CodeArray | None
    squared_error: float
    squared_norm: float
    clipped_share: float

    @property
    def relative_error(self) -> float:
        """||W - W'|| / ||W||, Frobenius norms; 0 for a zero weight."""
        return (self.squared_error / self.squared_norm) ** 0.5 if self.squared_norm else 0.0

    @property
    def mean_squared_error(self) -> float:
        """Mean of (w - w')^2."""
        return self.squared_error / self.codes.size


def round_weight(weight: NDArray[Any], scheme: Scheme, num_threads: int = 1) -> RoundedWeight:
    """Quantize weight [out, in] of any float dtype; memory beyond the result stays at a few chunks.

    Raises ValueError when a value is NaN or infinite; the caller knows the weight's name.
    """
    rows, columns = weight.shape
    blocks = scheme.num_blocks(columns)
    code_type = np.int8 if scheme.symmetric else np.uint8
    codes = np.empty((rows, columns), code_type)
    scale = np.empty((rows, blocks), np.float32)
    zero_point = None if scheme.symmetric else np.empty((rows, blocks), np.uint8)

    def round_rows(chunk: slice) -> tuple[float, float, int]:
        found = _round_chunk(weight[chunk].astype(np.float32), scheme)
        codes[chunk], scale[chunk] = found.codes, found.scale
        if zero_point is not None:
            zero_point[chunk] = found.zero_point
        return found.squared_error, found.squared_norm, found.clipped_blocks

    with ThreadPoolExecutor(num_threads) as pool:
        sums = list(pool.map(round_rows, _chunks(rows, blocks * scheme.block_columns(columns))))
    error, norm, clipped = (sum(column) for column in zip(*sums, strict=True))
    return RoundedWeight(codes, scale, zero_point, error, norm, clipped / (rows * blocks))


def dequantize(codes: CodeArray, scale: FloatArray, zero_point: CodeArray | None, block_columns: int) -> FloatArray:
    """(codes - zero_point) * scale as ONNX DequantizeLinear defines it: [out, in] float32."""
    columns = codes.shape[1]
    shifted = codes.astype(np.float32)  # [out, in]
    if zero_point is not None:
        shifted -= np.repeat(zero_point.astype(np.float32), block_columns, axis=1)[:, :columns]
    shifted *= np.repeat(scale, block_columns, axis=1)[:, :columns]
    return shifted


@dataclass(frozen=True)
class _Chunk:
    codes: NDArray[Any]
    scale: FloatArray
    zero_point: NDArray[Any]
    squared_error: float
    squared_norm: float
    clipped_blocks: int


@dataclass
class _Fit:
    """Per block, with the axis of its elements kept at length 1: step in units of the block's peak, code bounds less
    the zero point, squared error in units of peak^2."""

    step: FloatArray
    low: FloatArray
    high: FloatArray
    error: FloatArray


def _chunks(rows: int, padded_columns: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // padded_columns)
    return (slice(start, start + step) for start in range(0, rows, step))


def _round_chunk(weight: FloatArray, scheme: Scheme) -> _Chunk:
    """Quantize a few rows [r, in] at once."""
    rows, columns = weight.shape
    axis, values = _in_blocks(weight, scheme)
    peak = np.abs(values).max(axis, keepdims=True)
    if not np.isfinite(peak).all():
        raise ValueError("NaN or infinite")
    is_zero = peak < _ZERO_BELOW
    values = np.where(is_zero, np.float32(0), values / np.where(is_zero, np.float32(1), peak))
    fit = _best_fit(values, axis, scheme)
    codes = np.clip(np.rint(values / fit.step), fit.low, fit.high)
    peak = np.where(is_zero, np.float32(1), peak)
    first = scheme.code_range[0]
    zero_point = first - fit.low
    size = peak.astype(np.float64) ** 2
    return _Chunk(
        codes=_in_rows(codes + zero_point, axis, rows)[:, :columns],
        scale=(fit.step * peak).reshape(rows, -1),
        zero_point=zero_point.reshape(rows, -1),
        squared_error=float((fit.error * size).sum()),
        squared_norm=float((np.square(values).sum(axis, keepdims=True) * size).sum()),
        clipped_blocks=int((fit.step < _unclipped(values, axis, scheme).step * np.float32(0.975)).sum()),
    )


def _in_blocks(weight: FloatArray, scheme: Scheme) -> tuple[int, FloatArray]:
    """The axis of a block's elements, and the rows cut into blocks: [block, r * blocks] (axis 0), so that numpy's inner
    loops are long; per channel, where rows are long already, [r, in] (axis 1). A partial block is filled with zeros,
    which every fit represents exactly."""
    if scheme.block_size == 0:
        return 1, weight
    columns = weight.shape[1]
    missing = scheme.num_blocks(columns) * scheme.block_size - columns
    padded = np.pad(weight, ((0, 0), (0, missing))) if missing else weight
    return 0, np.ascontiguousarray(padded.reshape(-1, scheme.block_size).T)


def _in_rows(blocks: NDArray[Any], axis: int, rows: int) -> NDArray[Any]:
    """Undo _in_blocks: [r, padded in]."""
    return (blocks.T if axis == 0 else blocks).reshape(rows, -1)


def _unclipped(values: FloatArray, axis: int, scheme: Scheme) -> _Fit:
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


def _shrunk(lowest: FloatArray, highest: FloatArray, factor: np.float32, scheme: Scheme) -> _Fit:
    """The fit that represents `factor` times the range."""
    first, last = scheme.code_range
    error = np.full_like(lowest, np.inf)
    if scheme.symmetric:
        step = highest * factor / np.float32(last)
        return _Fit(step, np.full_like(step, first), np.full_like(step, last), error)
    step = (highest - lowest) * factor / np.float32(last)
    zero_point = np.rint(-lowest * factor / step)
    return _Fit(step, -zero_point, last - zero_point, error)


def _best_fit(values: FloatArray, axis: int, scheme: Scheme) -> _Fit:
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


def _refitted(values: FloatArray, axis: int, fit: _Fit) -> _Fit:
    """argmin over s of sum (w - code * s)^2 for the codes of `fit`, with codes then rounded again."""
    _, codes = _measure(values, axis, fit)
    weight = np.square(codes).sum(axis, keepdims=True)
    step = (codes * values).sum(axis, keepdims=True) / np.where(weight == 0, np.float32(1), weight)
    refit = _Fit(np.where(step > 0, step, fit.step), fit.low, fit.high, fit.error)
    refit.error, _ = _measure(values, axis, refit)
    return refit


def _measure(values: FloatArray, axis: int, fit: _Fit) -> tuple[FloatArray, FloatArray]:
    """Squared error of each block under a fit, and the codes less their zero point, as float32."""
    exact = values / fit.step
    codes = np.rint(exact)
    np.maximum(codes, fit.low, out=codes)
    np.minimum(codes, fit.high, out=codes)
    np.subtract(exact, codes, out=exact)
    np.square(exact, out=exact)
    return exact.sum(axis, keepdims=True) * np.square(fit.step), codes


def _keep_better(best: _Fit, trial: _Fit) -> None:
    """Take over the blocks where the trial's error is strictly smaller."""
    better = trial.error < best.error
    for field in ("step", "low", "high", "error"):
        np.copyto(getattr(best, field), getattr(trial, field), where=better)
