"""Loading a program: weights through small buffers, the memory budget, and errors."""

import logging
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.artifact import Artifact, KVGeometry, ModelFacts, Program
from ingot.artifact.launch_program import WEIGHTS_FILE, CudaProgram
from ingot.errors import ArtifactError, EngineError, UsageError
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.cuda.kv_pool import device_pool_size
from ingot.runtime.cuda.loading import choose_sm, read_program, runs_on
from ingot.runtime.cuda.programs import NoBinder
from ingot.runtime.cuda.weights import upload_weights
from ingot.runtime.options import EngineOptions
from tests.runtime.cuda.conftest import ChangeArtifact, MakeExecutor
from tests.simulators.interpreted_device import InterpretedDevice

KV = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=32, block_tokens=16)
MODEL = ModelFacts(family="llama", num_layers=2, hidden_size=64, vocab_size=128, context_tokens=64, num_parameters=1000)
GIB = 2**30


@pytest.mark.parametrize("staging_bytes", [256, 1024, 2**20])
def test_weights_arrive_whole_through_buffers_smaller_than_they_are(tmp_path: Path, staging_bytes: int) -> None:
    rng = np.random.default_rng(0)
    tensors = {f"w{size}": rng.integers(0, 256, size).astype(np.uint8) for size in (1, 700, 256, 3000, 5, 0)}
    save_file(tensors, tmp_path / "weights.safetensors")
    device = InterpretedDevice()
    weights = upload_weights(device, device.make_stream(), tmp_path / "weights.safetensors", staging_bytes)
    for name, tensor in tensors.items():
        assert weights.addresses[name] % 256 == 0
        if tensor.size:
            np.testing.assert_array_equal(device.view(weights.addresses[name], tensor.size), tensor)


def test_the_pool_takes_free_memory_except_the_reserve_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    device = InterpretedDevice(GIB)
    many = device_pool_size(MODEL, KV, device, kv_blocks=None, kv_bytes=None, max_sequences=2**20, graph_nodes=1000)
    assert 0.6 * GIB < many.num_blocks * KV.block_bytes < 0.75 * GIB
    assert "1.1 GB free of 1.1 GB" in caplog.text
    few = device_pool_size(MODEL, KV, device, kv_blocks=None, kv_bytes=None, max_sequences=3, graph_nodes=1000)
    assert few.num_blocks == 3 * 4
    given = device_pool_size(
        MODEL, KV, device, max_sequences=3, kv_blocks=None, kv_bytes=5 * KV.block_bytes, graph_nodes=0
    )
    assert given.num_blocks == 5


def test_a_gpu_without_memory_for_a_block_is_refused_with_its_free_memory() -> None:
    with pytest.raises(EngineError, match=r"no KV block of .* fits on an interpreter: 104.9 MB free of 104.9 MB, 2"):
        device_pool_size(
            MODEL, KV, InterpretedDevice(100 * 2**20), kv_blocks=None, kv_bytes=None, max_sequences=1, graph_nodes=0
        )


def test_a_pool_that_does_not_fit_is_refused_and_the_device_closed(make_executor: MakeExecutor) -> None:
    device = InterpretedDevice(2**20)
    with pytest.raises(
        EngineError, match=r"a KV pool of 4000 blocks \(16000 tokens\) takes .* ask for fewer KV blocks"
    ):
        make_executor(device, kv_blocks=4000)
    assert device.closed
    with pytest.raises(UsageError, match="give one of them"):
        make_executor(kv_bytes=5)


@pytest.mark.parametrize(
    ("built", "sm", "runs"),
    [
        (80, 80, True),
        (80, 86, True),
        (80, 89, True),
        (89, 86, False),
        (80, 90, False),
        (90, 90, True),
        (120, 121, False),
    ],
)
def test_compiled_code_runs_on_its_major_version_from_its_minor_version_on(built: int, sm: int, runs: bool) -> None:
    assert runs_on(built, sm) == runs


def program_for(launches: Artifact, *sms: int, tuned_on: str | None = None) -> CudaProgram:
    return read_program(launches).model_copy(update={"cubins": {sm: {} for sm in sms}, "tuned_on": tuned_on})


def test_the_best_of_several_sms_is_chosen_and_an_unsupported_one_refused(
    launches: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    device = InterpretedDevice()
    device.sm = 89
    assert choose_sm(program_for(launches, 80, 86, 90), device) == 86
    assert "kernels for SM 86 run on an interpreter, which has SM 89" in caplog.text
    device.sm = 120
    with pytest.raises(
        EngineError, match=r"compiled for SM 80, 90, and an interpreter has SM 120; build .* cuda-sm120, or"
    ):
        choose_sm(program_for(launches, 80, 90), device)


def test_tiles_of_another_gpu_are_a_warning(launches: Artifact, caplog: pytest.LogCaptureFixture) -> None:
    choose_sm(program_for(launches, 90, tuned_on="NVIDIA H100"), InterpretedDevice())
    assert "measured on NVIDIA H100, and this is an interpreter" in caplog.text


def test_an_artifact_whose_files_do_not_fit_is_refused(
    launches: Artifact, change: ChangeArtifact, make_executor: MakeExecutor
) -> None:
    decode_alone = tuple(one for one in read_program(launches).programs if one.attention == "decode")
    with pytest.raises(ArtifactError, match="no bucket for prompts"):
        make_executor(artifact=change(programs=decode_alone))
    with pytest.raises(ArtifactError, match="KV geometry is not the manifest's"):
        make_executor(artifact=change(kv=KV))
    with pytest.raises(ArtifactError, match=r"launches.json: sms: .* build the artifact again"):
        make_executor(artifact=change(sms=()))
    without = launches.manifest.model_copy(update={"program": Program()})
    with pytest.raises(ArtifactError, match="has no launch program for a GPU"):
        make_executor(artifact=Artifact(launches.path, without))


def test_weights_that_are_missing_or_of_another_type_are_refused(
    change: ChangeArtifact, make_executor: MakeExecutor
) -> None:
    artifact = change()
    tensors = load_file(artifact.path / WEIGHTS_FILE)
    name = next(name for name in tensors if "norm" in name)
    save_file({**tensors, name: tensors[name].astype(np.float16)}, artifact.path / WEIGHTS_FILE)
    with pytest.raises(ArtifactError, match=f"reads the weight '{name}' as F32, and the weights file stores it as F16"):
        make_executor(artifact=artifact)
    del tensors[name]
    save_file(tensors, artifact.path / WEIGHTS_FILE)
    with pytest.raises(ArtifactError, match="the weights file does not contain it"):
        make_executor(artifact=artifact)


class WatchedSegments(NoBinder):
    closed = False

    def close(self) -> None:
        self.closed = True


def test_other_engines_are_closed_when_loading_fails(launches: Artifact) -> None:
    segments, device = WatchedSegments(), InterpretedDevice(2**20)
    with pytest.raises(EngineError, match="MB"):
        CudaExecutor(launches, device, EngineOptions(kv_blocks=10**6), lambda *_: segments)
    assert segments.closed
    assert device.closed
