"""The CUDA runtime on a device in host memory that interprets kernels."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from ingot.artifact import Artifact
from ingot.artifact.programs.launch_checks import read_launches
from ingot.artifact.programs.launch_program import LAUNCHES_FILE
from ingot.runtime.options import EngineOptions
from tests.conftest import BuildArtifact
from tests.data_paths import ROOT
from tests.simulators.triton_interpreter import use_interpreter

use_interpreter()

from ingot.runtime.cuda.executor import CudaExecutor  # noqa: E402
from tests.runtime.cuda.artifacts import LLAMA, buckets, model_of, write_artifact  # noqa: E402
from tests.simulators.driver_scenarios import image  # noqa: E402
from tests.simulators.interpreted_device import InterpretedDevice  # noqa: E402

MakeExecutor = Callable[..., CudaExecutor]
ChangeArtifact = Callable[..., Artifact]
SHIM = ROOT / "tests" / "simulators" / "driver_shim.c"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama's first layer, because the interpreter is slow."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = json.loads((LLAMA / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    tensors = load_file(LLAMA / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers" not in name or "layers.0." in name}
    save_file(kept, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def launches(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Buckets for decoding 1 and 4 sequences, and for 8 tokens of 4 sequences; blocks of 4 tokens."""
    model = model_of(checkpoint, block_tokens=4)
    return write_artifact(model, tmp_path_factory.mktemp("launches") / "artifact", buckets(ragged=8))


@pytest.fixture(scope="session")
def reference(checkpoint: Path, build_unmeasured: BuildArtifact) -> Artifact:
    """The same model for onnxruntime."""
    return build_unmeasured("fp32-cpu", checkpoint, "cpu.engine=onnxruntime")


@pytest.fixture
def change(launches: Artifact, tmp_path: Path) -> ChangeArtifact:
    """change(**fields) -> a copy with other fields of its launches, to be changed further: digests are not checked."""

    def copied(**fields: object) -> Artifact:
        shutil.copytree(launches.path, tmp_path, dirs_exist_ok=True)
        program = read_launches(launches).model_copy(update=fields)
        (tmp_path / LAUNCHES_FILE).write_text(program.model_dump_json())
        return Artifact(tmp_path, launches.manifest)

    return copied


@pytest.fixture
def make_executor(launches: Artifact) -> Iterator[MakeExecutor]:
    """make_executor(device=None, artifact=None, **options) -> CudaExecutor, closed after the test."""
    made: list[CudaExecutor] = []

    def make(device: InterpretedDevice | None = None, artifact: Artifact | None = None, **options: Any) -> CudaExecutor:
        given = EngineOptions(**{"kv_blocks": 24, **options})
        made.append(CudaExecutor(artifact or launches, device or InterpretedDevice(), given))
        return made[-1]

    yield make
    for executor in made:
        executor.close()


@pytest.fixture(scope="session")
def driver_scenarios(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Result of each scenario of tests/simulators/driver_scenarios.py, with a shim library in place of the driver."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings are not installed: pip install '.[cuda]'")
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
