"""Plans built without a GPU: shared, fused, cached, refused; and how calls, plans and weights fit in an artifact."""

import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from safetensors import safe_open

from ingot.artifact import Artifact
from ingot.artifact.programs.launch_program import (
    ActivationType,
    CudaProgram,
    SegmentCall,
    WeightArgument,
    cubins_file,
    read_cuda_program,
)
from ingot.artifact.programs.plan_facts import PLANS_FILE, PlanFacts, ProgramPlans, read_plan_header
from ingot.cli.main import run
from ingot.errors import BuildError, EngineError, RecipeError, UsageError
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.targets.cuda import writer as cuda_writer
from ingot.pipeline.targets.table import get_target
from ingot.pipeline.targets.tensorrt import writer
from ingot.pipeline.targets.tensorrt.library import load_library
from ingot.pipeline.targets.tensorrt.plan_builder import PlanCache, build_or_recall
from ingot.pipeline.targets.tensorrt.plan_report import check_plan
from ingot.pipeline.targets.tensorrt.plan_request import PlanRequest, Profile
from ingot.pipeline.targets.tensorrt.plan_settings import PlanSettings
from ingot.pipeline.targets.tensorrt.writer import SegmentPlan, write_plans, write_tensorrt_program
from ingot.progress import progress_to
from ingot.runtime import Engine
from tests.conftest import BuildArtifact
from tests.data_paths import FIXTURES
from tests.pipeline.targets.tensorrt.models import prepared, segments_of
from tests.simulators.fake_gpu import compile_nothing

LLAMA = FIXTURES / "checkpoints" / "llama"
SMALL = ("engine.max_batch_tokens=32", "gpu.decode_rows=[1]", "gpu.sms=[89]")
PROFILES = {"T": (Profile.of(1), Profile(16, 32, 32)), "R": (Profile.of(1),)}
_STORED = {"fp16": "F16", "i8": "I8", "fp32": "F32"}

pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install '.[cuda]'")
pytest.importorskip("tensorrt_rtx", reason="plans are built by TensorRT-RTX: pip install '.[tensorrt]'")


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
    with pytest.raises(EngineError, match=r"needs cuda-bindings .*pip install .*\[cuda\]'"):
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


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> PlanCache:
    return PlanCache(tmp_path_factory.mktemp("plans"))


def built(
    form: str,
    sms: tuple[int, ...],
    cache: PlanCache,
    folder: Path,
    compute: ActivationType = "fp16",
    checkpoint: str = "llama",
) -> list[SegmentPlan]:
    """The plans of the second and the third segment, which have one structure."""
    segments = segments_of(prepared(form, checkpoint), compute)[1:3]
    return write_plans(segments, PlanSettings(load_library(), sms, PROFILES, cache), folder)


def test_layers_share_a_plan_that_holds_no_weights(cache: PlanCache, tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    with progress_to(lambda _, now, total: done.append((now, total))):
        plans = built("plain", (86, 89, 120), cache, tmp_path)
    facts = plans[0].facts
    assert plans[0] is plans[1]
    assert (facts.sms, facts.segments, facts.library) == ((86, 89, 120), 2, "tensorrt-rtx")
    assert done == [(1, 1)]
    content = (tmp_path / facts.file).read_bytes()
    assert read_plan_header(content[:512], facts.file).sms == (86, 89, 120)
    assert facts.bytes == len(content)
    decode, ragged = facts.profiles
    assert (decode.least_rows, decode.most_rows, ragged.least_rows, ragged.most_rows) == (1, 1, 16, 32)
    assert ragged.operators["FcAdd"] == 2  # o_proj and down_proj, each with its residual


@pytest.mark.parametrize(
    ("form", "compute", "sms"),
    [
        ("int8-activations", "bf16", (86, 89)),
        ("fp8-activations", "fp16", (89, 120)),
        ("int8-zero-points", "fp16", (86,)),
    ],
)
def test_eight_bits_share_a_plan_too(
    form: str, compute: ActivationType, sms: tuple[int, ...], cache: PlanCache, tmp_path: Path
) -> None:
    plans = built(form, sms, cache, tmp_path, compute)
    assert plans[0] is plans[1]
    assert plans[0].facts.sms == sms
    ragged = plans[0].facts.profiles[1].operators
    if "activations" in form:
        assert ragged["fully_connected"] == 4  # of codes: none dequantizes before the matmul
        assert not any(name.endswith("Fc") for name in ragged)
    else:
        assert ragged["CastMulCastFc"] == 4


def test_int4_has_a_plan_per_layer_with_every_dequantization_fused(cache: PlanCache, tmp_path: Path) -> None:
    first, second = built("int4", (80, 120), cache, tmp_path)
    assert first.facts.file != second.facts.file
    assert first.facts.weight_bytes > 0
    assert first.facts.profiles[1].operators["ReplCastMulCastFc"] == 4  # block scales, codes, matmul


def test_zero_points_cost_a_sum_and_a_small_matmul_and_nothing_is_written_out(cache: PlanCache, tmp_path: Path) -> None:
    segment = segments_of(prepared("int4-zero-points"))[0]
    (made,) = write_plans([segment], PlanSettings(load_library(), (89,), PROFILES, cache), tmp_path)
    assert made.facts.profiles[1].operators["ReplCastMulCastFc"] == 1


def test_a_family_with_every_difference_builds(cache: PlanCache, tmp_path: Path) -> None:
    assert built("plain", (89,), cache, tmp_path, checkpoint="gemma3_text")[0].facts.profiles[0].operators


def test_a_second_build_takes_the_plan_from_the_cache_and_a_damaged_one_is_built_again(
    cache: PlanCache, tmp_path: Path
) -> None:
    made = built("plain", (89,), cache, tmp_path / "made")[0]
    again = built("plain", (89,), cache, tmp_path / "again")[0]
    assert again.peak_bytes is None
    assert (tmp_path / "made" / made.facts.file).read_bytes() == (tmp_path / "again" / again.facts.file).read_bytes()
    for file in cache.folder.glob("*.plan"):
        file.write_bytes(file.read_bytes()[:-1])
    assert built("plain", (89,), cache, tmp_path / "anew")[0].facts.profiles == made.facts.profiles


def test_sms_are_checked_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"fp8 needs SM 89 or newer, and gpu\.sms names SM 86"):
        built("fp8", (86, 89), PlanCache(tmp_path / "cache"), tmp_path)
    assert not (tmp_path / "cache").exists()


