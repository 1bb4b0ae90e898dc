"""Weights in tiles of 16 rows, as runtime/cpu/native/launch.h describes them, and back.

A tile begins with its scales and zero points; then come its codes, or its floats. Rows and columns of padding have
codes that mean 0. `pack_tiles` and `unpack_tiles` are inverse up to that padding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ingot.artifact.programs.operation_row import (
    BITS,
    LANES,
    Form,
    Matrix,
)

ByteArray = NDArray[np.uint8]

FLOATS: Mapping[Form, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8": ml_dtypes.float8_e4m3fn,
}
_SCALES: Mapping[int, Any] = {2: np.float16, 4: np.float32}
_COLUMNS = 4  # codes of a row that are next to each other in the layout of 8 bits


@dataclass(frozen=True)
class MatrixArrays:
    """The values of a matrix [n, k].

    codes          [n, k] unsigned codes as uint8, or floats of the form's type
    scales         [n, blocks of k] float32, [n, 1] with a scale per row; None for floats without scales
    zero_points    as scales, uint8; None where all are 2^(bits - 1)
    """

    codes: NDArray[Any]
    scales: NDArray[np.float32] | None = None
    zero_points: ByteArray | None = None


def pack_tiles(matrix: Matrix, arrays: MatrixArrays) -> ByteArray:
    """Return the tiles [num_tiles, tile_bytes]."""
    tiles = np.zeros((matrix.num_tiles, matrix.tile_bytes), np.uint8)
    at = 0
    for values in _packed_scales(matrix, arrays):
        tiles[:, at : at + values.shape[1]] = values
        at += values.shape[1]
    codes = _pack_codes(matrix, arrays) if matrix.is_integer else _pack_floats(matrix, arrays.codes)
    tiles[:, matrix.codes_offset : matrix.codes_offset + codes.shape[1]] = codes
    return tiles


def unpack_tiles(matrix: Matrix, tiles: ByteArray) -> MatrixArrays:
    """Return the values in tiles [num_tiles, tile_bytes]."""
    scales = zero_points = None
    blocks = matrix.scale_blocks
    kept = 1 if matrix.per_row else -(-matrix.k // matrix.block) if blocks else 0
    if blocks:
        size = blocks * LANES * matrix.scale_bytes
        stored = _view(tiles[:, :size], _SCALES[matrix.scale_bytes]).reshape(-1, blocks, LANES)
        scales = _rows(matrix, stored)[:, :kept].astype(np.float32)
        if matrix.has_zeros:
            zeros = tiles[:, size : size + blocks * LANES].reshape(-1, blocks, LANES)
            zero_points = _rows(matrix, zeros)[:, :kept]
    stored_codes = tiles[:, matrix.codes_offset :]
    codes = _unpack_codes(matrix, stored_codes) if matrix.is_integer else _unpack_floats(matrix, stored_codes)
    return MatrixArrays(np.ascontiguousarray(codes), scales, zero_points)


def default_zero(matrix: Matrix) -> int:
    """The zero point of codes whose matrix has none."""
    return 1 << (BITS[matrix.form] - 1)


def _packed_scales(matrix: Matrix, arrays: MatrixArrays) -> list[ByteArray]:
    """Scales and zero points of each tile, [num_tiles, bytes]."""
    if not matrix.scale_blocks:
        return []
    assert arrays.scales is not None
    found = [_by_lane(matrix, arrays.scales.astype(_SCALES[matrix.scale_bytes]), fill=0)]
    if matrix.has_zeros:
        assert arrays.zero_points is not None
        found.append(_by_lane(matrix, arrays.zero_points, fill=default_zero(matrix)))
    return found


def _by_lane(matrix: Matrix, values: NDArray[Any], fill: int) -> ByteArray:
    """[n, blocks] -> bytes of [scale_blocks][16] for each tile."""
    padded = np.pad(values, ((0, 0), (0, matrix.scale_blocks - values.shape[1])), constant_values=fill)
    return _bytes(_tiled(matrix, padded, fill).transpose(0, 2, 1))


def _pack_codes(matrix: Matrix, arrays: MatrixArrays) -> ByteArray:
    padded = _tiled(matrix, _padded_columns(matrix, arrays), default_zero(matrix))  # [tiles, 16, padded_k]
    by_four = padded.reshape(len(padded), LANES, -1, _COLUMNS).transpose(0, 2, 1, 3)
    fours = by_four.reshape(len(padded), -1, LANES * _COLUMNS)  # [tiles, padded_k / 4, 64]
    bits = BITS[matrix.form]
    if bits == 3:
        low = _joined(fours & np.uint8(3), 2).reshape(len(fours), -1, 2, LANES * _COLUMNS)
        high = _joined(fours >> np.uint8(2), 1)[:, :, None]
        return np.concatenate((low, high), axis=2).reshape(len(fours), -1)
    return _joined(fours, bits).reshape(len(fours), -1)


def _padded_columns(matrix: Matrix, arrays: MatrixArrays) -> ByteArray:
    """The codes with columns of padding, whose code is the zero point of their block."""
    codes, missing = arrays.codes, matrix.padded_k - matrix.k
    if not missing:
        return codes
    padding = np.full((matrix.n, missing), default_zero(matrix), np.uint8)
    if arrays.zero_points is not None:
        zeros = arrays.zero_points
        blocks = np.arange(matrix.k, matrix.padded_k) // matrix.block if not matrix.per_row else np.zeros(missing, int)
        known = blocks < zeros.shape[1]
        padding[:, known] = zeros[:, blocks[known]]
    return np.concatenate((codes, padding), axis=1)


def _joined(fours: ByteArray, bits: int) -> ByteArray:
    """Put 8 / bits groups of 64 codes into 64 bytes, the first in the low bits: [tiles, groups, 64]."""
    per_byte = 8 // bits
    split = fours.reshape(len(fours), -1, per_byte, fours.shape[2])
    joined = split[:, :, 0].copy()
    for place in range(1, per_byte):
        joined |= split[:, :, place] << np.uint8(bits * place)
    return joined


def _split(joined: ByteArray, bits: int) -> ByteArray:
    """The inverse of `_joined`."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    found: ByteArray = joined[:, :, None] >> shifts & np.uint8((1 << bits) - 1)
    return found.reshape(len(joined), -1, joined.shape[2])


