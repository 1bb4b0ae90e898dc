"""Tiles: one order of sums for few rows, enough programs for many, limits of shared memory, tables."""

import json
from pathlib import Path

import pytest

from ingot.errors import UsageError
from ingot.pipeline.targets.cuda.tiles import (
    FEW_ROWS,
    MatmulKernel,
    MatmulShape,
    Tile,
    TileTable,
    packed_constants,
    read_tile_table,
    safe_tile,
)
from tests.each_case import each_case

SHAPES = [(4096, 14336), (6144, 4096), (128256, 4096), (2048, 2048), (96, 64)]  # n, columns
FORMS: list[tuple[MatmulKernel, int, int]] = [
    ("matmul", 16, 0),
    ("matmul", 8, 0),
    ("matmul_nbits", 4, 128),
    ("matmul_nbits", 8, 128),
]


def shape(form: tuple[MatmulKernel, int, int], rows: int, n: int, columns: int) -> MatmulShape:
    kernel, bits, group = form
    return MatmulShape(kernel=kernel, rows=rows, n=n, columns=columns, bits=bits, group=group)


@each_case("form", FORMS)
@each_case(("n", "columns"), SHAPES)
def test_all_buckets_of_few_rows_add_up_in_one_order(form: tuple[MatmulKernel, int, int], n: int, columns: int) -> None:
    tiles = [safe_tile(shape(form, rows, n, columns), 90) for rows in (1, 8, 16, 17, 32, FEW_ROWS)]
    assert len({(tile.depth, tile.splits, tile.direct) for tile in tiles}) == 1
    if not tiles[0].direct:  # whose sums do not depend on the tile
        assert len({(tile.columns, tile.num_warps) for tile in tiles}) == 1
        assert max(tile.rows for tile in tiles) < 64  # from where SM 90 has other instructions


@pytest.mark.parametrize("form", FORMS[:2])
def test_tiles_of_many_rows_are_as_large_as_still_fills_a_gpu(form: tuple[MatmulKernel, int, int]) -> None:
    few, many = (safe_tile(shape(form, rows, 4096, 4096)) for rows in (128, 4096))
    assert few.rows * few.columns < many.rows * many.columns
    assert few.splits == many.splits == 1


def test_a_weight_of_four_bits_has_direct_tiles_with_as_many_rows_as_there_are() -> None:
    tiles = [safe_tile(shape(FORMS[2], rows, 4096, 4096), 90) for rows in (1, 9, 32, 64, 4096)]
    assert [tile.rows for tile in tiles] == [8, 16, 32, 64, 64]
    assert all(tile.direct for tile in tiles)
    assert tiles[-1].splits == 1
    wide = shape(FORMS[2], 1, 4096, 4096).model_copy(update={"is_float32": True})
    assert not safe_tile(wide, 90).direct


