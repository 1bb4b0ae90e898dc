"""Tiles of weights: the layout that launch.h describes, code by code, and back."""

import numpy as np
import pytest
from numpy.typing import NDArray

from ingot.artifact.programs.operation_row import (
    BITS,
    LANES,
    Form,
    Matrix,
)
from ingot.pipeline.targets.cpu.packing import FLOATS, MatrixArrays, pack_tiles, unpack_tiles
from tests.each_case import each_case

CODES: tuple[Form, ...] = ("int2", "int3", "int4", "int8")


def integers(matrix: Matrix, seed: int = 0) -> MatrixArrays:
    """Random codes, scales that float16 holds, zero points."""
    rng, most = np.random.default_rng(seed), 1 << BITS[matrix.form]
    shape = (matrix.n, 1 if matrix.per_row else -(-matrix.k // matrix.block))
    scales = (rng.integers(1, 64, shape) / 64).astype(np.float32)
    zeros = rng.integers(0, most, shape).astype(np.uint8) if matrix.has_zeros else None
    return MatrixArrays(rng.integers(0, most, (matrix.n, matrix.k)).astype(np.uint8), scales, zeros)


def code(tile: NDArray[np.uint8], form: Form, lane: int, k: int) -> int:
    """The code of a row and column, from the bytes of a tile's codes: the words of launch.h."""
    j = k % 4
    match form:
        case "int8":
            return int(tile[k // 4 * 64 + 4 * lane + j])
        case "int4":
            return int(tile[k // 8 * 64 + 4 * lane + j]) >> 4 * (k // 4 % 2) & 15
        case "int2":
            return int(tile[k // 16 * 64 + 4 * lane + j]) >> 2 * (k // 4 % 4) & 3
    group = tile[k // 32 * 192 : (k // 32 + 1) * 192]
    low = int(group[k // 16 % 2 * 64 + 4 * lane + j]) >> 2 * (k // 4 % 4) & 3
    return low | (int(group[128 + 4 * lane + j]) >> k // 4 % 8 & 1) << 2


@each_case("form", CODES)
@each_case("pairs", [False, True])
def test_every_code_scale_and_zero_point_is_where_the_layout_says(form: Form, pairs: bool) -> None:
    matrix = Matrix(n=40, k=72, form=form, block=32, scale_bytes=2, has_zeros=True, pairs=pairs)
    arrays, tiles = integers(matrix), pack_tiles(matrix, integers(matrix))
    assert tiles.shape == (4 if pairs else 3, matrix.tile_bytes)
    half = matrix.n // 2 if pairs else matrix.n
    for row in range(matrix.n):
        tile = row % half // LANES * (2 if pairs else 1) + row // half
        lane = row % half % LANES
        scales = tiles[tile, : 3 * LANES * 2].view(np.float16).reshape(3, LANES)[:, lane]
        zeros = tiles[tile, 3 * LANES * 2 : 3 * LANES * 3].reshape(3, LANES)[:, lane]
        assert arrays.scales is not None
        assert arrays.zero_points is not None
        assert scales.tolist() == arrays.scales[row].tolist()
        assert zeros.tolist() == arrays.zero_points[row].tolist()
        codes = tiles[tile, matrix.codes_offset :]
        assert [code(codes, form, lane, k) for k in range(matrix.k)] == arrays.codes[row].tolist()
        padding = [code(codes, form, lane, k) for k in range(matrix.k, matrix.padded_k)]
        assert padding == [arrays.zero_points[row, 2]] * 24


@pytest.mark.parametrize("form", CODES)
def test_rows_and_blocks_of_padding_mean_zero(form: Form) -> None:
    matrix = Matrix(n=3, k=16, form=form, block=16, scale_bytes=4)
    codes = pack_tiles(matrix, integers(matrix))[0, matrix.codes_offset :]
    zero = 1 << (BITS[form] - 1)
    assert matrix.padded_k == 32
    assert {code(codes, form, lane, k) for lane in range(LANES) for k in range(16, 32)} == {zero}
    assert {code(codes, form, lane, k) for lane in range(3, LANES) for k in range(32)} == {zero}


@each_case("form", CODES)
@each_case(
    "facts",
    [
        {"n": 33, "k": 100, "block": 32, "scale_bytes": 2, "has_zeros": True},
        {"n": 16, "k": 128, "block": 128, "scale_bytes": 4},
        {"n": 48, "k": 40, "block": 64, "scale_bytes": 4, "per_row": True},
        {"n": 70, "k": 48, "block": 16, "scale_bytes": 2, "has_zeros": True, "pairs": True},
    ],
)
def test_unpacked_tiles_are_what_was_packed(form: Form, facts: dict[str, int]) -> None:
    matrix = Matrix.model_validate({"form": form, **facts})
    arrays = integers(matrix)
    found = unpack_tiles(matrix, pack_tiles(matrix, arrays))
    np.testing.assert_array_equal(found.codes, arrays.codes)
    np.testing.assert_array_equal(found.scales, arrays.scales)
    np.testing.assert_array_equal(found.zero_points, arrays.zero_points)


@each_case("form", FLOATS)
@each_case("pairs", [False, True])
def test_floats_are_stored_column_by_column(form: Form, pairs: bool) -> None:
    scale_bytes = 4 if form == "float8" else 0
    matrix = Matrix.model_validate(
        {"n": 36, "k": 7, "form": form, "per_row": form == "float8", "scale_bytes": scale_bytes, "pairs": pairs}
    )
    rng = np.random.default_rng(0)
    values = rng.normal(size=(36, 7)).astype(FLOATS[form])
    scales = rng.normal(size=(36, 1)).astype(np.float32) if scale_bytes else None
    tiles = pack_tiles(matrix, MatrixArrays(values, scales))
    first = tiles[0, matrix.codes_offset :][: 7 * LANES * values.itemsize].view(FLOATS[form]).reshape(7, LANES)
    np.testing.assert_array_equal(first.T, values[:LANES])
    found = unpack_tiles(matrix, tiles)
    np.testing.assert_array_equal(found.codes, values)
    np.testing.assert_array_equal(found.scales, scales)
