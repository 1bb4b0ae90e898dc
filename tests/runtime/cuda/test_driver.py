"""The driver code through cuda-bindings, with a shim library in place of the driver."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.options import EngineOptions
from tests.data_paths import ROOT
from tests.runtime.cuda.artifacts import buckets, model_of, write_artifact
from tests.runtime.cuda.batches import Growing, token_ids
from tests.simulators.driver_scenarios import image
from tests.simulators.interpreted_device import InterpretedDevice

SHIM = ROOT / "tests" / "simulators" / "driver_shim.c"


@pytest.fixture(scope="module")
def said(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Result of each scenario."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings are not installed: pip install 'ingot[cuda]'")
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is not installed, which compiles the shim")
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, SHIM], check=True)
    model = model_of(checkpoint, block_tokens=4)
    artifact = write_artifact(model, folder / "launches", buckets((1,), ragged=8), compiled=image)
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulators.driver_scenarios", artifact.path],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_memory_copies_and_launches_reach_the_driver_with_their_arguments(said: dict[str, Any]) -> None:
    found = said["calls"]
    assert found["facts"] == ["a shim", 90, 4096]
    assert found["copied"] == [*range(16, 32), *[0] * 16]
    once = [5, 6, 7, 256, 64 * 1024, 64, -3, 2, 0, 0]  # grid, threads, shared, arguments, two null pointers
    assert found["seen"] == [once] * 3
    assert found["before_replay"] == 1  # nothing runs during a capture
    assert "rows 4 x 16" in found["log"]
    assert "attribute 8 of scale_rows = 65536" in found["log"]
    loaded, captured = (found["log"].index(line) for line in ("attribute 4 of scale_rows", "begin capture mode 1"))
    assert loaded < captured  # the driver loads code at the first query
    assert [line for line in found["log"] if "capture" in line] == ["begin capture mode 1", "end capture of 2"]


def test_closing_frees_everything_except_pinned_memory_in_use(said: dict[str, Any]) -> None:
    found = said["calls"]
    assert found["used"] == 0
    assert "unpin" not in found["log"]
    assert found["after"] == ["unpin", "unpin", "release"]


def test_the_executor_through_the_driver_has_the_interpreted_devices_logits(
    said: dict[str, Any], launches: Any
) -> None:
    device = InterpretedDevice()
    executor = CudaExecutor(launches, device, EngineOptions(kv_blocks=8))
    sequences = Growing([token_ids(7)], [[3, 1]])
    for count, logits in zip((5, 1, 1), said["executor"]["logits"], strict=True):
        np.testing.assert_array_equal(executor.forward(sequences.step([count])), np.array(logits, np.float32))
    executor.close()
    assert said["executor"]["used"] == 0
    assert said["executor"]["moved"]  # a block, by another thread
    assert sum(line.startswith("replay") for line in said["executor"]["log"]) == device.num_replays


MESSAGES = {
    "no_gpu": "no GPU can be used: CUDA_ERROR_NO_DEVICE (failed): no NVIDIA GPU is visible",
    "old_driver": "the driver supports CUDA 12.4; kernels for a shim (SM 120) need CUDA 12.8: update NVIDIA's driver",
    "missing_function": "capturing a graph: the driver lacks a function that cuda-bindings need",
    "full_gpu": "the arena takes 4.2 MB, and a shim has 3.1 MB of 3.1 MB free; ask for fewer KV blocks",
    "other_gpu": "kernels are compiled for SM 90, and a shim has SM 89; build it for the target cuda-sm89",
}


@pytest.mark.parametrize("scenario", MESSAGES)
def test_unusable_gpus_and_drivers_are_refused_with_advice(said: dict[str, Any], scenario: str) -> None:
    assert MESSAGES[scenario] in said[scenario]


def test_a_refused_launch_names_kernel_and_node_and_leaves_the_stream_usable(said: dict[str, Any]) -> None:
    for message in said["refused_launch"]:
        assert message.startswith(
            "launching scale_rows for 'layers.3.norm', grid (1, 1, 1): CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
        )


def test_a_failure_that_loses_the_context_is_reported_by_later_calls(said: dict[str, Any]) -> None:
    first, second = said["lost_context"]
    assert first.startswith("a step: CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access); the GPU's context is lost")
    assert "INGOT_CUDA_BLOCKING=1" in first
    assert second.startswith("the next: the GPU's context was lost before (a step: CUDA_ERROR_ILLEGAL_ADDRESS")


def test_kernels_that_the_gpu_cannot_run_are_refused_by_name(said: dict[str, Any]) -> None:
    image_, shared, symbol = said["bad_kernels"]
    assert image_.startswith("loading the kernel scale_rows: CUDA_ERROR_INVALID_IMAGE (failed): the driver rejects")
    assert shared.startswith(
        "the kernel scale_rows needs 102400 bytes of shared memory, and the GPU gives a block 101376"
    )
    assert symbol.startswith("loading the kernel scale_rows: CUDA_ERROR_NOT_FOUND")
