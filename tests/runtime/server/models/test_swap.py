"""Engines that fail are loaded again, and new artifacts take over, or do not."""

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest

from ingot.errors import EngineError, IngotError, Overloaded
from ingot.runtime.engine.engine import Engine
from ingot.runtime.hosting.async_engine import AsyncEngine
from ingot.runtime.server import lifecycle, service
from ingot.runtime.server.models import swap, swap_comparison
from ingot.runtime.server.models.served_models import Models, ServedModel
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.server.service import Service
from tests.runtime.engines import text_engine
from tests.runtime.server.models.test_admission import gated_engine
from tests.runtime.server.servers import SECONDS, Running, running

OPTIONS = ServerOptions(drain_seconds=SECONDS, probation_seconds=0.2)


@pytest.fixture(autouse=True)
def _quick_looks_and_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_WATCH_SECONDS", 0.01)
    monkeypatch.setattr(swap, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(swap_comparison, "_SLOWER", 1e9)  # engines whose steps take microseconds differ by chance


def complete(server: Running, **options: Any) -> openai.types.Completion:
    with server.client() as client:
        found: openai.types.Completion = client.completions.create(
            prompt=[1, 2, 3], **{"model": "fake", "max_tokens": 5, "extra_body": {"ignore_eos": True}, **options}
        )
        return found


def health(server: Running) -> int:
    return httpx2.get(f"{server.url}/health").status_code


def replacements(server: Running) -> swap.Replacements:
    assert server.service.replacements
    return server.service.replacements


def reload(server: Running) -> None:
    """As SIGHUP does."""
    server.loop.call_soon_threadsafe(replacements(server).reload_all)


def test_a_failed_engine_is_loaded_again_and_its_requests_get_an_error() -> None:
    engine, executor = gated_engine()
    with (
        running(engine, OPTIONS, reload=lambda name, is_new: text_engine()) as server,
        ThreadPoolExecutor(2) as threads,
    ):
        before = server.model()
        executor.gate.clear()
        failing = [threads.submit(complete, server, max_tokens=50) for _ in range(2)]
        server.until(lambda: before.gate.num_open == 2)
        executor.fails = True
        executor.gate.set()
        for each in failing:
            with pytest.raises(openai.InternalServerError, match="the engine failed") as caught:
                each.result()
            assert caught.value.status_code == 503
        server.until(lambda: server.model() is not before)
        assert complete(server).choices[0].text
        assert health(server) == httpx2.get(f"{server.url}/ready").status_code == 200
        server.require_nothing_left()


def test_liveness_fails_once_an_engine_cannot_be_loaded_again(caplog: pytest.LogCaptureFixture) -> None:
    engine, executor = gated_engine()
    num_loads = []

    def load(name: str, is_new: bool) -> Engine:
        num_loads.append(is_new)
        raise IngotError("the folder is gone")

    with running({"fake": engine, "other": text_engine()}, OPTIONS, reload=load) as server:
        assert "ingot_ready 1.0" in httpx2.get(f"{server.url}/metrics").text
        executor.fails = True
        with pytest.raises(openai.InternalServerError):
            complete(server)
        server.until(lambda: health(server) == 503)
        assert num_loads == [False] * swap.MOST_RESTARTS
        assert "ingot_ready 0.0" in httpx2.get(f"{server.url}/metrics").text
        for _ in range(2):
            server.loop.call_soon_threadsafe(replacements(server).restart_failed)
        server.until(lambda: "restart the server or POST /admin/reload" in caplog.text)
        assert caplog.text.count("and is not any more: find the cause, then") == 1
        with pytest.raises(openai.InternalServerError) as caught:
            complete(server)
        assert caught.value.status_code == 503
        assert complete(server, model="other").choices[0].text


def test_restarts_pause_longer_and_longer_and_requests_are_told_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, executor = gated_engine()
    pauses: list[float] = []
    waits = threading.Event()
    sleep = asyncio.sleep

    async def paused(seconds: float) -> None:
        pauses.append(seconds)
        while len(pauses) == 3 and not waits.is_set():
            await sleep(0.01)

    def load(name: str, is_new: bool) -> Engine:
        if len(pauses) < 4:
            raise IngotError("the disk is away")
        return text_engine()

    monkeypatch.setattr(swap, "_PAUSES_SECONDS", (0.0, 1.0, 50.0, 300.0))
    monkeypatch.setattr(swap, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": paused}))
    with running(engine, OPTIONS, reload=load) as server:
        before = server.model()
        executor.fails = True
        with pytest.raises(openai.InternalServerError):
            complete(server)
        server.until(lambda: len(pauses) == 3)
        with pytest.raises(openai.InternalServerError) as caught:
            complete(server)
        assert 45 < float(caught.value.response.headers["retry-after-ms"]) / 1000 < 70
        waits.set()
        server.until(lambda: server.model() is not before)
        assert complete(server).choices[0].text
    assert pauses[0] == 0
    for pause, least in zip(pauses[1:4], (1, 50, 300), strict=True):
        assert least <= pause <= 1.25 * least


def test_a_server_without_an_engine_that_serves_or_is_loaded_again_ends(caplog: pytest.LogCaptureFixture) -> None:
    engine, executor = gated_engine()

    def load(name: str, is_new: bool) -> ServedModel:
        raise IngotError("the folder is gone")

    async def main() -> None:
        server, ready = Service(OPTIONS), asyncio.Event()
        serving = asyncio.create_task(
            lifecycle.run(
                server,
                lifecycle.listen("127.0.0.1", 0),
                lambda: Models([ServedModel("fake", AsyncEngine(engine), OPTIONS)]),
                reload=load,
                on_ready=lambda models: ready.set(),
            )
        )
        async with asyncio.timeout(SECONDS):
            await ready.wait()
            executor.fails = True
            with pytest.raises(IngotError, match="the device is gone"):
                await server.models.all[0].engine.generate([1])
            await serving

    with pytest.raises(EngineError, match="no engine serves, and none is loaded again") as caught:
        asyncio.run(main())
    assert caught.value.exit_code
    assert caplog.text.count("and is not any more: find the cause, then start the server") == 1


def test_a_server_does_not_end_while_new_artifacts_are_loaded() -> None:
    may_load = threading.Event()

    def load(name: str, is_new: bool) -> Engine:
        if not is_new:
            raise IngotError("too little memory")
        assert may_load.wait(SECONDS)
        return text_engine()

    with running({"fake": text_engine(), "other": text_engine()}, OPTIONS, reload=load) as server:
        reload(server)
        server.until(lambda: replacements(server).last_reload("fake").state == "loading")
        for model in server.service.models.all:
            replacements(server)._given_up.add(model)
        replacements(server).may_restart = lambda model: False  # type: ignore[method-assign]
        assert not replacements(server).has_given_up
        may_load.set()
        server.until(lambda: replacements(server).last_reload("other").state == "kept")
        assert complete(server, model="other").choices[0].text


def test_a_failed_engine_does_not_wait_for_another_models_probation() -> None:
    engine, executor = gated_engine()
    options = replace(OPTIONS, probation_seconds=3600.0)
    with running({"one": text_engine(), "two": engine}, options, reload=lambda name, is_new: text_engine()) as server:
        first, second = server.model("one"), server.model("two")
        reload(server)
        server.until(lambda: server.model("one") is not first)
        assert replacements(server).last_reload("one").state == "probation"
        executor.fails = True
        with pytest.raises(openai.InternalServerError):
            complete(server, model="two")
        server.until(lambda: server.model("two") is not second)
        assert complete(server, model="two").choices[0].text
        assert replacements(server).last_reload("one").state == "probation"


def test_an_engine_is_loaded_again_after_a_failure_that_is_not_of_ingot() -> None:
    engine, executor = gated_engine()
    found: list[Engine | OSError] = [OSError(12, "Cannot allocate memory"), text_engine()]

    def load(name: str, is_new: bool) -> Engine:
        one = found.pop(0)
        if isinstance(one, OSError):
            raise one
        return one

    with running(engine, OPTIONS, reload=load) as server:
        before = server.model()
        executor.fails = True
        with pytest.raises(openai.InternalServerError):
            complete(server)
        server.until(lambda: server.model() is not before)
        assert complete(server).choices[0].text
        assert replacements(server).num_restarts == {"fake": 2}
        server.require_nothing_left()


def test_a_model_that_cannot_be_reloaded_leaves_the_others_to_be_reloaded(caplog: pytest.LogCaptureFixture) -> None:
    def load(name: str, is_new: bool) -> Engine:
        if name == "one":
            raise OSError(24, "Too many open files")
        return text_engine()

    with running({"one": text_engine(), "two": text_engine()}, OPTIONS, reload=load) as server:
        before = server.model("one"), server.model("two")
        reload(server)
        server.until(lambda: server.model("two") is not before[1])
        assert server.model("one") is before[0]
        refused = replacements(server).last_reload("one")
        assert (refused.state, refused.reason) == ("refused", "[Errno 24] Too many open files")
        assert "one: the new artifact is not served: [Errno 24] Too many open files" in caplog.text
        server.until(lambda: replacements(server).last_reload("two").state == "kept")
        assert replacements(server).num_reloads == {("one", "refused"): 1, ("two", "kept"): 1}
        server.require_nothing_left()


def test_requests_go_back_when_the_new_engine_is_slow_at_equal_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passed the check before the swap, when the old engine was busy."""

    async def slowness(old: ServedModel, new: ServedModel) -> str:
        assert server.service.models.with_requests == (new, old)
        return "a token takes 3 ms, with the engine before 1 ms"

    monkeypatch.setattr(swap_comparison, "slowness", slowness)
    options = ServerOptions(drain_seconds=SECONDS, probation_seconds=SECONDS)
    with running(text_engine(), options, reload=lambda name, is_new: text_engine()) as server:
        before = server.model()
        reload(server)
        server.until(lambda: replacements(server).last_reload("fake").state == "given_up")
        assert server.model() is before
        assert server.service.models.with_requests == (before,)
        given_up = replacements(server).last_reload("fake")
        assert given_up.reason == "a token takes 3 ms, with the engine before 1 ms"
        assert None not in (given_up.started, given_up.swapped, given_up.ended)
        assert complete(server).choices[0].text
        server.require_nothing_left()


def test_a_comparison_that_an_engine_refuses_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = iter(range(3))

    async def slowness(old: ServedModel, new: ServedModel) -> str | None:
        number = next(tries)
        if number == 0:
            raise Overloaded("256 requests are open")
        return "slow" if number == 2 else None

    monkeypatch.setattr(swap_comparison, "slowness", slowness)
    monkeypatch.setattr(swap, "_COMPARISONS", 10_000)
    options = ServerOptions(drain_seconds=SECONDS, probation_seconds=SECONDS)
    with running(text_engine(), options, reload=lambda name, is_new: text_engine()) as server:
        reload(server)
        server.until(lambda: replacements(server).last_reload("fake").state == "given_up")
        server.require_nothing_left()


def test_a_new_artifact_takes_over_and_open_requests_end_where_they_are() -> None:
    engine, executor = gated_engine()
    with (
        running(engine, OPTIONS, reload=lambda name, is_new: text_engine()) as server,
        ThreadPoolExecutor(1) as threads,
    ):
        before = server.model()
        complete(server)
        assert len(before.recent_prompts) == 1
        executor.gate.clear()
        stays = threads.submit(complete, server, max_tokens=30)
        server.until(lambda: before.gate.num_open == 1)
        executor.gate.set()
        reload(server)
        server.until(lambda: server.model() is not before)
        usage = stays.result().usage
        assert usage
        assert usage.completion_tokens == 30
        assert complete(server).choices[0].text
        server.until(lambda: not before.engine.is_healthy)  # it was closed after the probation
        assert server.model().engine.is_healthy
        server.require_nothing_left()


def test_requests_go_back_when_the_new_engine_fails_on_probation() -> None:
    new, executor = gated_engine()
    options = ServerOptions(drain_seconds=SECONDS, probation_seconds=SECONDS)
    with running(text_engine(), options, reload=lambda name, is_new: new) as server:
        before = server.model()
        reload(server)
        server.until(lambda: server.model() is not before)
        executor.fails = True
        with pytest.raises(openai.InternalServerError):
            complete(server)
        server.until(lambda: server.model() is before)
        assert complete(server).choices[0].text
        assert health(server) == 200
        server.require_nothing_left()


def test_where_both_engines_die_on_probation_what_had_served_is_started_again() -> None:
    (old, old_executor), (new, new_executor) = gated_engine(), gated_engine()
    loads: list[bool] = []

    def load(name: str, is_new: bool) -> Engine:
        loads.append(is_new)
        return new if is_new else text_engine()

    with running(old, replace(OPTIONS, probation_seconds=SECONDS), reload=load) as server:
        before = server.model()
        reload(server)
        server.until(lambda: server.model() is not before)
        after = server.model()
        old_executor.fails = True
        server.loop.call_soon_threadsafe(lambda: asyncio.ensure_future(before.engine.generate([1])))
        server.until(lambda: not before.engine.is_healthy)
        new_executor.fails = True
        with pytest.raises(openai.InternalServerError):
            complete(server)
        server.until(lambda: replacements(server).last_reload("fake").state == "given_up")
        server.until(lambda: server.model() not in (before, after))
        assert loads == [True, False]
        assert complete(server).choices[0].text


def test_a_new_artifact_that_cannot_be_loaded_or_fails_on_shadow_prompts_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    new, executor = gated_engine()
    loads: list[IngotError | Engine] = [IngotError("gate perplexity_ratio failed"), new]

    def load(name: str, is_new: bool) -> Engine:
        assert is_new
        found = loads.pop(0)
        if isinstance(found, IngotError):
            raise found
        executor.fails = True
        return found

    with running(text_engine(), OPTIONS, reload=load) as server:
        before = server.model()
        complete(server)
        for number in (1, 2):
            reload(server)
            server.until(lambda number=number: caplog.text.count("the new artifact is not served") == number)
        assert "gate perplexity_ratio failed" in caplog.text
        assert server.model() is before
        assert complete(server).choices[0].text
        server.require_nothing_left()


def test_worse_evidence_is_refused_before_answers_are_compared() -> None:
    with running(text_engine(), OPTIONS, reload=lambda name, is_new: text_engine()) as server:
        before = server.model()
        replacements(server)._evidence_change = lambda old, new: "a perplexity of 35 against 10.9"
        reload(server)
        server.until(lambda: replacements(server).last_reload("fake").state == "refused")
        assert "a perplexity of 35 against 10.9; POST" in str(replacements(server).last_reload("fake").reason)
        assert server.model() is before
        replacements(server)._evidence_change = lambda old, new: None
        reload(server)
        server.until(lambda: replacements(server).last_reload("fake").state == "kept")
        server.require_nothing_left()


def test_sighup_replaces_the_models_of_a_process() -> None:
    def load(name: str = "fake", is_new: bool = False) -> ServedModel:
        return ServedModel(name, AsyncEngine(text_engine()), OPTIONS)

    async def main() -> None:
        server, stop, ready = Service(OPTIONS), asyncio.Event(), asyncio.Event()
        serving = asyncio.create_task(
            lifecycle.run(
                server,
                lifecycle.listen("127.0.0.1", 0),
                lambda: Models([load()]),
                reload=load,
                on_ready=lambda models: ready.set(),
                stop=stop,
            )
        )
        async with asyncio.timeout(SECONDS):
            await ready.wait()
            before = server.models.find("fake")
            os.kill(os.getpid(), signal.SIGHUP)
            while server.models.find("fake") is before:
                await asyncio.sleep(0.001)
            stop.set()
            await serving

    usual = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    try:
        asyncio.run(main())
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, usual)