def _unpack_codes(matrix: Matrix, stored: ByteArray) -> ByteArray:
    bits, width = BITS[matrix.form], LANES * _COLUMNS
    groups = np.ascontiguousarray(stored[:, : matrix.padded_k * LANES * bits // 8]).reshape(len(stored), -1, width)
    if bits == 3:
        parts = groups.reshape(len(stored), -1, 3, width)
        low = _split(parts[:, :, :2].reshape(len(stored), -1, width), 2)
        fours = low | _split(np.ascontiguousarray(parts[:, :, 2]), 1) << np.uint8(2)
    else:
        fours = _split(groups, bits)
    lanes = fours.reshape(len(stored), -1, LANES, _COLUMNS).transpose(0, 2, 1, 3).reshape(len(stored), LANES, -1)
    return _untiled(matrix, lanes)[:, : matrix.k]


def _pack_floats(matrix: Matrix, values: NDArray[Any]) -> ByteArray:
    assert values.dtype == FLOATS[matrix.form]
    return _bytes(_tiled(matrix, values, 0).transpose(0, 2, 1))


def _unpack_floats(matrix: Matrix, stored: ByteArray) -> NDArray[Any]:
    kind = FLOATS[matrix.form]
    size = matrix.k * LANES * np.dtype(kind).itemsize
    return _rows(matrix, _view(stored[:, :size], kind).reshape(-1, matrix.k, LANES))


def _tiled(matrix: Matrix, values: NDArray[Any], fill: int) -> NDArray[Any]:
    """[n, columns] -> [num_tiles, 16, columns]; the tiles of the halves of a matrix of pairs take turns."""
    halves = np.split(values, 2) if matrix.pairs else [values]
    missing = -len(halves[0]) % LANES
    padded = [np.pad(half, ((0, missing), (0, 0)), constant_values=fill) for half in halves] if missing else halves
    return np.stack([half.reshape(-1, LANES, values.shape[1]) for half in padded], axis=1).reshape(
        -1, LANES, values.shape[1]
    )


def _untiled(matrix: Matrix, tiles: NDArray[Any]) -> NDArray[Any]:
    """The inverse of `_tiled`."""
    count = 2 if matrix.pairs else 1
    halves = tiles.reshape(-1, count, LANES, tiles.shape[2]).transpose(1, 0, 2, 3).reshape(count, -1, tiles.shape[2])
    return halves[:, : matrix.n // count].reshape(matrix.n, -1)


def _rows(matrix: Matrix, by_lane: NDArray[Any]) -> NDArray[Any]:
    """[tiles, columns, 16] -> [n, columns]."""
    return _untiled(matrix, by_lane.transpose(0, 2, 1))


def _bytes(values: NDArray[Any]) -> ByteArray:
    """[tiles, ...] -> [tiles, bytes]."""
    return np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)


def _view(stored: ByteArray, kind: Any) -> NDArray[Any]:
    return np.ascontiguousarray(stored).view(kind)
