"""Records are kept by their cell in the processor's file, and a run can be resumed."""

from pathlib import Path

import pytest
from benchmarks import device
from benchmarks.cpu.comparison_results import ProcessorResults, all_results
from benchmarks.device import processor_name

ONE = {"part": "decode", "shape": "small", "threads": 1}
TWO = ONE | {"threads": 2}


def test_a_record_replaces_that_of_the_same_cell_in_the_file_and_has_the_processors_name(tmp_path: Path) -> None:
    results = ProcessorResults.of_this_machine(tmp_path)
    for key, value in ((ONE, 1), (TWO, 2), (ONE, 3)):
        results.put(key, key | {"value": value, "engines": {}, "failed": {}})
    found = ProcessorResults.of_this_machine(tmp_path)
    assert [(record["threads"], record["value"]) for record in found.records] == [(2, 2), (1, 3)]
    assert {record["processor"] for record in found.records} == {processor_name()} == {found.device["processor"]}
    assert list(tmp_path.iterdir()) == [found.path]


def test_each_processor_has_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AMD EPYC (Zen 4)", "AMD EPYC (Zen 5)"):
        for module in (device, __import__("benchmarks.cpu.comparison_results", fromlist=["x"])):
            monkeypatch.setattr(module, "processor_name", lambda name=name: name)
        ProcessorResults.of_this_machine(tmp_path).put(ONE, ONE | {"engines": {}, "failed": {}})
    assert [results.device["processor"] for results in all_results(tmp_path)] == [
        "AMD EPYC (Zen 4)",
        "AMD EPYC (Zen 5)",
    ]


def test_a_cell_is_there_if_every_engine_was_measured_or_failed_in_it(tmp_path: Path) -> None:
    results = ProcessorResults.of_this_machine(tmp_path)
    results.put(ONE, ONE | {"engines": {"a": {}, "b": {}}, "failed": {"c": "why"}, "missing": {"d": "not installed"}})
    assert results.has(ONE, ["a"])
    assert results.has(ONE, ["b", "a", "c"])
    assert not results.has(ONE, ["a", "d"])
    assert not results.has(TWO, ["a"])


def test_parts_are_chosen_from_one_file(tmp_path: Path) -> None:
    results = ProcessorResults.of_this_machine(tmp_path)
    load = ONE | {"part": "load"}
    for key in (ONE, load):
        results.put(key, key | {"engines": {}, "failed": {}})
    assert [record["part"] for record in results.of("load", "recipes")] == ["load"]
