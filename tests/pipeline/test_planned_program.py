"""A planned program has the bytes, the KV geometry and the block count of the built one, family by family."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ingot.artifact import Artifact
from ingot.builder.plan_subject import read_subject
from ingot.errors import UsageError
from ingot.pipeline.checkpoint.hollow import hollow_checkpoint
from ingot.pipeline.model.importer import ModelSource
from ingot.pipeline.planned_program import PlannedProgram, plan_program
from ingot.pipeline.recipe.load import load_recipe
from ingot.planning.hardware import find_hardware
from ingot.planning.load import Load
from ingot.planning.memory import plan_memory
from ingot.planning.plan import PlannedModel, make_plan
from ingot.planning.roofline import data_sheet
from ingot.planning.step_model import StepShape
from ingot.runtime import options
from ingot.runtime.executors import load_executor
from ingot.runtime.options import EngineOptions
from tests.conftest import UNMEASURED, BuildArtifact
from tests.data_paths import FIXTURES

CHECKPOINTS = FIXTURES / "checkpoints"
WEIGHTS = "program/weights.safetensors"
TEXT = ("calibration.sequence_tokens=64", "calibration.sequences=4")
# Family, recipe, further settings: windows, MLA, recurrent, shared KV, MoE; int4, int8, mixed.
CASES = [
    ("llama", "int4-cpu", ()),
    ("gemma2", "int8-cpu", ()),
    ("gemma3n_text", "fp32-cpu", ()),
    ("gemma4_text", "int8-cpu", ()),
    ("deepseek_v2", "int4-cpu", ()),
    ("minicpm3", "int8-cpu", ()),
    ("qwen3_moe", "int4-cpu", ()),
    ("gpt_oss", "int8-cpu", ()),
    ("qwen3_next", "int4-cpu", ()),
    ("falcon_h1", "fp32-cpu", ()),
    ("lfm2", "int4-cpu", ("cpu.engine=onnxruntime",)),
    ("mixtral", "int8-cpu", ("cpu.engine=onnxruntime",)),
    ("llama", "int4-kv8-cpu", ()),
    ("gpt2", "fp8-cpu-emulation", ()),
]


@contextmanager
def planned(recipe: str, config: Path, *settings: str) -> Iterator[PlannedProgram]:
    """Plan from config.json alone."""
    with hollow_checkpoint(config) as checkpoint:
        made = load_recipe(recipe, [f"checkpoint={config.parent}", *UNMEASURED, *settings])
        yield plan_program(made, ModelSource(checkpoint))


def num_blocks(artifact: Artifact, free_bytes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Blocks and state slots that the engine takes with so much free memory."""
    monkeypatch.setattr(options, "free_memory_bytes", lambda: free_bytes)
    executor = load_executor(artifact, EngineOptions())
    try:
        return executor.num_blocks, getattr(executor, "num_states", 0)
    finally:
        executor.close()


