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
from ingot.planning.memory import plan_memory
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
