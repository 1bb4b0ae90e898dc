"""Matmuls of a program, and the tiles to measure for each."""

import onnx_ir as ir
import pytest

from ingot.artifact.programs.launch_program import CudaProgram, NumberArgument
from ingot.builder.tune.candidates import candidates, matmuls_of, shape_of, with_tile
from ingot.errors import UsageError
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.pipeline.targets.cuda.lowering import lower_to_launches
from ingot.pipeline.targets.cuda.tiles import MatmulShape, Tile, TileTable
from tests.builder.tune.programs import BUCKETS, program_of


def test_a_build_with_the_table_launches_the_measured_kernels(model: ir.Model, program: CudaProgram) -> None:
    for matmul in matmuls_of(program)[::2]:
        for tile in candidates(matmul.shape, 90)[::5]:
            table = TileTable(sm=90, choices={matmul.shape.key: tile})
            lowered = lower_to_launches(model, BUCKETS, "fp16", table)
            built = [one for one in matmuls_of(program_of(model, lowered)) if one.shape == matmul.shape]
            kernel, grid = with_tile(matmul, tile)
            assert [(one.kernel, one.launch.grid) for one in built] == [(kernel, grid)], (matmul.shape.key, tile)


def test_matmuls_are_the_shapes_that_the_lowering_looks_up_in_the_table(
    model: ir.Model, program: CudaProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: set[str] = set()
    choose = TileTable.choose

    def record(table: TileTable, shape: MatmulShape) -> Tile:
        looked_up.add(shape.key)
        return choose(table, shape)

    monkeypatch.setattr(TileTable, "choose", record)
    lower_to_launches(model, BUCKETS, "fp16", TileTable(sm=90))
    assert {matmul.shape.key for matmul in matmuls_of(program)} == looked_up


def test_a_batch_invariant_program_has_nothing_to_tune(program: CudaProgram) -> None:
    with pytest.raises(UsageError, match="batch-invariant: it has one tile per weight"):
        matmuls_of(program.model_copy(update={"batch_invariant": True}))


def test_a_program_with_codes_in_the_order_of_an_older_ingot_is_refused(program: CudaProgram) -> None:
    kernels = {
        key: kernel.model_copy(update={"constants": {**kernel.constants, "SPANS": 7}})
        if kernel.name == "matmul_int4"
        else kernel
        for key, kernel in program.kernels.items()
    }
    with pytest.raises(UsageError, match="the codes of its 4-bit weight are stored in the order of an older Ingot"):
        matmuls_of(program.model_copy(update={"kernels": kernels}))


def test_a_slice_of_longer_rows_is_measured_alone(program: CudaProgram) -> None:
    """Its result has memory for itself only: with the pitch of the longer rows it would be written beyond it."""
    matmul = matmuls_of(program)[0]
    place = SIGNATURES[matmul.kernel.name].index("out_stride")
    arguments = list(matmul.launch.arguments)
    arguments[place] = NumberArgument(value=4 * matmul.shape.n)
    slice_ = matmul.launch.model_copy(update={"arguments": tuple(arguments)})
    changed = program.programs[0].model_copy(update={"launches": (slice_,)})
    (found,) = matmuls_of(program.model_copy(update={"programs": (changed,)}))
    assert found.numbers["out_stride"] == matmul.shape.n


def test_candidates_are_distinct_and_keep_the_shape(program: CudaProgram) -> None:
    for matmul in matmuls_of(program):
        tiles = candidates(matmul.shape, 90)
        assert len(set(tiles)) == len(tiles) >= 4
        assert shape_of(matmul.kernel, matmul.launch) == matmul.shape
