"""Records are kept by their cell, and a run can be resumed."""

from pathlib import Path

from benchmarks.cpu.comparison_results import PartResults

ONE = {"part": "decode", "shape": "small", "threads": 1}
TWO = ONE | {"threads": 2}


def test_a_record_replaces_that_of_the_same_cell_in_the_file(tmp_path: Path) -> None:
    results = PartResults.load(tmp_path, "decode")
    for key, value in ((ONE, 1), (TWO, 2), (ONE, 3)):
        results.put(key, key | {"value": value, "engines": {}, "failed": {}})
    found = PartResults.load(tmp_path, "decode")
    assert [(record["threads"], record["value"]) for record in found.records] == [(2, 2), (1, 3)]
    assert found.device["cores"]
    assert [path.name for path in tmp_path.iterdir()] == ["decode.json"]


def test_a_cell_is_there_if_every_engine_was_measured(tmp_path: Path) -> None:
    results = PartResults.load(tmp_path, "decode")
    results.put(ONE, ONE | {"engines": {"a": {}, "b": {}}, "failed": {"c": "why"}})
    assert results.has(ONE, ["a"])
    assert results.has(ONE, ["b", "a"])
    assert not results.has(ONE, ["a", "c"])
    assert not results.has(TWO, ["a"])
