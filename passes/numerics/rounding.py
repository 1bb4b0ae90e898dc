"""Round-to-nearest quantization of a weight matrix, with a search for the scales of least squared error.

A row [in] is cut into blocks of `block_size` columns (the last may be shorter; per channel: one block), and a block
shares one scale s and, when asymmetric, one zero point z:

    code = clip(round(w / s) + z, low, high)        w' = (code - z) * s

Plain round-to-nearest takes s from the block's largest value. The clip tries smaller s, which cut off the extremes and
round everything else more finely, and keeps the one with the smallest sum of (w - w')^2; a final least-squares step
fits s to the chosen codes. AWQ (arXiv:2306.00978) searches a clip by the error of the layer's output; this search uses
the error of the weights alone.

With scales of float16 every s that is tried is a float16 number: codes, zero points and errors are those of what is
stored. A weight with a scale out of float16's range (scale_dtype.py) gets float32 scales.

Only elementwise IEEE operations and numpy's sums are used, so that neither the number of threads nor numpy's choice of
instructions changes a bit: tested from x86-64-v2 to AVX-512, not on other architectures.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.passes.numerics.arrays import CodeArray, Float32Array
from ingot.passes.numerics.scheme import ScaleDtype, Scheme, may_be_float16, scale_dtype_of, to_float16

_CHUNK_ELEMENTS = 1 << 16  # a chunk's temporaries fit in the L2 cache
_ZERO_BELOW = 1e-30  # a block whose every weight is smaller is zero: its scale would leave float32's normal range
_SHRINK_FACTORS = tuple(1.0 - 0.05 * step for step in range(11))  # 1.0 (no clip) down to 0.5
_NO_CLIP = (1.0,)


@dataclass(frozen=True)
class RoundedWeight:
    """A quantized [out, in] weight.

    codes [out, in] int8 | uint8; scale [out, blocks] float32; zero_point [out, blocks] as codes, None when symmetric.
    The sums are over all elements, in float64; clipped_share is the share of blocks whose scale was shrunk.
    """

    codes: CodeArray
    scale: Float32Array
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

    @property
    def scale_dtype(self) -> ScaleDtype:
        """The narrowest type that holds every scale."""
        return scale_dtype_of(self.scale)

    def restored(self, scheme: Scheme) -> Float32Array:
        """w' [out, in], for the scheme that the weight was rounded with."""
        return dequantize(self.codes, self.scale, self.zero_point, scheme.block_columns(self.codes.shape[1]))


def round_weight(weight: NDArray[Any], scheme: Scheme, num_threads: int = 1) -> RoundedWeight:
    """Quantize weight [out, in] of any float dtype; temporaries take the memory of a few chunks.

    Scales are float32 where float16 is asked for and does not hold all of them. Raises ValueError without the weight's
    name when a value is NaN or infinite.
    """
    rows, columns = weight.shape
    blocks = scheme.num_blocks(columns)
    code_type = np.int8 if scheme.symmetric else np.uint8
    codes = np.empty((rows, columns), code_type)
    scale = np.empty((rows, blocks), np.float32)
    zero_point = None if scheme.symmetric else np.empty((rows, blocks), np.uint8)

    def round_rows(chunk: slice) -> tuple[float, float, int] | None:
        found = _round_chunk(weight[chunk].astype(np.float32), scheme)
        if found is None:
            return None
        codes[chunk], scale[chunk] = found.codes, found.scale
        if zero_point is not None:
            zero_point[chunk] = found.zero_point
        return found.squared_error, found.squared_norm, found.clipped_blocks

    chunks = _chunks(rows, blocks * scheme.block_columns(columns))
    if min(num_threads, len(chunks)) == 1:  # searches round small weights thousands of times
        found = list(map(round_rows, chunks))
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            found = list(pool.map(round_rows, chunks))
    sums = [one for one in found if one is not None]
    if len(sums) < len(found):
        return round_weight(weight, replace(scheme, scale_dtype="float32"), num_threads)
    error, norm, clipped = (sum(column) for column in zip(*sums, strict=True))
    return RoundedWeight(codes, scale, zero_point, error, norm, clipped / (rows * blocks))


