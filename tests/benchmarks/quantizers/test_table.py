"""The comparison's tables name the best of both sides, and its JSON grows without losing rows."""

from pathlib import Path

from benchmarks.quantizers.table import Row, best_kl, markdown, read_rows, update_json

FLOAT = Row("m", 16, 0, "float32", 0.0, 2.0, 1.0, 0.0)
THEIRS = Row("m", 4, 32, "package", 0.02, 2.2, 0.9, 1.0)
WORSE = Row("m", 4, 32, "other", 0.04, 2.4, 0.8, 1.0)
OURS = Row("m", 4, 32, "Ingot GPTQ, asym", 0.01, 2.1, 0.95, 1.0)
FAILED = Row("m", 4, 32, "third", failure="it ended without a word")


def test_the_best_of_each_side_is_the_smallest_kl_and_float32_is_nobodys() -> None:
    rows = [FLOAT, WORSE, THEIRS, OURS, FAILED]
    assert best_kl(rows, ours=False) == THEIRS.kl
    assert best_kl(rows, ours=True) == OURS.kl
    assert best_kl([FAILED], ours=False) is None


def test_a_case_is_sorted_by_kl_with_shares_of_the_best_package_and_failures_last() -> None:
    lines = markdown([FLOAT, WORSE, FAILED, THEIRS, OURS]).splitlines()
    assert lines[2] == "| m | 4 | 32 | package | 0.02000 | GPTQ, asym | 0.01000 | 0.50 |"
    assert lines[-5:] == [
        "| float32 | 0.00000 | 2.0000 | 1.0000 |  |",
        "| **Ingot GPTQ, asym** | 0.01000 | 2.1000 | 0.9500 | 0.50 |",
        "| package | 0.02000 | 2.2000 | 0.9000 | 1.00 |",
        "| other | 0.04000 | 2.4000 | 0.8000 | 2.00 |",
        "| third | it ended without a word | | | |",
    ]


def test_a_side_without_figures_leaves_its_cells_empty() -> None:
    assert "| m | 4 | 32 | |  | GPTQ, asym | 0.01000 |  |" in markdown([OURS])


def test_rows_of_a_later_run_replace_their_own_kind_alone(tmp_path: Path) -> None:
    path = tmp_path / "results" / "rows.json"
    update_json(path, "m", {"seed": 0}, [FLOAT, THEIRS, FAILED])
    better = Row("m", 4, 32, "package", 0.01, 2.0, 0.9, 1.0)
    update_json(path, "n", {"seed": 1}, [better])
    assert read_rows(path) == [FLOAT, FAILED, better]
    assert '"n": {' in path.read_text("utf-8")
