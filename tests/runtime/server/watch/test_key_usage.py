"""What each key has used is counted, with a bounded number of rows, and its cost adds up to the server's."""

from pathlib import Path

import httpx2
import pytest

from ingot.runtime.server.http.access import ApiKeys
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.server.watch.key_usage import IDLE, MOST_KEYS, OTHERS, KeyUsage
from tests.runtime.engines import text_engine
from tests.runtime.server.servers import running


def test_costs_are_shared_by_tokens_and_add_up() -> None:
    usage = KeyUsage()
    assert usage.costs(1.0) == {IDLE: 1.0}
    usage.count("a", 10, 20)
    usage.count("b", 5, 5)
    usage.count("", 100, 100)
    assert usage.costs(5.0) == {IDLE: 1.0, "a": 3.0, "b": 1.0}
    usage.count("b", 0, 4)
    assert usage.costs(7.0) == {IDLE: 1.0, "a": 3.0, "b": 3.0}
    assert sum(usage.costs(9.0).values()) == pytest.approx(9.0)


def test_a_cost_that_falls_changes_nothing() -> None:
    usage = KeyUsage()
    usage.costs(3.0)
    assert usage.costs(1.0) == {IDLE: 3.0}


def test_more_keys_than_may_be_share_a_row() -> None:
    usage = KeyUsage()
    for number in range(MOST_KEYS + 50):
        usage.count(f"key{number}", 1, 1)
    assert len(usage.requests) == MOST_KEYS + 1
    assert usage.requests[OTHERS] == 50
    usage.count("key0", 1, 1)
    assert usage.requests["key0"] == 2


def test_metrics_have_what_a_key_used_and_cost(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first-key-1\nsecond-key-2 max_output_tokens=3\n")
    options = ServerOptions(price_per_hour=3600.0, max_output_tokens=5)
    with running(text_engine(), options, keys=ApiKeys.read(tmp_path / "keys")) as server:
        ends = []
        for key in ("first-key-1", "second-key-2"):
            body = {"prompt": "def read", "max_tokens": 7, "ignore_eos": True}
            headers = {"Authorization": f"Bearer {key}"}
            answer = httpx2.post(f"{server.url}/v1/completions", json=body, headers=headers).json()
            ends.append((answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]))
        text = httpx2.get(f"{server.url}/metrics").text
    assert ends == [(5, "length"), (3, "length")]
    lines = [line for line in text.splitlines() if line.startswith("ingot_key_generation_tokens_total")]
    assert sorted(line.split()[-1] for line in lines) == ["3.0", "5.0"]
    costs = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("ingot_key_cost_total")]
    total = next(float(line.split()[-1]) for line in text.splitlines() if line.startswith("ingot_cost_total"))
    assert sum(costs) == pytest.approx(total)
