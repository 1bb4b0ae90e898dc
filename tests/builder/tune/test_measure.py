"""Times of one matmul on a fake GPU, and the check of its result."""

from typing import cast

import pytest

from ingot.artifact.programs.launch_program import CudaProgram, Kernel
from ingot.builder.tune.candidates import Matmul, candidates, matmuls_of, with_tile
from ingot.builder.tune.measure import MatmulTimer, library_matmul
from ingot.errors import EngineError
from ingot.pipeline.targets.cuda.tiles import Tile
from ingot.runtime.cuda.driver.device import Device, Stream
from tests.builder.tune.gpu_times import wide
from tests.simulators.fake_gpu import FakeGpu, FakeLibrary, FakeStopwatch, compile_nothing

BYTES_PER_SECOND = 1e9


@pytest.fixture
def matmul(program: CudaProgram) -> Matmul:
    """A matmul of 16-bit floats and few rows."""
    return next(one for one in matmuls_of(program) if one.shape.kernel == "matmul")


def timer(gpu: FakeGpu, matmul: Matmul) -> MatmulTimer:
    return MatmulTimer(cast(Device, gpu), FakeStopwatch(gpu), cast(Stream, None), matmul, BYTES_PER_SECOND)


def seconds(made: MatmulTimer, matmul: Matmul, tile: Tile) -> float | None:
    return made.time(tile, compile_nothing({"0": with_tile(matmul, tile)[0]}, 90)["0"])


def test_the_time_is_the_kernels_and_that_of_reading_split_k_partials(matmul: Matmul) -> None:
    gpu = FakeGpu(wide)
    made = timer(gpu, matmul)
    whole = candidates(matmul.shape, 90)[0].model_copy(update={"depth": 16})
    for tile, splits in ((whole, 1), (whole.model_copy(update={"splits": 2}), 2)):
        kernel, grid = with_tile(matmul, tile)
        assert kernel.constants["SPLITS"] == splits
        partials = matmul.shape.rows * matmul.shape.n * 4 * splits if splits > 1 else 0
        assert seconds(made, matmul, tile) == pytest.approx(wide(kernel, grid) + partials / BYTES_PER_SECOND)
    made.close()
    assert not gpu.held


def test_a_tile_with_another_result_than_the_first_has_no_time(matmul: Matmul) -> None:
    first = candidates(matmul.shape, 90)[0]
    gpu = FakeGpu(wide, wrong=lambda kernel: kernel.constants["TILE"] != first.columns)
    made = timer(gpu, matmul)
    assert seconds(made, matmul, first) is not None
    assert seconds(made, matmul, first.model_copy(update={"columns": 2 * first.columns})) is None


def test_a_tile_that_does_not_fit_has_no_time_but_the_first_must_fit(matmul: Matmul) -> None:
    class Small(FakeGpu):
        def load_kernel(self, cubin: object, kernel: Kernel, facts: object) -> Kernel:
            if kernel.num_stages > 3:
                raise EngineError("too much shared memory")
            return kernel

    first = candidates(matmul.shape, 90)[0].model_copy(update={"num_stages": 3})
    large = first.model_copy(update={"num_stages": 5})
    made = timer(Small(wide), matmul)
    assert seconds(made, matmul, first) is not None
    assert seconds(made, matmul, large) is None
    with pytest.raises(EngineError, match="too much shared memory"):
        seconds(timer(Small(wide), matmul), matmul, large)


def test_a_library_has_its_own_time_or_none_without_a_kernel(matmul: Matmul) -> None:
    gpu = FakeGpu(wide)
    made = timer(gpu, matmul)
    assert seconds(made, matmul, candidates(matmul.shape, 90)[0]) is not None
    assert made.time_library(FakeLibrary(gpu, 2e-6)) == pytest.approx(2e-6)
    assert made.time_library(FakeLibrary(gpu, 2e-6, lacks=matmul.shape.n)) is None


def test_a_matmul_for_a_library_has_the_kernels_shape_types_and_strides(matmul: Matmul) -> None:
    made = library_matmul(matmul, matmul.kernel)
    assert (made.rows, made.n, made.columns) == (matmul.shape.rows, matmul.shape.n, matmul.shape.columns)
    assert (made.x_stride, made.out_stride) == (matmul.numbers["x_stride"], matmul.numbers["out_stride"])
    assert made.x.type == made.weight.type == "fp16"
    assert (made.bias is not None) == bool(matmul.kernel.constants["HAS_BIAS"])
