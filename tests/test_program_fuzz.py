"""No damaged program that is sealed again crashes the engine. benchmarks/cpu/sanitize.py tries more of them."""

import itertools

import pytest

from tests.conftest import BuildArtifact
from tests.parity import CHECKPOINTS
from tests.program_fuzz import Damager, try_cases


@pytest.mark.parametrize(("recipe", "checkpoint"), [("int4-kv8-cpu", "llama"), ("int8-cpu", "qwen3_next")])
def test_a_damaged_program_is_refused_or_runs(build_unmeasured: BuildArtifact, recipe: str, checkpoint: str) -> None:
    folder = build_unmeasured(recipe, CHECKPOINTS / checkpoint, "cpu.engine=native").path
    damager = Damager(folder)
    trial = try_cases(folder, itertools.chain(damager.one_of_each_field(seed=0), damager.cases(seed=0, count=30)))
    assert trial.findings == []
    assert trial.outcomes["refused"] > 0
    assert trial.outcomes["ran"] > 0
