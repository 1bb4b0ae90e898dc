"""The distance by which codes are fetched ahead: the fastest is kept, and no bit depends on it."""

from ctypes import pointer
from types import SimpleNamespace

import numpy as np
import pytest

from ingot.artifact.programs.operation_row import LANES
from ingot.runtime.cpu.native import fetch_ahead
from ingot.runtime.cpu.native.fetch_ahead import DISTANCES, choose_distances
from ingot.runtime.cpu.native.kernels import RoundedRows, aligned, find_kernels
from ingot.runtime.cpu.native.program import instruction_sets
from ingot.runtime.cpu.native.structures import LinearOperation, MatrixAt, ViewAt

_N, _K, _BLOCK = 64, 256, 32
_TILE_BYTES = _K // _BLOCK * LANES * 2 + _K * LANES // 2


def _operations(tiles: np.ndarray, output: np.ndarray, count: int = 2) -> list[LinearOperation]:
    """Linear operations of int4 matrices with float16 scales."""
    matrices = [
        MatrixAt(
            tiles=tiles.ctypes.data,
            tile_bytes=_TILE_BYTES,
            codes_offset=_TILE_BYTES - _K * LANES // 2,
            n=_N,
            k=_K,
            padded_k=_K,
            form=6,
            block=_BLOCK,
            scale_blocks=_K // _BLOCK,
            scale_bytes=2,
        )
        for _ in range(count)
    ]
    view = ViewAt(output.ctypes.data, output.shape[1])
    return [LinearOperation(matrix=pointer(one), output=view, rounding=1, alpha=1.0) for one in matrices]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let matrices of a few kilobytes be tried."""
    monkeypatch.setattr(fetch_ahead, "_LEAST_BYTES", 0)
    monkeypatch.setattr(fetch_ahead, "_LEAST_LAYOUT_BYTES", 0)
    monkeypatch.setattr(fetch_ahead, "_TRIAL_BYTES", 1)


def _distances(operations: list[LinearOperation]) -> set[int]:
    return {operation.matrix.contents.fetch_ahead for operation in operations}


@pytest.mark.parametrize(
    ("seconds", "chosen"), [((4, 2, 3), 256), ((4, 3, 2), 2048), ((2, 3, 4), 0), ((2.05, 2, 2), 0)]
)
@pytest.mark.usefixtures("small")
def test_the_fastest_distance_is_kept_where_it_gains(
    seconds: tuple[float, ...], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0.0
    tiles, output = np.zeros(_N // LANES * _TILE_BYTES, np.uint8), aligned((1, _N), np.float32)
    operations = _operations(tiles, output)
    kernels = find_kernels(instruction_sets()[0])

    def multiply(_row: RoundedRows, _kernels: object, linear: LinearOperation, begin: int, end: int) -> None:
        nonlocal clock
        clock += seconds[DISTANCES.index(linear.matrix.contents.fetch_ahead)] * (end - begin)

    monkeypatch.setattr(RoundedRows, "multiply", multiply)
    monkeypatch.setattr(fetch_ahead, "time", SimpleNamespace(perf_counter=lambda: clock))
    choose_distances(kernels, operations)
    assert _distances(operations) == {chosen}


def test_a_model_that_a_cache_holds_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles, output = np.zeros(_N // LANES * _TILE_BYTES, np.uint8), aligned((1, _N), np.float32)
    operations = _operations(tiles, output)
    monkeypatch.setattr(RoundedRows, "multiply", lambda *_: pytest.fail("tried"))
    choose_distances(find_kernels(instruction_sets()[0]), operations)
    assert _distances(operations) == {0}


@pytest.mark.usefixtures("small")
def test_a_trial_leaves_the_operations_outputs_alone() -> None:
    tiles, output = np.zeros(_N // LANES * _TILE_BYTES, np.uint8), aligned((1, _N), np.float32)
    output[:] = 7
    operations = _operations(tiles, output)
    choose_distances(find_kernels(instruction_sets()[0]), operations)
    assert (output == 7).all()
    assert _distances(operations) <= set(DISTANCES)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("rows", [1, 3, 7, 8, 13])
def test_no_bit_depends_on_the_distance(isa: str, rows: int) -> None:
    rng = np.random.default_rng(0)
    tiles = rng.integers(0, 60, _N // LANES * _TILE_BYTES).astype(np.uint8)
    output = aligned((rows, _N), np.float32)
    (linear,) = _operations(tiles, output, count=1)
    kernels = find_kernels(isa)
    row = RoundedRows(kernels, linear, rng.standard_normal((rows, _K), dtype=np.float32))
    results = []
    # The longest reaches far beyond the matrix, which a fetch may.
    for distance in (*DISTANCES, 1 << 24):
        linear.matrix.contents.fetch_ahead = distance
        row.multiply(kernels, linear, 0, _N // LANES)
        results.append(output.copy())
    assert np.isfinite(results[0]).all()
    assert all((result.view(np.uint32) == results[0].view(np.uint32)).all() for result in results)
