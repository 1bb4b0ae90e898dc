"""Fixtures of tests on a GPU, with compiled kernels. Without a GPU all tests of this folder are skipped."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ingot.artifact import Artifact
from ingot.artifact.kv_geometry import KVType
from ingot.errors import EngineError
from ingot.pipeline.targets.cuda.lowering import lower_to_launches
from ingot.pipeline.targets.cuda.tiles import TileTable
from ingot.pipeline.targets.table import SMS
from ingot.runtime.cuda import cublaslt
from ingot.runtime.cuda.driver import driver
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.cuda.loading import runs_on
from ingot.runtime.options import EngineOptions
from tests.conftest import BuildArtifact
from tests.runtime.cuda.artifacts import LLAMA, LibraryTiles, buckets, model_of, seal_compiled

MakeExecutor = Callable[..., CudaExecutor]

LAUNCHES: dict[str, tuple[KVType, TileTable | None]] = {
    "float16": ("float16", None),
    "int8": ("int8", None),
    "cublaslt": ("float16", LibraryTiles()),
}


@pytest.fixture(scope="session")
def gpu_sm() -> int:
    """The SM to compile for; skips without a GPU, or with one that kernels are not compiled for."""
    try:
        device = driver.open_device()
    except EngineError as error:
        pytest.skip(f"needs a CUDA GPU: {error}")
    sm, name = device.sm, device.name
    device.close()
    fitting = [built for built in SMS if runs_on(built, sm)]
    if not fitting:
        pytest.skip(f"no kernels are compiled for {name} of SM {sm}")
    return max(fitting)


def require_cublaslt() -> Any:
    """The library's functions; the test is skipped where cuBLASLt is not installed."""
    try:
        return cublaslt.load_library()
    except EngineError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=LAUNCHES.values(), ids=list(LAUNCHES))
def launches(request: pytest.FixtureRequest, gpu_sm: int, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The tiny llama in float16, a KV pool of that precision: decoding 1 and 4 rows, 16 tokens of 4 sequences."""
    given: tuple[KVType, TileTable | None] = request.param
    kv, tiles = given
    if tiles:
        require_cublaslt()
    model = model_of(kv=kv, block_tokens=4)
    lowered = lower_to_launches(model, buckets(), "fp16", tiles)
    return seal_compiled(tmp_path_factory.mktemp("gpu") / "artifact", lowered, model, gpu_sm)


@pytest.fixture(scope="session")
def reference(build_unmeasured: BuildArtifact) -> Artifact:
    """The same model for onnxruntime, in float32."""
    return build_unmeasured("fp32-cpu", LLAMA)


@pytest.fixture
def make_executor(launches: Artifact) -> Iterator[MakeExecutor]:
    """make_executor(**options) -> CudaExecutor on the GPU, closed after the test."""
    made: list[CudaExecutor] = []

    def make(**options: Any) -> CudaExecutor:
        given = EngineOptions(**{"kv_blocks": 48, **options})
        made.append(CudaExecutor(launches, driver.open_device(), given))
        return made[-1]

    yield make
    for executor in made:
        executor.close()
