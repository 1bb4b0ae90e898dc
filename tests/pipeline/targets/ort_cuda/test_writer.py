"""An artifact for onnxruntime's CUDA provider, built from a recipe. See test_cubins.py for compiled kernels."""

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
from ingot.cli.main import run
from ingot.errors import EngineError, RecipeError
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.targets.cuda import writer as cuda_writer
from ingot.runtime import Engine
from tests.conftest import BuildArtifact
from tests.data_paths import FIXTURES
from tests.simulators.fake_gpu import compile_nothing

LLAMA = FIXTURES / "checkpoints" / "llama"
SMALL = ("engine.max_batch_tokens=32", "gpu.decode_rows=[1]", "gpu.sms=[80, 90]")
_STORED = {"fp16": "F16", "u8": "U8"}


@pytest.fixture(scope="module")
def artifact(build_unmeasured: BuildArtifact) -> Artifact:
    pytest.importorskip("triton", reason="the target requires it: pip install '.[cuda]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_writer, "compile_kernels", compile_nothing)
        return build_unmeasured("int4-ort-cuda", LLAMA, *SMALL, "passes.quantize-weights.block_size=16")


@pytest.fixture(scope="module")
def program(artifact: Artifact) -> CudaProgram:
    assert artifact.manifest.program.launches is not None
    return read_cuda_program(artifact.file(artifact.manifest.program.launches))


def calls(program: CudaProgram) -> list[SegmentCall]:
    return [call for one in program.programs for call in one.segment_calls]


def test_layers_share_a_file_and_every_sm_has_its_cubins(artifact: Artifact) -> None:
    manifest = artifact.manifest
    assert (manifest.engine, manifest.target, manifest.kv.dtype) == ("onnxruntime-cuda", "ort-cuda", "float16")
    names = {Path(name).name for name in manifest.files if name.startswith("program/")}
    segments = {f"segment-{number:03}.onnx" for number in range(4)}  # three layers, with two between attentions
    cubins = {Path(cubins_file(sm)).name for sm in (80, 90)}
    assert names == {*segments, *cubins, "launches.json", "weights.safetensors"}


def test_one_file_serves_all_buckets_and_weights_are_stored_once(artifact: Artifact, program: CudaProgram) -> None:
    with safe_open(artifact.file("program/weights.safetensors"), "np") as file:
        stored = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    given = [one for call in calls(program) for one in call.inputs.values() if isinstance(one, WeightArgument)]
    assert all(stored[one.name] == _STORED[one.type] for one in given)
    assert {one.name for one in given} == {name for name in stored if not name.startswith(("padding", "rope"))}
    layers = [call for call in calls(program) if call.file.endswith("001.onnx")]
    assert [call.shapes["x0"][0] for call in layers] == [1, 1, 32, 32]
    assert all(artifact.file(call.file).stat().st_size < 8000 for call in layers)


def test_programs_with_onnxruntimes_calls_are_not_captured(program: CudaProgram) -> None:
    assert {call.engine for call in calls(program)} == {"onnxruntime"}
    assert not any(one.is_capturable for one in program.programs)


def test_inspect_shows_calls_among_launches(artifact: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    run(["inspect", str(artifact.path), "--program", "--bucket", "decode-1"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "run by onnxruntime-cuda" in shown
    assert "launched one by one" in shown
    assert "program/segment-001.onnx" in shown
    assert "profile" not in shown


def test_without_bindings_the_engine_says_what_to_install(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(EngineError, match=r"needs cuda-bindings .*pip install .*\[cuda\]'"):
        Engine.load(artifact)


def test_a_recipe_without_sms_is_refused_with_the_choice() -> None:
    with pytest.raises(RecipeError, match=r"target ort-cuda requires gpu.sms, .* choose from 80, 86, 89, 90, 120"):
        load_recipe("fp16-cuda", ["target=ort-cuda"])