@pytest.mark.parametrize(
    ("tile", "words"),
    [
        ({"rows": 8, "columns": 64}, "only direct tiles have fewer than 16"),
        ({"rows": 8, "columns": 96, "direct": True}, "each is a power of two"),
        ({"rows": 8, "columns": 64, "num_warps": 8, "direct": True}, "a warp has a multiple of 16 columns"),
    ],
)
def test_a_tile_that_its_kernel_cannot_have_is_refused(tile: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Tile.model_validate(tile)


@each_case("size", ["rows", "columns", "depth", "splits", "num_warps", "num_stages"])
def test_a_table_of_sizes_that_no_gpu_has_is_refused_before_anything_is_compiled(size: str, tmp_path: Path) -> None:
    file = tmp_path / "tiles.json"
    key = shape(FORMS[2], 8, 96, 64).key
    file.write_text(json.dumps({"sm": 90, "choices": {key: {"rows": 16, "columns": 64, size: 2**20}}}))
    with pytest.raises(UsageError, match=rf"{size}: Input should be less than or equal to \d+"):
        read_tile_table(file, (90,))


@each_case(
    ("rows", "n", "ahead"), [(1, 4096, 3), (8, 28672, 3), (32, 48, 3), (1, 40, 2), (64, 4096, 1), (4096, 4096, 1)]
)
def test_few_rows_load_a_weight_of_four_bits_through_a_ring_where_copies_fit_it(rows: int, n: int, ahead: int) -> None:
    for group in (32, 64, 128):
        wanted = shape(("matmul_nbits", 4, group), rows, n, 4096)
        assert packed_constants(wanted, safe_tile(wanted)) == ("matmul_int4", {"AHEAD": ahead, "WARPS": 4})


@each_case("stages", range(1, 17))
def test_a_direct_tile_loads_one_span_less_ahead_than_it_has_stages(stages: int) -> None:
    tile = Tile(rows=8, columns=64, num_stages=stages, direct=True)
    fitting = shape(FORMS[2], 8, 4096, 4096)
    ring, registers = (packed_constants(fitting.model_copy(update={"n": n}), tile)[1]["AHEAD"] for n in (4096, 4100))
    assert ring == max(stages - 1, 1)
    assert registers == min(ring, 2)


def test_direct_tiles_may_be_chosen_only_for_four_bits(tmp_path: Path) -> None:
    file = tmp_path / "tiles.json"
    choices = {shape(FORMS[0], 8, 96, 64).key: {"rows": 8, "columns": 64, "direct": True}}
    file.write_text(json.dumps({"sm": 90, "device": "a GPU", "choices": choices}))
    with pytest.raises(UsageError, match="direct tiles multiply only by weights of 4 bits"):
        read_tile_table(file, (90,))


@each_case("change", [{"direct": True}, {"rows": 8}, {"columns": 128}, {"num_warps": 8}, {"depth": 64}])
def test_a_wide_tile_has_the_sizes_of_its_kernel(change: dict[str, int]) -> None:
    fitting = {"rows": 32, "columns": 256, "depth": 128, "num_warps": 12, "wide": True}
    Tile.model_validate(fitting)
    with pytest.raises(ValueError, match="it has 16, 32 or 64 rows, 256 columns, a depth of 128, 12 warps"):
        Tile.model_validate(fitting | change)


@each_case(("n", "columns"), [(4096, 14336), (6144, 4096), (28672, 4096), (128256, 4096)])
def test_a_weight_of_four_bits_has_wide_tiles_from_nine_rows_on_that_fill_an_sm_90(n: int, columns: int) -> None:
    for rows, tile_rows in ((9, 16), (16, 16), (17, 32), (64, 64), (256, 64)):
        tile = TileTable(sm=90).choose(shape(FORMS[2], rows, n, columns))
        assert (tile.wide, tile.rows) == (True, tile_rows)
        programs = -(-rows // tile.rows) * -(-n // tile.columns) * tile.splits
        assert programs >= 96
        assert tile.splits == 1 or programs <= 132


def test_other_weights_sms_and_builds_have_no_wide_tiles() -> None:
    fitting = shape(FORMS[2], 64, 4096, 4096)
    assert TileTable(sm=90).choose(fitting).wide
    for change in ({"group": 64}, {"rows": 8}, {"n": 512}, {"is_float32": True}, {"bits": 8}):
        assert not TileTable(sm=90).choose(fitting.model_copy(update=change)).wide
    for table in (TileTable(sm=80), TileTable(), TileTable(sm=90, specialized=False)):
        assert table.choose(fitting) == safe_tile(fitting, table.sm)
        assert not table.choose_invariant(fitting).wide


@each_case(("sm", "group"), [(80, 128), (90, 64)])
def test_a_table_with_wide_tiles_of_another_kernel_is_refused(sm: int, group: int, tmp_path: Path) -> None:
    file = tmp_path / "tiles.json"
    tile = {"rows": 16, "columns": 256, "depth": 128, "num_warps": 12, "wide": True}
    key = shape(("matmul_nbits", 4, group), 16, 4096, 4096).key
    file.write_text(json.dumps({"sm": sm, "device": "a GPU", "choices": {key: tile}}))
    with pytest.raises(UsageError, match="has a wide tile, for SM 90 and groups of a multiple of 128"):
        read_tile_table(file, (sm,))


def test_float32_tiles_fit_shared_memory() -> None:
    wide = shape(FORMS[0], 4096, 4096, 4096).model_copy(update={"is_float32": True})
    tile = safe_tile(wide, 90)
    stage_bytes = (tile.rows + tile.columns) * tile.depth * 4
    assert stage_bytes * tile.num_stages <= 99 * 1024
    assert wide.key == "matmul bits=16 group=0 float32 rows=4096 n=4096 columns=4096"


def test_a_measured_tile_overrides_the_safe_one() -> None:
    wanted = shape(FORMS[0], 8, 96, 64)
    chosen = Tile(rows=16, columns=32)
    assert TileTable(sm=90, device="a GPU", choices={wanted.key: chosen}).choose(wanted) == chosen
    assert TileTable(sm=90).choose(wanted) == safe_tile(wanted, 90)


def test_a_library_may_be_chosen_only_for_plain_weights(tmp_path: Path) -> None:
    file = tmp_path / "tiles.json"
    tile = {"rows": 64, "columns": 64, "library": "cublaslt"}
    for form in FORMS:
        key = shape(form, 512, 96, 64).key
        file.write_text(json.dumps({"sm": 90, "device": "a GPU", "choices": {key: tile}}))
        if form == ("matmul", 16, 0):
            assert read_tile_table(file, (90,)).choices[key].library == "cublaslt"
            continue
        with pytest.raises(UsageError, match=f"cublaslt multiplies only by plain weights, and is chosen for '{key}'"):
            read_tile_table(file, (90,))
