"""A comparison that is killed resumes: nothing that was built or measured is repeated, and nothing half-made counts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.builder import build
from ingot.builder.compare import run
from ingot.builder.compare.candidates import ComparedSources, Group, read_groups
from ingot.errors import EngineError, UsageError
from tests.builder.compare.conftest import SMALL, Compared
from tests.data_paths import ROOT

RECIPES = ("fp32-cpu", "int8-cpu")
KILLED = """
import os, signal, sys
from pathlib import Path
from ingot.builder import build
from ingot.builder.compare import run
from ingot.builder.compare.candidates import ComparedSources, read_groups

name, checkpoint, folder, *overrides = sys.argv[1:]
function = getattr(run, name)

def killed(*arguments):
    if name == "write_evidence":
        function(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(run, name, killed)
[group] = read_groups(ComparedSources(("fp32-cpu", "int8-cpu"), (Path(checkpoint),), tuple(overrides)))
with run.locked(Path(folder)):
    run.run_group(group, Path(folder))
"""


def group_of(checkpoint: Path, *overrides: str, gates: tuple[str, ...] = ()) -> Group:
    [group] = read_groups(ComparedSources(RECIPES, (checkpoint,), (*SMALL, *overrides), gates))
    return group


def run_until(name: str, checkpoint: Path, folder: Path) -> None:
    """Run in a process that is killed where run.py would first call this; after it has written, for write_evidence."""
    command = [sys.executable, "-c", KILLED, name, str(checkpoint), str(folder), *SMALL]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


class Counted:
    """Counts the calls of builds and measurements."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls = {"build": 0, "measure": 0}
        for name in self.calls:
            patch.setattr(run, name, self._counting(name))

    def _counting(self, name: str) -> object:
        function = getattr(run, name)

        def counting(*arguments: object) -> object:
            self.calls[name] += 1
            return function(*arguments)

        return counting


def test_a_comparison_killed_at_any_point_resumes(
    two_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state"
    run_until("measure", two_layers, folder)
    [artifact] = folder.glob("*/*")
    built_at = (artifact / "manifest.json").stat().st_mtime_ns
    run_until("write_evidence", two_layers, folder)
    assert [entry for entry in folder.glob("*/*") if entry.name[0] != "."] == [artifact]
    counted, group = Counted(monkeypatch), group_of(two_layers)
    with run.locked(folder):
        outcomes = run.run_group(group, folder)
    assert (artifact / "manifest.json").stat().st_mtime_ns == built_at
    assert counted.calls == {"build": 1, "measure": 2}
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert not list(folder.glob("*/.*"))
    again = run.run_group(group_of(two_layers, gates=("kl_mean=0.1",)), folder)
    assert counted.calls == {"build": 1, "measure": 2}
    assert [outcome.recorded for outcome in again] == [outcome.recorded for outcome in outcomes]
    run.run_group(group_of(two_layers, "evaluation.tokens=512"), folder)
    assert counted.calls == {"build": 1, "measure": 4}


def test_all_candidates_have_one_baseline_and_the_same_windows(compared: Compared) -> None:
    recorded = [outcome.recorded for outcome in compared.outcomes]
    assert all(one and one.accuracy for one in recorded)
    windows = [[(each.start, each.tokens) for each in one.accuracy.items] for one in recorded if one and one.accuracy]
    assert windows == [windows[0]] * 3
    assert {one.measured["perplexity_ratio"].baseline for one in recorded if one} == {
        recorded[0].measured["perplexity_ratio"].candidate if recorded[0] else None
    }


def test_a_candidate_that_fails_does_not_stop_the_others(
    two_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(source: str, *arguments: object) -> object:
        if source == "fp32-cpu":
            raise EngineError("no memory")
        return build(source, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "build", failing)
    outcomes = run.run_group(group_of(two_layers), tmp_path)
    assert [str(outcome.error) for outcome in outcomes] == ["no memory", "None"]
    assert outcomes[1].recorded


def test_a_folder_is_for_one_comparison_at_a_time(tmp_path: Path) -> None:
    with run.locked(tmp_path):
        with pytest.raises(UsageError, match=rf"another comparison \(process {os.getpid()}\) works in this folder"):
            with run.locked(tmp_path):
                pass
    with run.locked(tmp_path):
        pass
