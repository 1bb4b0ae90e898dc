"""The benchmark of traces replays by the example's tool against a server, and records the command lines."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from benchmarks.serve import traces
from benchmarks.serve.traces import TRACES, Trace, commands, replay

from tests.runtime.engines import text_engine
from tests.runtime.server.servers import running


@contextmanager
def _fake_server(artifact: str) -> Iterator[str]:
    with running(text_engine()) as started:
        yield started.url


@pytest.fixture(autouse=True)
def fake_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "server", _fake_server)


def test_a_trace_is_replayed_and_its_report_kept(tmp_path: Path) -> None:
    rows = [{"timestamp": at, "input_length": 1024, "output_length": 64, "hash_ids": [0, 1 + at]} for at in range(2)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    found = replay("demo", tmp_path, Trace("trace.jsonl", scale=1 / 32, speed=1.0), 10.0)
    assert found["requests"]["ok"] == 2
    assert found["commands"][1].endswith("trace.jsonl --scale 0.03125 --speed 1 --duration 10 --retry 1")


def test_command_lines_have_no_folders() -> None:
    serve, _ = commands("/a/demo", TRACES[1], 60.0)
    assert serve == "ingot serve demo"


def test_a_trace_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"the replay of .*missing\.csv ended with 2 and no report"):
        replay("demo", tmp_path, Trace("missing.csv", 1.0, 1.0), 1.0)
