"""The engine of a program for the CPU: as the recipe says, and with `auto` as the model allows."""

import json
import logging
from typing import Never, get_args

import onnx_ir as ir
import pytest

from ingot.artifact.programs.cpu_program import OPERATIONS_FILE, Arithmetic, Attend, read_cpu_program
from ingot.errors import EngineError, PassError, UsageError
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.targets.cpu import engine_choice
from ingot.pipeline.targets.cpu.engine_choice import choose_target
from ingot.progress import NOTES
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.parity import CHECKPOINTS
from tests.simulators.cpu_programs import PACKED, Entry, imported, lowered

LLAMA = CHECKPOINTS / "llama"
FLOAT8: Entry = ("fp8", {"activations": "dynamic"})  # no operation rounds to float8
EMULATED = (*PACKED, FLOAT8)


@pytest.mark.parametrize(
    ("engine", "expected"), [("auto", "native"), ("native", "native"), ("onnxruntime", "onnxruntime")]
)
def test_a_model_that_lowers_runs_on_the_engine_of_the_recipe(engine: str, expected: str) -> None:
    choice = choose_target(load_recipe("fp32-cpu", [f"cpu.engine={engine}"]), imported(LLAMA, *PACKED))
    assert choice.target.engine == expected
    assert not choice.facts


def test_auto_leaves_a_model_that_does_not_lower_to_onnxruntime_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    model = imported(LLAMA, *EMULATED)
    with caplog.at_level(logging.INFO, logger=NOTES):
        choice = choose_target(load_recipe("fp32-cpu", ["cpu.engine=auto"]), model)
    assert choice.target.engine == "onnxruntime"
    reason = choice.facts["cpu-engine"]["reason"]
    assert "'layers.0.self_attn.qkv_proj' (Gemm) has float8 activations before float8 weights" in reason
    assert reason in caplog.text


@each_case("fault", [KeyError("layers.0"), AssertionError("layers.0"), ValueError("layers.0")], ids=repr)
def test_a_fault_of_the_lowering_does_not_stop_auto(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(model: ir.Model) -> Never:
        raise fault

    monkeypatch.setattr(engine_choice, "lower_to_operations", failing)
    choice = choose_target(load_recipe("fp32-cpu", ["cpu.engine=auto"]), imported(LLAMA, *PACKED))
    assert choice.target.engine == "onnxruntime"
    reason = choice.facts["cpu-engine"]["reason"]
    assert f"failed ({type(fault).__name__}: {fault}), a bug in Ingot: please report it" in reason


def test_without_a_c_compiler_a_build_says_that_the_artifact_is_another_engines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in ("library", "program"):
        monkeypatch.setattr(f"ingot.runtime.cpu.native.{module}.native_library", lambda: None)
    monkeypatch.setattr("ingot.pipeline.targets.cpu.engine_choice.native_library", lambda: None)
    choice = choose_target(load_recipe("fp32-cpu", ["cpu.engine=auto"]), imported(LLAMA, *PACKED))
    assert choice.target.engine == "onnxruntime"
    assert "installed without a C compiler: this artifact is made for onnxruntime" in caplog.text
    caplog.clear()
    choose_target(load_recipe("fp32-cpu", ["cpu.engine=onnxruntime"]), imported(LLAMA, *PACKED))
    assert not caplog.records


def test_a_library_that_cannot_be_loaded_is_not_taken_for_a_missing_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing() -> Never:
        raise EngineError("ingot_cpu.so: was built from another version of its source")

    for module in ("library", "program"):
        monkeypatch.setattr(f"ingot.runtime.cpu.native.{module}.native_library", failing)
    monkeypatch.setattr("ingot.pipeline.targets.cpu.engine_choice.native_library", failing)
    choice = choose_target(load_recipe("fp32-cpu", ["cpu.engine=auto"]), imported(LLAMA, *PACKED))
    assert "another version" in choice.facts["cpu-engine"]["reason"]
    assert "The library of Ingot's own engine cannot be loaded: this artifact is made for onnxruntime" in caplog.text
    assert "compiler" not in caplog.text


def test_auto_does_not_leave_attention_in_bfloat16_to_onnxruntime() -> None:
    recipe = load_recipe("fp32-cpu", ["cpu={engine: auto, attention: bfloat16}"])
    assert choose_target(recipe, imported(LLAMA, *PACKED)).target.engine == "native"
    with pytest.raises(UsageError, match=r"cpu\.attention is bfloat16, but the native engine cannot run it: .*float8"):
        choose_target(recipe, imported(LLAMA, *EMULATED))


def test_the_model_is_unchanged_by_the_trial() -> None:
    model = imported(LLAMA, *PACKED)
    nodes = [(node.name, node.op_type) for node in model.graph]
    choose_target(load_recipe("fp32-cpu", ["cpu.engine=auto"]), model)
    assert [(node.name, node.op_type) for node in model.graph] == nodes


def test_a_recipe_for_a_gpu_ignores_the_option() -> None:
    recipe = load_recipe("int4-cuda", ["cpu.engine=native"])
    assert choose_target(recipe, imported(LLAMA)).target.engine == "cuda"


def test_native_refuses_a_model_that_does_not_lower() -> None:
    with pytest.raises(PassError, match=r"'layers\.0\.self_attn\.qkv_proj' \(Gemm\) has float8 activations"):
        lowered(imported(LLAMA, *EMULATED))


@pytest.mark.parametrize("attention", get_args(Arithmetic))
def test_the_arithmetic_of_attention_is_sealed_in_the_program(build_unmeasured: BuildArtifact, attention: str) -> None:
    artifact = build_unmeasured("fp32-cpu", LLAMA, f"cpu={{engine: native, attention: {attention}}}")
    program = read_cpu_program(artifact.file(OPERATIONS_FILE))
    found = [operation.arithmetic for operation in program.operations if isinstance(operation, Attend)]
    assert found == [attention] * artifact.manifest.kv.num_layers


def test_why_auto_fell_back_is_in_the_evidence(build_unmeasured: BuildArtifact) -> None:
    artifact = build_unmeasured("fp8-cpu-emulation", LLAMA)
    assert artifact.manifest.engine == "onnxruntime"
    facts = json.loads(artifact.file("evidence/passes.json").read_text())["cpu-engine"]
    assert facts["engine"] == "onnxruntime"
    assert "float8 activations" in facts["reason"]


def test_a_model_that_lowers_is_built_for_the_native_engine_by_default(build_unmeasured: BuildArtifact) -> None:
    artifact = build_unmeasured("fp32-cpu", LLAMA)
    assert artifact.manifest.engine == "native"
    assert "evidence/passes.json" not in artifact.manifest.files


@each_case("case", ["olmo_hybrid", "olmo_hybrid-as-saved", "qwen3_next", "bamba"])
def test_packed_projections_of_hybrids_run_on_the_native_engine(case: str) -> None:
    choice = choose_target(load_recipe("fp32-cpu"), imported(CHECKPOINTS / case, *PACKED))
    assert choice.target.engine == "native", choice.facts
