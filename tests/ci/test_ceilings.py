"""Counts of the fence: each finds what it should in a small repository, may fall, and may not rise."""

import json
import subprocess
from pathlib import Path

import ceilings
import pytest
from ceilings import main
from module_graph import ModuleGraph

from tests.ci.repositories import repository

UNMARKED = {"lines that ship": 500}
PLAIN = '''"""A module."""


def load() -> int:
    """Return the number of blocks."""
    return 1  # one


# A comment that explains: it may say of, for and by.
# of the line before
'''


def compare(graph: ModuleGraph, allowed: dict[str, int], *arguments: str) -> int:
    """Compare with these ceilings, which are written next to the sources."""
    file = graph.root / "ceilings.json"
    file.write_text(json.dumps(allowed))
    return main(arguments, graph, file)


def test_plain_sources_pass(tmp_path: Path) -> None:
    graph = repository(tmp_path, {"runtime/kv/blocks.py": PLAIN})
    assert compare(graph, UNMARKED) == 0


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("x = 0  # of these\n", "comments that continue the code"),
        ("# that no thread has taken\nx = 0\n", "comments that continue the code"),
        ('def f() -> int:\n    """What is kept."""\n', "docstrings that are noun clauses"),
        ('def f() -> None:\n    """Skip what others do. Return."""\n', ceilings.ENDS),
    ],
)
def test_a_habit_is_found_and_named_with_its_place(
    tmp_path: Path, source: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = repository(tmp_path, {"runtime/kv/blocks.py": source})
    assert compare(graph, UNMARKED) == 1
    shown = capsys.readouterr().out
    assert shown.startswith(f"{name}: 1, the ceiling is 0\n  runtime/kv/blocks.py:1: ")
    assert compare(graph, {**UNMARKED, name: 1}) == 0


def test_a_function_without_a_result_and_a_line_within_a_comment_may_begin_so(tmp_path: Path) -> None:
    source = 'def f() -> None:\n    """What follows is logged."""\n\n\n# A comment\n# of two lines\n'
    assert compare(repository(tmp_path, {"runtime/kv/blocks.py": source}), UNMARKED) == 0


def test_a_folder_with_too_many_modules_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {f"passes/fusion/m{number}.py": "" for number in range(17)}
    assert compare(repository(tmp_path, files), {}) == 1
    assert "modules in passes/fusion: 17, the ceiling is 16" in capsys.readouterr().out


def test_two_meanings_one_importer_and_an_upward_import_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "runtime/steps/batch.py": "class Gate: ...\n\n\nclass _Own: ...\n",
        "runtime/text/words.py": "from ingot.runtime.steps.batch import Gate\n\n\nclass _Own: ...\n",
        "passes/base.py": "class Gate: ...\n",
    }
    graph = repository(tmp_path, files)
    assert compare(graph, UNMARKED) == 1
    shown = capsys.readouterr().out
    assert "public class names with several meanings: 1" in shown
    assert "Gate: passes/base.py, runtime/steps/batch.py" in shown
    assert "runtime/steps/batch.py: only runtime/text/words.py imports it" in shown
    assert (
        "upward imports in runtime: 1, the ceiling is 0\n  runtime/text/words.py imports runtime/steps/batch" in shown
    )
    assert "_Own" not in shown


def test_a_count_that_fell_lowers_its_ceiling_and_none_rises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = repository(tmp_path, {"runtime/kv/blocks.py": PLAIN})
    allowed = {**UNMARKED, "comments that continue the code": 2}
    assert compare(graph, allowed) == 0
    assert "comments that continue the code from 2 to 0" in capsys.readouterr().out
    assert compare(graph, allowed, "--lower") == 0
    assert json.loads((tmp_path / "ceilings.json").read_text()) == UNMARKED
    assert compare(graph, {}, "--lower") == 1
    assert json.loads((tmp_path / "ceilings.json").read_text()) == {}


def test_findings_in_files_that_differ_from_main_are_shown_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = repository(tmp_path, {"runtime/kv/old.py": "x = 0  # of these\n", "runtime/kv/new.py": ""})
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", "-C", str(tmp_path), "add", "."], check=True)
    subprocess.run(["git", "-C", str(tmp_path), *author, "commit", "--quiet", "-m", "old"], check=True)
    (tmp_path / "runtime/kv/new.py").write_text("y = 0  # of those\n")
    assert compare(graph, {**UNMARKED, "comments that continue the code": 1}) == 1
    shown = capsys.readouterr().out
    assert "2, the ceiling is 1" in shown
    assert "# of those" in shown
    assert "# of these" not in shown