def round_per_tensor(weight: Float32Array, scheme: Scheme) -> RoundedWeight:
    """Quantize weight [out, in] with one scale for all rows, repeated per row: scale [out, 1].

    The scheme is symmetric and per channel. Raises ValueError when a value is NaN or infinite.
    """
    whole = round_weight(weight.reshape(1, -1), scheme)
    codes, scale = whole.codes.reshape(weight.shape), np.repeat(whole.scale, len(weight), axis=0)
    return replace(whole, codes=codes, scale=scale)


def dequantize(codes: CodeArray, scale: Float32Array, zero_point: CodeArray | None, block_columns: int) -> Float32Array:
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
    scale: Float32Array
    zero_point: NDArray[Any]
    squared_error: float
    squared_norm: float
    clipped_blocks: int


def _chunks(rows: int, padded_columns: int) -> list[slice]:
    step = max(1, _CHUNK_ELEMENTS // padded_columns)
    return [slice(start, start + step) for start in range(0, rows, step)]


def _round_chunk(weight: Float32Array, scheme: Scheme) -> _Chunk | None:
    """Quantize a few rows [r, in]; None where the scales should be float16 and are out of its range."""
    rows, columns = weight.shape
    blocks, is_zero = _in_blocks(weight, scheme)
    values, axis, peak = blocks.values, blocks.axis, blocks.peak
    unclipped = _unclipped(replace(blocks, scheme=replace(scheme, scale_dtype="float32")))  # float16 may not hold it
    if scheme.scale_dtype == "float16" and not may_be_float16((unclipped.step * peak)[~is_zero]):
        return None
    fit = _best_fit(blocks)
    codes = np.clip(np.rint(values / fit.step), fit.low, fit.high)
    first = scheme.code_range[0]
    zero_point = first - fit.low
    size = peak.astype(np.float64) ** 2
    return _Chunk(
        codes=_in_rows(codes + zero_point, axis, rows)[:, :columns],
        scale=blocks.scales(fit.step).reshape(rows, -1),
        zero_point=zero_point.reshape(rows, -1),
        squared_error=float((fit.error * size).sum()),
        squared_norm=float((np.square(values).sum(axis, keepdims=True) * size).sum()),
        clipped_blocks=int((fit.step < unclipped.step * np.float32(0.975)).sum()),
    )


@dataclass(frozen=True)
class _Blocks:
    """Blocks of a few rows, in units of their largest magnitude, so that no square over- or underflows.

    axis    along a block's elements; arrays with one value per block keep it at length 1
    peak    the largest magnitude of each block; 1 for a block of zeros

    Blocks are [block, r * blocks] (axis 0), so that numpy's inner loops are long; per channel, where rows are long
    already, [r, in] (axis 1). A partial block is filled with zeros, which every fit represents exactly.
    """

    values: Float32Array
    axis: int
    peak: Float32Array
    scheme: Scheme

    def scales(self, step: Float32Array) -> Float32Array:
        """Return scales in their stored form, for steps in units of the peak."""
        scales = step * self.peak
        return scales if self.scheme.scale_dtype == "float32" else to_float16(scales)

    def stored(self, step: Float32Array) -> Float32Array:
        """Steps that the stored scales make."""
        return step if self.scheme.scale_dtype == "float32" else self.scales(step) / self.peak


def _in_blocks(weight: Float32Array, scheme: Scheme) -> tuple[_Blocks, NDArray[np.bool_]]:
    """Cut rows [r, in] into blocks; return them, and which of them are zero. ValueError for a NaN or infinite value."""
    axis, values = _cut(weight, scheme)
    peak = np.abs(values).max(axis, keepdims=True)
    if not np.isfinite(peak).all():
        raise ValueError("NaN or infinite")
    is_zero = peak < _ZERO_BELOW
    peak = np.where(is_zero, np.float32(1), peak)
    return _Blocks(np.where(is_zero, np.float32(0), values / peak), axis, peak, scheme), is_zero


def _cut(weight: Float32Array, scheme: Scheme) -> tuple[int, Float32Array]:
    """The axis of a block's elements, and the elements of all blocks."""
    if scheme.block_size == 0:
        return 1, weight
    columns = weight.shape[1]
    missing = scheme.num_blocks(columns) * scheme.block_size - columns
    padded = np.pad(weight, ((0, 0), (0, missing))) if missing else weight
    return 0, np.ascontiguousarray(padded.reshape(-1, scheme.block_size).T)


def _in_rows(blocks: NDArray[Any], axis: int, rows: int) -> NDArray[Any]:
    """Undo _cut: [r, padded in]."""
    return (blocks.T if axis == 0 else blocks).reshape(rows, -1)


@dataclass
class _Fit:
    """Per block: step in units of the block's peak, code bounds less the zero point, squared error in peak^2."""

    step: Float32Array
    low: Float32Array
    high: Float32Array
    error: Float32Array


def _unclipped(blocks: _Blocks) -> _Fit:
    """The fit whose largest code is the block's largest value; its error is not computed."""
    return _shrunk(blocks, *_extremes(blocks), np.float32(1))


def _extremes(blocks: _Blocks) -> tuple[Float32Array, Float32Array]:
    """Smallest and largest value to represent, widened to include zero. Zero blocks get [0, 1]."""
    values, axis = blocks.values, blocks.axis
    if blocks.scheme.symmetric:
        ones = np.ones_like(blocks.peak)
        return -ones, ones
    lowest = np.minimum(values.min(axis, keepdims=True), np.float32(0))
    highest = np.maximum(values.max(axis, keepdims=True), np.float32(0))
    return lowest, np.where(lowest == highest, np.float32(1), highest)


def _shrunk(blocks: _Blocks, lowest: Float32Array, highest: Float32Array, factor: np.float32) -> _Fit:
    """The fit that represents `factor` times the range."""
    first, last = blocks.scheme.code_range
    error = np.full_like(lowest, np.inf)
    if blocks.scheme.symmetric:
        step = blocks.stored(highest * factor / np.float32(last))
        return _Fit(step, np.full_like(step, first), np.full_like(step, last), error)
    step = blocks.stored((highest - lowest) * factor / np.float32(last))
    zero_point = np.minimum(np.rint(-lowest * factor / step), np.float32(last))
    return _Fit(step, -zero_point, last - zero_point, error)


def _best_fit(blocks: _Blocks) -> _Fit:
    """Search the shrink factors; then fit the scale to the codes by least squares, and keep it where it is better."""
    lowest, highest = _extremes(blocks)
    clip = blocks.scheme.clip
    best = _shrunk(blocks, lowest, highest, np.float32(1))
    for factor in _SHRINK_FACTORS if clip else _NO_CLIP:
        trial = _shrunk(blocks, lowest, highest, np.float32(factor))
        trial.error, _ = _measure(blocks, trial)
        _keep_better(best, trial)
    if clip:
        _keep_better(best, _refitted(blocks, best))
    return best


def _refitted(blocks: _Blocks, fit: _Fit) -> _Fit:
    """argmin over s of sum (w - code * s)^2 for the codes of `fit`; its error is that of the codes rounded again."""
    _, codes = _measure(blocks, fit)
    weight = np.square(codes).sum(blocks.axis, keepdims=True)
    step = (codes * blocks.values).sum(blocks.axis, keepdims=True) / np.where(weight == 0, np.float32(1), weight)
    refit = _Fit(np.where(step > 0, blocks.stored(step), fit.step), fit.low, fit.high, fit.error)
    refit.error, _ = _measure(blocks, refit)
    return refit


def _measure(blocks: _Blocks, fit: _Fit) -> tuple[Float32Array, Float32Array]:
    """Squared error of each block under a fit, and the codes less their zero point, as float32."""
    exact = blocks.values / fit.step
    codes = np.rint(exact)
    np.maximum(codes, fit.low, out=codes)
    np.minimum(codes, fit.high, out=codes)
    np.subtract(exact, codes, out=exact)
    np.square(exact, out=exact)
    return exact.sum(blocks.axis, keepdims=True) * np.square(fit.step), codes


def _keep_better(best: _Fit, trial: _Fit) -> None:
    """Copy the blocks whose error in the trial is strictly smaller."""
    better = trial.error < best.error
    for field in ("step", "low", "high", "error"):
        np.copyto(getattr(best, field), getattr(trial, field), where=better)
