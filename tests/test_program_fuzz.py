"""No damaged program that is sealed again crashes the engine. benchmarks/cpu/sanitize.py tries more of them."""

import itertools

import pytest

from tests.conftest import BuildArtifact
from tests.parity import CHECKPOINTS
from tests.program_fuzz import PROGRAMS, Damager, kept_cases, try_cases

_QUICK = ("int4-kv8", "delta rule")


@pytest.mark.parametrize(
    "name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]
)
def test_a_damaged_program_is_refused_or_runs(build_unmeasured: BuildArtifact, name: str) -> None:
    recipe, checkpoint = PROGRAMS[name]
    folder = build_unmeasured(recipe, CHECKPOINTS / checkpoint, "cpu.engine=native").path
    damager, kept = Damager(folder), kept_cases(name)
    cases = (damager.one_of_each_field(seed=0), damager.cases(seed=0, count=30)) if name in _QUICK else ()
    trial = try_cases(folder, itertools.chain(*kept.values(), *cases))
    assert trial.findings == []
    # Which of them are refused changes with the program: `python -m tests.program_fuzz 300` chooses them again.
    assert [one.outcome for one in trial.tried[: sum(map(len, kept.values()))]] == [
        outcome for outcome, of_it in kept.items() for _ in of_it
    ]
