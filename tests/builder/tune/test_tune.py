"""The tuner on a GPU of known times: measurements, choices, the table."""

from pathlib import Path
from typing import Any, cast

import pytest

from ingot.artifact.programs.launch_program import CudaProgram, Kernel
from ingot.builder.tune.candidates import candidates, matmuls_of
from ingot.builder.tune.tune import Tuner, TuneSource, families_of, least_cost, ranked_families, require_gpu
from ingot.errors import EngineError, UsageError
from ingot.pipeline.targets.cuda.lowering import lower_to_launches
from ingot.pipeline.targets.cuda.tiles import TileTable, read_tile_table
from ingot.progress import progress_to
from ingot.runtime.cuda.driver.device import Device
from tests.builder.tune.gpu_times import wide
from tests.builder.tune.programs import BUCKETS, imported, program_of
from tests.data_paths import FIXTURES
from tests.simulators.fake_gpu import FakeGpu, FakeLibrary, FakeStopwatch, compile_nothing, no_library


def tuner(gpu: FakeGpu, **options: Any) -> Tuner:
    given = {"open_matmuls": no_library, **options}
    return Tuner(cast(Device, gpu), FakeStopwatch(gpu), compile_nothing, **given)


def test_the_fastest_tile_that_fits_is_chosen_and_written_to_the_table(program: CudaProgram, tmp_path: Path) -> None:
    gpu = FakeGpu(wide)
    tuning = tuner(gpu).tune(program, tmp_path / "tiles.json")
    assert not gpu.held
    table = read_tile_table(tmp_path / "tiles.json", (90,))
    assert table == tuning.table
    assert table.choices.keys() == {matmul.shape.key for matmul in matmuls_of(program)}
    shapes = {matmul.shape.key: matmul.shape for matmul in matmuls_of(program)}
    few = [tile for key, tile in table.choices.items() if shapes[key].rows == 1]
    assert {tile.columns for tile in few} == {128}
    assert {tile.num_stages for tile in few if not tile.direct} <= {3}
    assert all(choice.gain >= 1 for choice in tuning.choices)


def test_a_tile_with_another_result_is_left_out(program: CudaProgram, tmp_path: Path) -> None:
    gpu = FakeGpu(wide, wrong=lambda kernel: kernel.constants["TILE"] == 128)
    table = tuner(gpu).tune(program, tmp_path / "tiles.json").table
    safe = {key: shape_tile for key, shape_tile in table.choices.items() if shape_tile.columns == 128}
    measured = {matmul.shape.key: candidates(matmul.shape, 90)[0] for matmul in matmuls_of(program)}
    assert all(measured[key].columns == 128 for key in safe)


def test_matmuls_that_take_most_of_a_step_are_measured_first(program: CudaProgram) -> None:
    ranked = ranked_families(program)
    assert sorted(map(str, ranked)) == sorted(map(str, families_of(matmuls_of(program))))
    largest = max(matmuls_of(program), key=lambda matmul: least_cost(matmul.shape))
    assert any(matmul.shape.key == largest.shape.key for matmul in ranked[0])
    shape = largest.shape.model_copy(update={"rows": 1, "bits": 4})
    assert least_cost(shape) == shape.n * shape.columns / 2  # bytes of the weight
    many = shape.model_copy(update={"rows": 4096})
    assert least_cost(many) == pytest.approx(2 * 4096 * shape.n * shape.columns / 300)  # operations


def test_buckets_of_few_rows_share_one_order_of_sums_unless_free(program: CudaProgram, tmp_path: Path) -> None:
    def contrary(kernel: Kernel, grid: tuple[int, int, int]) -> float:
        """One row is faster in direct tiles, more rows in others."""
        rows, is_direct = int(kernel.constants["TILE_ROWS"]), kernel.name == "matmul_int4"
        return 1e-6 * ((1 if rows == 8 else 10) if is_direct else (5 if rows == 16 else 2))

    for free, orders in ((False, 1), (True, 2)):
        table = tuner(FakeGpu(contrary), free_order=free).tune(program, tmp_path / f"{free}.json").table
        family = max(families_of(matmuls_of(program)), key=lambda one: one[0].shape.columns * (len(one) > 1))
        assert len(family) > 1
        assert len({table.choices[one.shape.key].direct for one in family}) == orders


