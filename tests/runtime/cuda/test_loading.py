"""Loading a program: weights through small buffers, the memory budget, and errors."""

import logging

import pytest

from ingot.artifact import Artifact, KVGeometry, Program
from ingot.artifact.programs.launch_checks import read_launches
from ingot.artifact.programs.launch_program import CudaProgram
from ingot.errors import ArtifactError, EngineError
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.cuda.loading import choose_sm, runs_on
from ingot.runtime.cuda.programs import NoBinder
from ingot.runtime.options import EngineOptions
from tests.each_case import each_case
from tests.runtime.cuda.conftest import ChangeArtifact, MakeExecutor
from tests.simulators.interpreted_device import InterpretedDevice

KV = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=32, block_tokens=16)


@each_case(
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
    return read_launches(launches).model_copy(update={"cubins": {sm: {} for sm in sms}, "tuned_on": tuned_on})


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
    decode_alone = tuple(one for one in read_launches(launches).programs if one.attention == "decode")
    with pytest.raises(ArtifactError, match="no bucket for prompts"):
        make_executor(artifact=change(programs=decode_alone))
    with pytest.raises(ArtifactError, match="KV geometry is not the manifest's"):
        make_executor(artifact=change(kv=KV))
    with pytest.raises(ArtifactError, match=r"launches.json: sms: .* build the artifact again"):
        make_executor(artifact=change(sms=()))
    without = launches.manifest.model_copy(update={"program": Program()})
    with pytest.raises(ArtifactError, match="has no launch program for a GPU"):
        make_executor(artifact=Artifact(launches.path, without))


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
