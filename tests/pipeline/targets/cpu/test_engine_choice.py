"""The engine of a program for the CPU: as the recipe says, and with `auto` as the model allows."""

import json
import logging

import pytest

from ingot.artifact.programs.cpu_program import OPERATIONS_FILE, Attend, read_cpu_program
from ingot.errors import PassError, UsageError
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.targets.cpu.engine_choice import choose_target
from ingot.progress import NOTES
from tests.conftest import BuildArtifact
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


@pytest.mark.parametrize("attention", ["float32", "bfloat16"])
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