def test_an_interrupted_run_keeps_its_measurements_and_resumes(program: CudaProgram, tmp_path: Path) -> None:
    file, families = tmp_path / "tiles.json", ranked_families(program)

    def interrupt(name: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), progress_to(interrupt):
        tuner(FakeGpu(wide)).tune(program, file)
    kept = read_tile_table(file, (90,)).choices
    assert len(kept) == sum(map(len, families[:2]))
    tuning = tuner(FakeGpu(wide)).tune(program, file)
    assert tuning.held == len(kept)
    assert kept.items() <= tuning.table.choices.items()
    again = FakeGpu(wide)
    assert tuner(again).tune(program, file).choices == []
    assert again.launches == 0


def test_a_table_or_a_program_of_another_gpu_is_refused(program: CudaProgram, tmp_path: Path) -> None:
    file = tmp_path / "tiles.json"
    file.write_text(TileTable(sm=90, device="another GPU").model_dump_json())
    with pytest.raises(UsageError, match="was measured on another GPU, and this is a GPU; name another file"):
        tuner(FakeGpu(wide)).tune(program, file)
    with pytest.raises(UsageError, match="the program is for SM 80, 86, and a GPU has SM 90; tune it on a GPU of"):
        require_gpu((80, 86), cast(Device, FakeGpu(wide)))


def test_a_safe_tile_that_does_not_fit_the_gpu_is_an_error(program: CudaProgram, tmp_path: Path) -> None:
    class Small(FakeGpu):
        def load_kernel(self, *given: Any) -> Kernel:
            raise EngineError("too much shared memory")

    with pytest.raises(EngineError, match="shared memory"):
        tuner(Small(wide)).tune(program, tmp_path / "tiles.json")


def test_a_recipes_program_is_lowered_without_compiling_it(tmp_path: Path) -> None:
    rows = ("gpu.decode_rows=[1, 2]", "gpu.prefill_rows=[16]", "engine.max_batch_tokens=16")
    given = TuneSource.of("int4-cuda", (f"checkpoint={FIXTURES / 'checkpoints' / 'llama'}", *rows))
    assert given.sms == (90,)
    program = given.program()
    assert [one.name for one in program.programs] == ["decode-1", "decode-2", "ragged-16"]


@pytest.mark.parametrize("source", ["fp32-cpu", "demo"])
def test_a_program_without_tiles_is_refused(source: str) -> None:
    with pytest.raises(UsageError, match=r"is for the target cpu; only programs of the targets cuda-smXX have tiles"):
        TuneSource.of(source)


@pytest.mark.parametrize(("seconds", "free", "least_rows"), [(1e-9, False, 65), (1e-9, True, 1), (1.0, True, 999)])
def test_a_library_is_chosen_where_it_is_fastest_and_its_order_of_sums_is_allowed(
    tmp_path: Path, seconds: float, free: bool, least_rows: int
) -> None:
    model, gpu = imported(), FakeGpu(wide)
    program = program_of(model, lower_to_launches(model, BUCKETS[1:], "fp16", TileTable(sm=90)))
    library = FakeLibrary(gpu, seconds, lacks=96)
    made = tuner(gpu, free_order=free, open_matmuls=lambda device, stream: library)
    table = made.tune(program, tmp_path / "tiles.json").table
    plain = [matmul.shape for matmul in matmuls_of(program) if matmul.shape.kernel == "matmul"]
    assert {shape.rows > 64 for shape in plain} == {True, False}
    chosen = {key for key, tile in table.choices.items() if tile.library}
    assert 96 in {shape.n for shape in plain}
    assert chosen == {shape.key for shape in plain if shape.rows >= least_rows and shape.n != 96}
    assert all(matmul.x.type == "fp16" for matmul in library.matmuls)
    assert library.closed
