"""What a plan is about is read as an artifact, a recipe, a checkpoint or a config.json, and refused by name."""

from pathlib import Path

import pytest

from ingot.artifact.programs.expert_choices import reached, read_expert_choices
from ingot.builder.plan_subject import read_subject
from ingot.errors import CheckpointError, UsageError
from tests.conftest import BuildArtifact
from tests.data_paths import FIXTURES

TINY = FIXTURES / "checkpoints" / "llama"


def test_a_checkpoint_is_planned_in_its_own_types() -> None:
    subject = read_subject(str(TINY), on_cpu=True)
    assert subject.program.on_cpu
    assert subject.shape.kv.dtype in ("float16", "bfloat16")
    assert subject.shape.matmul_bytes < subject.program.weight_bytes
    assert "no recipe plans an arena" in subject.source
    bare = read_subject(str(TINY / "config.json"))
    assert bare.model == subject.model
    assert bare.shape.kv.block_bytes == subject.shape.kv.block_bytes


def test_a_recipe_needs_a_checkpoint_and_an_artifact_has_one(build_unmeasured: BuildArtifact) -> None:
    with pytest.raises(UsageError, match="recipe int4-cpu names no checkpoint: give --checkpoint"):
        read_subject("int4-cpu")
    artifact = build_unmeasured("int4-cpu", TINY)
    with pytest.raises(UsageError, match="whose recipe is sealed: leave out --recipe"):
        read_subject(str(artifact.path), "int4-cpu")


def test_a_placed_model_has_the_arenas_of_all_devices_in_its_recipe_and_in_its_artifact(
    build_unmeasured: BuildArtifact,
) -> None:
    placed = ("devices=[{cpu: 1GiB}, {cpu: 1GiB}]", "place={gpu_layers: 1}")
    whole = read_subject(str(TINY), "int4-cpu").program
    planned = read_subject(str(TINY), "int4-cpu", placed).program
    built = read_subject(str(build_unmeasured("int4-cpu", TINY, *placed).path)).program
    assert whole.parts == ()
    assert [part.as_json()["device"] for part in planned.parts] == ["cpu:0", "cpu:1"]
    assert planned.arena_bytes == sum(part.arena for part in planned.parts) > whole.arena_bytes
    assert (built.arena_bytes, built.parts) == (planned.arena_bytes, planned.parts)
    with pytest.raises(UsageError, match="bytes are missing"):
        read_subject(str(TINY), "int4-cpu", ("devices=[{cpu: 1kB}, {cpu: 1GiB}]", "place={gpu_layers: 1}"))


def test_an_artifacts_counts_of_experts_are_in_its_plan(build_unmeasured: BuildArtifact, upcycled: Path) -> None:
    text = f"calibration={{text: {upcycled / 'heldout.txt'}, sequences: 4, sequence_tokens: 64}}"
    artifact = build_unmeasured("int8-cpu", upcycled, text)
    choices = read_expert_choices(artifact)
    assert choices is not None
    subject = read_subject(str(artifact.path))
    assert subject.shape.expert_reach == choices.reach
    assert subject.source.endswith("; experts that rows reach as counted on 256 tokens of heldout.txt")
    distinct = [layer.concurrent for layer in choices.layers.values()]
    assert reached(choices.reach, 4) == pytest.approx(sum(each[2] for each in distinct) / len(distinct) / 4)
    even = read_subject(str(build_unmeasured("int8-cpu", upcycled).path))
    assert even.shape.expert_reach == ((1, 2 / 4),)
    assert even.source == "the sealed files"


def test_what_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="int4-cpuu"):
        read_subject("int4-cpuu")
    with pytest.raises(CheckpointError, match=r"none\.json"):
        read_subject(str(tmp_path / "none.json"))
