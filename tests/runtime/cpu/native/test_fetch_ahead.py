"""The distance by which codes are fetched ahead: the fastest is kept, and no bit depends on it."""

from ctypes import pointer
from types import SimpleNamespace

import numpy as np
import pytest

from ingot.artifact.programs.operation_row import LANES
from ingot.runtime.cpu.native import fetch_ahead
from ingot.runtime.cpu.native.abi import FIELD_ENUMS
from ingot.runtime.cpu.native.fetch_ahead import DISTANCES, choose_distances
from ingot.runtime.cpu.native.kernels import RoundedRows, aligned, find_kernels
from ingot.runtime.cpu.native.program import instruction_sets
from ingot.runtime.cpu.native.structures import LinearOperation
from ingot.runtime.forward_batch import FloatArray
from tests.runtime.cpu.native.kernel_cases import Weight, random_weight, view_of

_N, _K = 64, 256


def _weight() -> Weight:
    return random_weight(np.random.default_rng(0), _N, _K, "int4", block=32)


def _operations(weight: Weight, output: FloatArray, count: int = 2) -> list[LinearOperation]:
    """Linear operations that multiply by a matrix, each by a structure of its own."""
    rounding = FIELD_ENUMS["rounding"]["block"]
    return [
        LinearOperation(matrix=pointer(weight.as_structure()), output=view_of(output), rounding=rounding, alpha=1.0)
        for _ in range(count)
    ]


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
    weight, output = _weight(), aligned((1, _N), np.float32)
    operations = _operations(weight, output)
    kernels = find_kernels(instruction_sets()[0])

    def multiply(_row: RoundedRows, _kernels: object, linear: LinearOperation, begin: int, end: int) -> None:
        nonlocal clock
        clock += seconds[DISTANCES.index(linear.matrix.contents.fetch_ahead)] * (end - begin)

    monkeypatch.setattr(RoundedRows, "multiply", multiply)
    monkeypatch.setattr(fetch_ahead, "time", SimpleNamespace(perf_counter=lambda: clock))
    choose_distances(kernels, operations)
    assert _distances(operations) == {chosen}


def test_a_model_that_a_cache_holds_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, output = _weight(), aligned((1, _N), np.float32)
    operations = _operations(weight, output)
    monkeypatch.setattr(RoundedRows, "multiply", lambda *_: pytest.fail("tried"))
    choose_distances(find_kernels(instruction_sets()[0]), operations)
    assert _distances(operations) == {0}


@pytest.mark.usefixtures("small")
def test_a_trial_leaves_the_operations_outputs_alone() -> None:
    weight, output = _weight(), aligned((1, _N), np.float32)
    output[:] = 7
    operations = _operations(weight, output)
    choose_distances(find_kernels(instruction_sets()[0]), operations)
    assert (output == 7).all()
    assert _distances(operations) <= set(DISTANCES)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("rows", [1, 3, 7, 8, 13])
def test_no_bit_depends_on_the_distance(isa: str, rows: int) -> None:
    rng = np.random.default_rng(0)
    weight, output = _weight(), aligned((rows, _N), np.float32)
    (linear,) = _operations(weight, output, count=1)
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
