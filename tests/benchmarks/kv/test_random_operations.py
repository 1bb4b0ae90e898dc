"""Random operations end in counts, continue where they stopped, and name the world that differs."""

from pathlib import Path

import pytest
from benchmarks.kv import random_operations
from benchmarks.kv.random_operations import Difference, Progress, Task, World, run_world


def test_a_world_is_repeated_by_its_seed_and_number() -> None:
    first, second = run_world(0, 3), run_world(0, 4)
    assert run_world(0, 3) == first != second
    assert first["requests"] > 0


def test_the_world_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def step_with_a_leak(world: World) -> None:
        world.engine._blocks._free.append(0)

    monkeypatch.setattr(World, "step", step_with_a_leak)
    with pytest.raises(Difference, match=r"world 0,7, operation \d+: AssertionError: "):
        run_world(0, 7)
    _, _, difference = Task(0, 7).run()
    assert difference is not None
    assert difference.startswith("world 0,7, ")


def test_progress_continues_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_operations, "_WORLDS_PER_TASK", 1)
    progress = Progress(seconds=1.0)
    progress.add(*Task(5, 0).run())
    progress.write(tmp_path / "counts.json")
    again = Progress.read(tmp_path / "counts.json")
    assert again == progress
    assert (again.operations, again.worlds, again.difference) == (300, {"5": 1}, None)
    assert Progress.read(tmp_path / "none.json") == Progress()
