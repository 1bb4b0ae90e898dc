"""docs/security.md names a test for every untrusted input, and each of them exists."""

import re

import pytest

from tests.data_paths import ROOT

PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")
COLUMNS = ["input", "parser", "size", "depth", "time", "memory", "ends", "tests"]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
INPUTS = [row for row in ROWS if row != COLUMNS]


def named_in(cell: str) -> list[tuple[str, str]]:
    """Files and functions that a cell names; one without a file is in the file before it."""
    found, file = [], ""
    for given, name in re.findall(r"`([\w/.]*)::(\w+)`", cell):
        file = given or file
        found.append((file, name))
    return found


def test_every_table_has_the_same_columns() -> None:
    assert ROWS.count(COLUMNS) == 3
    assert len(INPUTS) > 25
    assert {len(row) for row in ROWS} == {len(COLUMNS)}


@pytest.mark.parametrize("row", INPUTS, ids=[row[0] for row in INPUTS])
def test_the_bounds_of_an_input_have_tests_that_exist(row: list[str]) -> None:
    named = named_in(row[-1])
    assert named, "no test"
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{name}"
