"""What failed runs again under compute-sanitizer, where it is installed."""

import os
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu import sanitizer
from benchmarks.gpu.parts import Part

ORDER: dict[str, Any] = {"failed": [["load", "two"], ["shapes", "crashes"]], "ended": [], "only": None}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that notes its arguments and runs the worker, as compute-sanitizer does."""
    file = tmp_path / sanitizer.PROGRAM
    text = (
        f'#!/bin/sh\necho "$1 $2" >>{tmp_path}/asked\nshift 2\n"$@"\necho "========= ERROR SUMMARY: 1 error"\nexit 9\n'
    )
    file.write_text(text)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    parts = dict.fromkeys(("load", "shapes"), Part("tests.benchmarks.gpu.fake_parts:fine", 60))
    monkeypatch.setattr(sanitizer, "PARTS", parts)
    return file


def test_each_failed_task_runs_again_alone_under_each_tool(program: Path) -> None:
    tasks = sanitizer.sanitizer(ORDER)
    assert [task.name for task in tasks[:2]] == ["memcheck: load: two", "racecheck: load: two"]
    records = [record for task in tasks for record in task.run()]
    assert len(records) == 4
    assert all(record["returncode"] == 9 for record in records)
    assert all(record["said"] == ["========= ERROR SUMMARY: 1 error"] for record in records)
    asked = (program.parent / "asked").read_text().splitlines()
    assert asked == ["--tool memcheck", "--tool racecheck"] * 2


def test_nothing_runs_where_nothing_failed_and_its_absence_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sanitizer.sanitizer({**ORDER, "failed": []}) == []
    monkeypatch.setenv("PATH", "")
    (record,) = sanitizer.sanitizer(ORDER)[0].run()
    assert record["absent"] == "compute-sanitizer is not on the PATH"
