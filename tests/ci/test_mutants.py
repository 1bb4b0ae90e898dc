"""Mutants are small changes of the code alone."""

import ast
from pathlib import Path

from mutants import mutants_of, run

SOURCE = '''"""A module with 1 number in its docstring."""


def first(values: "list[int]", limit: int = 3) -> int | None:
    """Return 2."""
    values.sort()
    if not values or len(values) >= limit:
        return None
    return values[0]
'''
EXPECTED = {
    "limit: int = 4",
    "limit: int = 2",
    "    pass\n    if",
    "not values and len(values) >= limit",
    "if values or",
    "len(values) > limit",
    "return None\n    return",
    "return values[1]",
    "return values[-1]",
}


def test_each_mutant_changes_one_place_and_no_text() -> None:
    mutated = [mutant.of(SOURCE) for mutant in mutants_of(SOURCE)]
    assert len(mutated) == len({*mutated}) == len(EXPECTED)
    for text in mutated:
        ast.parse(text)
        assert text.startswith(SOURCE.splitlines()[0])
        assert '"""Return 2."""' in text
    assert all(any(part in text for text in mutated) for part in EXPECTED)


def test_places_after_letters_of_several_bytes_are_found() -> None:
    source = 'names = ["é", 1]  # ü\nis_set = True\n'
    assert {mutant.of(source) for mutant in mutants_of(source)} == {
        source.replace("1", "2"),
        source.replace("1", "0"),
        source.replace("True", "False"),
    }


def test_a_run_says_whether_a_test_fails_and_ends_in_time(tmp_path: Path) -> None:
    (tmp_path / "test_good.py").write_text("def test() -> None:\n    assert 1\n")
    (tmp_path / "test_bad.py").write_text("def test() -> None:\n    assert 0\n")
    (tmp_path / "test_endless.py").write_text("def test() -> None:\n    while True:\n        pass\n")
    assert not run(tmp_path, ["test_good.py"], 60)
    assert run(tmp_path, ["test_good.py", "test_bad.py"], 60)
    assert run(tmp_path, ["test_endless.py"], 3)
