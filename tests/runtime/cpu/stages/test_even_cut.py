"""A program is cut between layers, into stages of about equal work that loading would accept from a file."""

import itertools

import pytest

from ingot.artifact import Artifact
from ingot.artifact.programs.cpu_program import CpuProgram
from ingot.artifact.programs.cpu_program_checks import read_operations
from ingot.artifact.programs.stage_checks import _problems_of_cut, _problems_of_plan
from ingot.artifact.programs.stages import CutProgram, ProgramStage, StageDevice, StagePlan
from ingot.errors import UsageError
from ingot.runtime.cpu.stages.even_cut import cut_evenly, split_work
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.parity import CHECKPOINTS


@pytest.fixture(scope="module")
def demo(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured("demo")


def plan_of(cut: CutProgram) -> StagePlan:
    """The plan that such a cut would have in a file."""
    ends = itertools.accumulate(len(run.operations) for run in cut.runs)
    stages = tuple(ProgramStage(device=run.device, end=end) for run, end in zip(cut.runs, ends, strict=True))
    devices = (
        StageDevice(
            name=device.name,
            arena_floats=device.program.arena_floats,
            offsets={name: one.offset for name, one in device.program.buffers.items() if name != "logits"},
        )
        for device in cut.devices
    )
    return StagePlan(devices=tuple(devices), stages=stages)


def least_largest_share(program: CpuProgram, count: int) -> float:
    """The largest share of work in the best of all cuts into so many stages."""
    finest = split_work(cut_evenly(program, len(program.kv.layers)))
    cuts = itertools.combinations(range(1, len(finest)), count - 1)
    return min(
        max(sum(finest[begin:end]) for begin, end in itertools.pairwise((0, *places, len(finest)))) for places in cuts
    )


def test_no_other_cut_of_the_demo_model_has_less_work_in_its_largest_stage(demo: Artifact) -> None:
    program = read_operations(demo)
    for count in range(2, 7):
        cut = cut_evenly(program, count)
        assert len(cut.devices) == count
        assert all(device.layers for device in cut.devices)
        assert sum(len(device.layers) for device in cut.devices) == 6
        assert max(split_work(cut)) == pytest.approx(least_largest_share(program, count))


@each_case("name", ["qwen3_moe", "gemma2", "falcon_h1", "lfm2"])
def test_a_cut_of_any_model_has_no_problem_that_loading_looks_for(build_unmeasured: BuildArtifact, name: str) -> None:
    program = read_operations(build_unmeasured("fp32-cpu", CHECKPOINTS / name, "cpu.engine=native"))
    cut = cut_evenly(program, 2)
    plan = plan_of(cut)
    assert [*_problems_of_plan(program, plan), *_problems_of_cut(program, plan, cut)] == []


def test_more_stages_than_layers_are_refused_with_the_most(demo: Artifact) -> None:
    with pytest.raises(UsageError, match="stages is 7; the model can be cut into at most 6: stages have whole layers"):
        cut_evenly(read_operations(demo), 7)
