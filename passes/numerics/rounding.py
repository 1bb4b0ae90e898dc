"""Round-to-nearest quantization of a weight matrix with an error-minimising clip, in numpy alone.

A row [in] is cut into blocks of `block_size` columns (the last may be shorter; per channel: one block), and a block
shares one scale s and, when asymmetric, one zero point z:

    code = clip(round(w / s) + z, low, high)        w' = (code - z) * s

Plain round-to-nearest takes s from the block's largest value. The clip tries smaller s, which cut off the extremes and
round everything else more finely, and keeps the one with the smallest sum of (w - w')^2; a closing least-squares step
then fits s to the codes found. (AWQ, arXiv:2306.00978, searches a clip likewise, by the error of
the layer's output; here it is the error of the weights alone.)

Only elementwise IEEE operations and numpy's sums are used, so that neither the number of threads nor numpy's choice of
instructions changes a bit: tested from x86-64-v2 to AVX-512; other architectures were not compared.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.passes.numerics.scale_search import FloatArray, Scheme, best_fit, unclipped

CodeArray = NDArray[np.integer[Any]]  # int8 or uint8

_CHUNK_ELEMENTS = 1 << 16  # what a chunk's temporaries need stays in the L2 cache
_ZERO_BELOW = 1e-30  # a block whose every weight is smaller is zero: its scale would leave float32's normal range


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
    fit = best_fit(values, axis, scheme)
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
        clipped_blocks=int((fit.step < unclipped(values, axis, scheme).step * np.float32(0.975)).sum()),
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
