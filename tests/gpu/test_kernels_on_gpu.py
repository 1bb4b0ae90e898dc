"""Compiled kernels on a GPU: every case against numpy, and every launch of small models against the interpreter."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulators.triton_interpreter import use_interpreter

use_interpreter()

from benchmarks.gpu.device import Gpu  # noqa: E402
from benchmarks.gpu.programs.cases import CASES, Case, case_artifact  # noqa: E402
from benchmarks.gpu.proofs.check import compare, worst  # noqa: E402
from benchmarks.gpu.proofs.kernel_cases import (  # noqa: E402
    CaseRunner,
    caught,
    is_wide,
    limit_on_gpu,
    runs_on,
    write_kernel_cases,
)

from ingot.pipeline.targets.table import FLOAT8_FROM  # noqa: E402
from ingot.runtime.cuda.driver.driver import open_device  # noqa: E402
from tests.kernels.all_cases import all_cases  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def runner(gpu_sm: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaseRunner]:
    """The cases' kernels, compiled for the GPU."""
    file = tmp_path_factory.mktemp("kernels") / "cases.zip"
    write_kernel_cases(file, gpu_sm)
    device = open_device()
    yield CaseRunner(lambda: device, file)
    device.close()


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_a_kernel_is_as_close_to_float64_as_its_precision_allows(case: Any, runner: CaseRunner, gpu_sm: int) -> None:
    if not runs_on(case, gpu_sm):
        pytest.skip(f"SM {gpu_sm} lacks instructions of {case.kernel}")
    for narrow in (False, True) if is_wide(case) else (False,):
        with caught(runner.run, narrow):
            assert case.errors()[1] <= limit_on_gpu(case, narrow), narrow


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_launch_of_a_model_writes_what_the_interpreter_does(
    case: Case, gpu_sm: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpu_sm < FLOAT8_FROM and "fp8" in case.name:
        pytest.skip(f"SM {gpu_sm} has no 8-bit floats")
    monkeypatch.setenv("INGOT_CUDA_BLOCKING", "1")
    records = worst(compare(case_artifact(case, tmp_path, gpu_sm), Gpu()))
    assert [record for record in records if not record["within"]] == []
