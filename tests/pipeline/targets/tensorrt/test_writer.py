"""An artifact with plans, built without a GPU: its files, and how calls, plans and weights fit together."""

import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from ingot.artifact import Artifact
from ingot.artifact.programs.launch_program import (
    CudaProgram,
    SegmentCall,
    WeightArgument,
    cubins_file,
    read_cuda_program,
)
from ingot.artifact.programs.plan_facts import PLANS_FILE, PlanFacts, ProgramPlans
from ingot.cli.main import run
from ingot.errors import EngineError, RecipeError, UsageError
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.targets.cuda import writer as cuda_writer
from ingot.pipeline.targets.table import get_target
from ingot.pipeline.targets.tensorrt.writer import write_tensorrt_program
from ingot.runtime import Engine
from tests.conftest import BuildArtifact
from tests.data_paths import FIXTURES
from tests.pipeline.targets.tensorrt.models import prepared
from tests.simulators.fake_gpu import compile_nothing

LLAMA = FIXTURES / "checkpoints" / "llama"
SMALL = ("engine.max_batch_tokens=32", "gpu.decode_rows=[1]", "gpu.sms=[89]")
_STORED = {"fp16": "F16", "i8": "I8", "fp32": "F32"}

pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install 'ingot[cuda]'")
pytest.importorskip("tensorrt_rtx", reason="plans are built by TensorRT-RTX: pip install 'ingot[tensorrt]'")


@pytest.fixture(scope="module")
def artifact(build_unmeasured: BuildArtifact) -> Artifact:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_writer, "compile_kernels", compile_nothing)
        return build_unmeasured("fp16-tensorrt", LLAMA, *SMALL)


@pytest.fixture(scope="module")
def program(artifact: Artifact) -> CudaProgram:
    assert artifact.manifest.program.launches is not None
    return read_cuda_program(artifact.file(artifact.manifest.program.launches))


@pytest.fixture(scope="module")
def plans(artifact: Artifact) -> dict[str, PlanFacts]:
    read = ProgramPlans.model_validate_json(artifact.file(PLANS_FILE).read_bytes())
    return {plan.file: plan for plan in read.plans}


def calls(program: CudaProgram) -> list[tuple[int, SegmentCall]]:
    return [(one.rows, step) for one in program.programs for step in one.launches if isinstance(step, SegmentCall)]


def test_the_manifest_names_target_plans_cubins_and_tools(artifact: Artifact) -> None:
    manifest = artifact.manifest
    assert (manifest.engine, manifest.target, manifest.kv.dtype) == ("tensorrt", "tensorrt", "float16")
    assert {"triton", "tensorrt-rtx"} <= manifest.versions.keys()
    names = {Path(name).name for name in manifest.files if name.startswith("program/")}
    plans = {f"segment-{number:03}.plan" for number in range(4)}
    assert names == {*plans, "plans.json", "launches.json", "weights.safetensors", Path(cubins_file(89)).name}


def test_every_call_fits_its_plan_and_finds_its_weights(
    artifact: Artifact, program: CudaProgram, plans: dict[str, PlanFacts]
) -> None:
    with safe_open(artifact.file("program/weights.safetensors"), "np") as file:
        stored = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    for _, call in calls(program):
        profile = plans[call.file].profiles[call.profile]
        assert profile.least_rows <= call.shapes["x0"][0] <= profile.most_rows
        assert call.shapes.keys() == call.inputs.keys()
        for argument in call.inputs.values():
            if isinstance(argument, WeightArgument):
                assert stored[argument.name] == _STORED[argument.type]
    assert {call.file for _, call in calls(program)} == plans.keys()


def test_layers_share_a_plan_and_a_decode_bucket_has_a_profile_of_its_own(
    program: CudaProgram, plans: dict[str, PlanFacts]
) -> None:
    assert [plan.segments for plan in plans.values()] == [1, 2, 1, 1]
    layers = [(rows, call.profile) for rows, call in calls(program) if call.file.endswith("001.plan")]
    assert layers == [(1, 0), (1, 0), (32, 1), (32, 1)]


def test_inspect_shows_plans_with_their_operators(artifact: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    run(["inspect", str(artifact.path), "--program"])
    shown = capsys.readouterr().out
    assert "Plans of tensorrt-rtx" in shown
    assert "2 FcAdd" in shown


def test_without_bindings_the_engine_says_what_to_install(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(EngineError, match=r"needs cuda-bindings .*pip install 'ingot\[cuda\]'"):
        Engine.load(artifact)


def test_an_sm_of_another_target_is_refused_in_the_recipe() -> None:
    with pytest.raises(
        RecipeError, match=r"gpu.sms names 90; target tensorrt builds for .*Target cuda-sm90 builds for"
    ):
        load_recipe("fp16-tensorrt", ["gpu.sms=[90]"])


def test_32_bit_activations_are_refused(tmp_path: Path) -> None:
    recipe = load_recipe("fp16-tensorrt", ["gpu.activations=float32"])
    with pytest.raises(UsageError, match=r"target tensorrt computes in 16 bits; set gpu.activations to float16 or bf"):
        write_tensorrt_program(prepared(), tmp_path, recipe, get_target("tensorrt"))