@pytest.mark.parametrize(("family", "recipe", "settings"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_bytes_and_blocks_are_those_of_the_built_artifact(
    family: str,
    recipe: str,
    settings: tuple[str, ...],
    build_unmeasured: BuildArtifact,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    artifact = build_unmeasured(recipe, CHECKPOINTS / family, *settings)
    with planned(recipe, CHECKPOINTS / family / "config.json", *settings) as program:
        assert program.memory.weight_bytes == artifact.manifest.files[WEIGHTS].bytes
        assert (program.target.engine, program.kv, program.model) == (
            artifact.manifest.engine,
            artifact.manifest.kv,
            artifact.manifest.model,
        )
        # Ample memory, and so little that the share of it decides.
        scarce = program.memory.weight_bytes + program.memory.arena_bytes + 100 * program.kv.block_bytes
        for free in (1 << 33, scarce + 20 * program.kv.state_bytes):
            memory = plan_memory(program.memory, program.model, program.shape, free, "a test")
            assert (memory.num_blocks, memory.state_slots) == num_blocks(artifact, free, monkeypatch)


@pytest.mark.parametrize("recipe", ["int4-mixed-cpu", "int4-gptq-cpu", "w8a8-cpu"])
def test_calibrated_recipes_are_planned_without_data(
    recipe: str, two_layers: Path, build_unmeasured: BuildArtifact
) -> None:
    text = two_layers / "train.txt"
    settings = (*TEXT, f"calibration.text={next(two_layers.glob('*.txt'), text)}")
    artifact = build_unmeasured(recipe, two_layers, *settings)
    with planned(recipe, two_layers / "config.json", *settings) as program:
        built = artifact.manifest.files[WEIGHTS].bytes
        assert program.memory.weight_bytes == pytest.approx(built, rel=0.005)
        assert program.kv == artifact.manifest.kv


def test_an_artifact_is_planned_by_its_files(build_unmeasured: BuildArtifact) -> None:
    artifact = build_unmeasured("int4-cpu", CHECKPOINTS / "llama")
    subject = read_subject(str(artifact.path))
    with planned("int4-cpu", CHECKPOINTS / "llama" / "config.json") as program:
        assert subject.program == program.memory
        assert subject.shape == program.shape


def test_a_pass_whose_sizes_follow_from_data_is_refused() -> None:
    changes = ("passes=[{prune-structure: {ffn: 0.5}}]", "calibration={text: text.txt}")
    with pytest.raises(UsageError, match="chooses the channels to remove by data"):
        with planned("fp32-cpu", CHECKPOINTS / "llama" / "config.json", *changes):
            pass


def test_the_shape_of_a_mixture_counts_its_experts() -> None:
    with planned("int4-cpu", CHECKPOINTS / "qwen3_moe" / "config.json") as program:
        experts = [one for one in program.shape.matmuls if one.role == "expert"]
        assert program.shape.experts == (experts[0].experts, experts[0].chosen)
        assert all(one.count % one.experts == 0 for one in experts)
        assert 0 < experts[0].chosen < experts[0].experts


def test_experts_on_the_host_take_no_memory_of_the_gpu() -> None:
    settings = ("target=cuda-sm90", "devices=[{cuda: 16GiB}, {cpu: 64GiB}]", "place={host: experts}")
    with planned("int4-cuda", CHECKPOINTS / "qwen2_moe/config.json", *settings) as program:
        gpu, host = program.memory.parts
        plan = plan_memory(program.memory, program.model, program.shape, 10**10, "a GPU")
        assert (plan.weights, plan.arena) == (gpu.weights, gpu.arena)
        assert (gpu.name, host.name, host.kv) == ("cuda:0", "cpu:0", 0)
        assert program.memory.weight_bytes == gpu.weights + host.weights > gpu.weights
    with planned("int4-cuda", CHECKPOINTS / "qwen2_moe/config.json", *settings, "stream_experts=64") as program:
        # The host has these experts in the GPU's form too, and the GPU the place that they are copied to.
        assert program.memory.parts[0].weights == gpu.weights
        assert program.memory.parts[0].arena > gpu.arena
        assert program.memory.parts[1].weights > host.weights


ON_HOST = ("target=cuda-sm90", "devices=[{cuda: 16GiB}, {cpu: 64GiB, hardware: epyc-9654}]")
ON_CPUS = ("devices=[{cpu: 1GiB}, {cpu: 1GiB, hardware: epyc-9654}]", "place={layers.0: cpu:1}")


def subject_of(family: str, recipe: str, *settings: str) -> PlannedModel:
    with planned(recipe, CHECKPOINTS / family / "config.json", *settings) as program:
        return PlannedModel("a test", program.model, program.shape, program.memory, "", program.placed)


@pytest.mark.parametrize(
    ("family", "recipe", "settings"),
    [
        ("qwen2_moe", "int4-cuda", (*ON_HOST, "place={host: experts}")),
        ("gpt_oss", "int4-cuda", (*ON_HOST, "place={gpu_layers: 1}")),
        ("falcon_h1", "int4-cpu", ON_CPUS),
    ],
)
def test_times_are_those_of_the_devices_that_have_the_parts(
    family: str, recipe: str, settings: tuple[str, ...]
) -> None:
    subject, hardware = subject_of(family, recipe, *settings), find_hardware("h100")
    first, second = (part.shape for part in subject.placed)
    whole = subject.shape
    assert first.num_layers + second.num_layers == whole.num_layers
    assert first.flops_per_token + second.flops_per_token == whole.flops_per_token
    assert first.attention_flops + second.attention_flops == whole.attention_flops
    assert first.kv.state_bytes + second.kv.state_bytes >= whole.kv.state_bytes
    assert sum(part.entries for part in subject.placed) > 0
    step = StepShape(decode_rows=4, context_tokens=80, num_sequences=4)
    model = subject.steps(hardware)
    seconds = {term.name: term.seconds for term in model.terms(step)}
    assert sum(seconds.values()) == pytest.approx(model.seconds(step))
    # The host reads its weights at its own bandwidth, which is a seventh of the GPU's.
    for term in data_sheet(second, find_hardware("epyc-9654")).terms(step):
        if term.name not in ("sequences", "host copies"):
            assert seconds[f"{subject.placed[1].device}: {term.name}"] == term.seconds
    assert "epyc-9654".upper().replace("-", " ") in model.source.upper()
    assert model.relative_error == 1.0
    with pytest.raises(UsageError, match=r"the recipe places the model on .*: leave out the number of devices"):
        subject.steps(hardware, 2)


def test_a_device_whose_speed_is_unknown_is_named() -> None:
    settings = ("target=cuda-sm90", "devices=[{cuda: 16GiB}, {cpu: 64GiB}]", "place={host: experts}")
    subject = subject_of("qwen2_moe", "int4-cuda", *settings)
    with pytest.raises(UsageError, match=r"on cpu:0, whose speed is unknown: add hardware: NAME to devices\.1"):
        make_plan(subject, "h100", find_hardware("h100"), Load(1, 20, 4))


def test_a_sealed_artifact_has_the_times_of_its_stages(build_unmeasured: BuildArtifact) -> None:
    artifact = build_unmeasured("int4-cpu", CHECKPOINTS / "llama", *ON_CPUS)
    assert read_subject(str(artifact.path)).placed == subject_of("llama", "int4-cpu", *ON_CPUS).placed
