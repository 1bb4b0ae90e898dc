"""Counters of a model are sums over its engines: none falls when an engine fails, is replaced, or serves again."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ingot.runtime.engine.engine import Engine
from ingot.runtime.server.models.counter_totals import Counts, Totals
from ingot.runtime.steps.metrics import Histogram
from tests.runtime.engines import text_engine
from tests.runtime.server.models.test_admission import gated_engine
from tests.runtime.server.models.test_swap import (
    OPTIONS,
    _quick_looks_and_no_times,  # noqa: F401 (a fixture that is used by itself)
    complete,
    reload,
    replacements,
)
from tests.runtime.server.servers import SECONDS, Running, running

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def counters(server: Running) -> Samples:
    """Samples of the counters and histograms of the model."""
    text = httpx2.get(f"{server.url}/metrics").text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.type in ("counter", "histogram") and "model_name" in sample.labels
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset({"model_name": "fake", **labels}.items())]


def require_no_fall(before: Samples, after: Samples) -> None:
    fallen = {key: (number, after.get(key)) for key, number in before.items() if after.get(key, -1.0) < number}
    assert not fallen


def state(server: Running) -> str:
    return replacements(server).last_reload("fake").state


def test_a_request_that_a_failed_engine_had_is_counted_once_and_a_restart_loses_nothing() -> None:
    """In a thread. tests/runtime/server/test_lifecycle.py has an engine's process that dies."""
    engine, executor = gated_engine()
    with running(engine, OPTIONS, reload=lambda name, is_new: text_engine()) as server:
        complete(server)
        before, old = counters(server), server.model()
        executor.fails = True
        with pytest.raises(openai.InternalServerError):
            complete(server)
        server.until(lambda: server.model() is not old)
        server.until(lambda: server.service.num_open == 0)
        after = counters(server)
        require_no_fall(before, after)
        assert (value(before, "ingot_failed_requests_total"), value(after, "ingot_failed_requests_total")) == (0, 1)
        assert value(after, "vllm:request_success_total", finished_reason="error") == 1
        assert value(after, "ingot_finished_requests_total") == value(before, "ingot_finished_requests_total") + 1 + 1
        assert server.model().totals.engines == (server.model(),)


def test_a_new_artifact_counts_on_and_the_old_engine_until_its_last_request_has_ended() -> None:
    engine, executor = gated_engine()
    with (
        running(engine, OPTIONS, reload=lambda name, is_new: text_engine()) as server,
        ThreadPoolExecutor(1) as threads,
    ):
        old = server.model()
        executor.gate.clear()
        stays = threads.submit(complete, server, max_tokens=30)
        server.until(lambda: old.gate.num_open == 1)
        before = counters(server)
        executor.gate.set()
        reload(server)
        server.until(lambda: server.model() is not old)
        require_no_fall(before, counters(server))
        stays.result()
        server.until(lambda: state(server) == "kept" and old not in server.model().totals.engines)
        after = counters(server)
    require_no_fall(before, after)
    assert value(after, "vllm:generation_tokens_total") >= 4 + 30 + 4, "of both warm-ups, too"
    assert value(after, "ingot_encode_seconds_count") == 1


def test_what_an_engine_counted_on_probation_stays_when_the_one_before_it_serves_again() -> None:
    new, executor = gated_engine()
    options = replace(OPTIONS, probation_seconds=SECONDS)
    with running(text_engine(), options, reload=lambda name, is_new: new) as server:
        complete(server)
        old = server.model()
        reload(server)
        server.until(lambda: server.model() is not old)
        complete(server)
        before = counters(server)
        executor.fails = True
        with pytest.raises(openai.InternalServerError):
            complete(server)
        server.until(lambda: server.model() is old and old.totals.engines == (old,))
        after = counters(server)
        require_no_fall(before, after)
        assert value(after, "vllm:generation_tokens_total") == value(before, "vllm:generation_tokens_total") >= 18
        assert value(after, "ingot_failed_requests_total") == 1


def test_a_model_that_was_idle_counts_on() -> None:
    options = replace(OPTIONS, idle_unload_seconds=0.2)
    engines: list[Engine] = [text_engine()]
    with running(text_engine(), options, reload=lambda name, is_new: engines.pop()) as server:
        complete(server)
        before, old = counters(server), server.model()
        server.until(lambda: old.is_unloaded and not old.totals.engines)
        require_no_fall(before, counters(server))
        complete(server)
        after = counters(server)
    require_no_fall(before, after)
    assert value(after, "vllm:generation_tokens_total") == value(before, "vllm:generation_tokens_total") + 4 + 5


def test_values_of_each_kind_are_added_and_those_of_one_engine_alone_are_kept() -> None:
    observed = [Histogram((1.0, 2.0)) for _ in range(3)]
    observed[0].observe(0.5)
    observed[1].observe(3.0)
    first: Counts = {"requests": 2, "by_reason": {"stop": 1}, "seconds": observed[0].snapshot(), "drafts": 7}
    second: Counts = {"requests": 3, "by_reason": {"stop": 1, "length": 4}, "seconds": observed[1].snapshot()}
    totals = Totals()
    totals.begin("first", lambda: first)
    totals.begin("second", lambda: second)
    totals.add({"seconds": observed[2].snapshot()})
    for _ in range(2):
        found = totals.read()
        seconds = found["seconds"]
        assert {**found, "seconds": 0} == {
            "requests": 5, "by_reason": {"stop": 2, "length": 4}, "seconds": 0, "drafts": 7,
        }  # fmt: skip
        assert (seconds.counts, seconds.total, seconds.least, seconds.most) == ((1, 0, 1), 3.5, 0.5, 3.0)  # type: ignore[union-attr]
        totals.end("first")
    assert totals.engines == ("second",)
