"""The benchmark of `ingot doctor` looks while its load runs, and counts busy neighbours apart from alarms."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from benchmarks.serve import diagnosis
from benchmarks.serve.diagnosis import diagnosed, healthy_runs, planted
from benchmarks.serve.faults import FAULTS, Place, closed_loop, random_prompts

from tests.runtime.engines import text_engine
from tests.runtime.server.servers import running


def test_a_load_runs_between_the_two_looks() -> None:
    with running(text_engine(max_sequences=2)) as server:
        found = diagnosed(Place(server.url, os.getpid()), closed_loop(random_prompts(20, 30), 12), seconds=1.0)
        assert server.model().engine.metrics().num_finished > 8
    assert "batch-full" in found


def test_busy_neighbours_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([["busy-neighbours"], ["busy-neighbours", "swap"], []])
    answered: list[str] = []

    @contextmanager
    def no_server(artifact: str, options: tuple[str, ...]) -> Iterator[Place]:
        yield Place("http://127.0.0.1:1", 1)

    monkeypatch.setattr(diagnosis, "place_of", no_server)
    monkeypatch.setattr(Place, "post", lambda place, path, body: answered.append(path))
    monkeypatch.setattr(diagnosis, "diagnosed", lambda place, load, seconds: next(outcomes))
    figures = healthy_runs("demo", 3, 0.1)
    assert (figures["runs"], figures["alarms"], figures["runs_with_busy_neighbours"]) == (3, 1, 2)
    assert figures["found"] == [{"load": "eight streams", "found": ["swap"]}]

    assert not answered
    outcomes = iter([["busy-neighbours", "batch-full"], ["swap", "busy-neighbours"], ["cold-start"]])
    assert planted("demo", "batch-full") == {
        "found": ["busy-neighbours", "batch-full"],
        "is_first": True,
        "is_found": True,
        "busy_neighbours_too": True,
    }
    assert not planted("demo", "busy-neighbours")["is_first"]
    num_before = len(answered)
    assert num_before >= 16, "the doctor takes a server for a new one until it has answered some requests"
    assert planted("demo", "cold-start")["is_first"]
    assert len(answered) == num_before


def test_twelve_faults_are_planted() -> None:
    assert len(FAULTS) == 12