def test_a_node_that_the_parser_refuses_has_the_models_name_in_the_error(cache: PlanCache, tmp_path: Path) -> None:
    segment = segments_of(prepared())[2]
    gate = next(node for node in segment.model.graph if node.op_type == "Sigmoid")
    gate.op_type, gate.domain = "Nonsense", "acme"
    segment.model.graph.opset_imports["acme"] = 1
    settings = PlanSettings(load_library(), (89,), PROFILES, cache)
    with pytest.raises(
        BuildError, match=r"segment 'layers.2.self_attn.qkv_proj': .*refuses 'layers.1.mlp.sigmoid' \(N"
    ):
        write_plans([segment], settings, tmp_path)


def test_a_dequantization_that_is_not_fused_is_an_error(cache: PlanCache, tmp_path: Path) -> None:
    request = _unfused(tmp_path)
    plan = build_or_recall(request, cache)
    with pytest.raises(BuildError, match=r"CastMulCast \(weight\) from weights alone in every step"):
        check_plan(plan.file.read_bytes(), request, "a plan")


def test_a_plan_that_is_refused_does_not_stay_in_the_cache(
    cache: PlanCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = _unfused(tmp_path)
    monkeypatch.setattr(writer, "plan_request", lambda *_: request)
    settings = PlanSettings(load_library(), (89,), PROFILES, cache)
    with pytest.raises(BuildError, match=r"segment 'layers.0.self_attn.qkv_proj': TensorRT would compute"):
        write_plans(segments_of(prepared())[:1], settings, tmp_path)
    assert cache.find(request.key()) is None


def test_a_file_that_is_no_model_is_refused(cache: PlanCache, tmp_path: Path) -> None:
    request = _unfused(tmp_path)
    (tmp_path / "segment.onnx").write_bytes(b"no graph at all")
    with pytest.raises(BuildError, match=r"refuses .*Failed to parse the ONNX model"):
        build_or_recall(request, cache)


def _unfused(folder: Path) -> PlanRequest:
    """y = x @ DequantizeLinear(int4, a scale per row), which TensorRT does not fuse."""
    codes = ir.PackedTensor(np.full(64 * 32, 0x21, np.uint8), ir.DataType.INT4, shape=ir.Shape([64, 64]), name="q")
    scale = ir.Tensor(np.ones(64, np.float16), name="s")
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT16), shape=ir.Shape(["T", 64]))
    constants = [
        ir.Value(name=t.name, type=ir.TensorType(t.dtype), shape=ir.Shape(t.shape.numpy()), const_value=t)
        for t in (codes, scale)
    ]
    weight = ir.node("DequantizeLinear", constants, {"axis": 0}, name="weight")
    y = ir.Value(name="y", type=ir.TensorType(ir.DataType.FLOAT16), shape=ir.Shape(["T", 64]))
    gemm = ir.node("Gemm", [x, weight.outputs[0]], {"transB": 1}, name="matmul", outputs=[y])
    graph = ir.Graph([x], [y], nodes=[weight, gemm], initializers=constants, opset_imports={"": 24}, name="unfused")
    ir.save(ir.Model(graph, ir_version=11), folder / "segment.onnx")
    library = load_library()
    file = str(folder / "segment.onnx")
    return PlanRequest(file, None, {"x": (64,)}, (), (Profile(1, 8, 8),), (89,), library.name, library.version)
