"""/ready is 503 while every request fails, whatever clients send, and 200 again by the server's own request."""

import asyncio
from typing import Any

import httpx2
import numpy as np
import pytest

from ingot.errors import RequestFailed
from ingot.runtime.engine.engine import Engine
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.hosting.async_engine import AsyncEngine
from ingot.runtime.server import service
from ingot.runtime.server.models import self_check, swap, swap_comparison
from ingot.runtime.server.models.served_models import ServedModel
from ingot.runtime.server.options import ServerOptions
from tests.runtime.engines import demo_tokenizer, text_engine
from tests.runtime.server.servers import SECONDS, Running, running
from tests.simulators.fake_executor import FakeExecutor

OPTIONS = ServerOptions(drain_seconds=SECONDS, probation_seconds=0.2)


@pytest.fixture(autouse=True)
def _quick_looks_and_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_WATCH_SECONDS", 0.01)
    monkeypatch.setattr(self_check, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(swap_comparison, "_SLOWER", 1e9)


class DamagedExecutor(FakeExecutor):
    """Has NaN in the logits of all batches, or of those with a token, as weights that are damaged give."""

    is_damaged = False
    hostile: int | None = None

    def logits(self, batch: ForwardBatch) -> FloatArray:
        logits = super().logits(batch)
        if self.is_damaged or self.hostile in batch.input_ids:
            logits[:] = np.nan
        return logits


def damaged_engine() -> tuple[Engine, DamagedExecutor]:
    tokenizer = demo_tokenizer()
    executor = DamagedExecutor(vocab_size=tokenizer.vocab_size)
    return Engine(executor, tokenizer), executor


def complete(server: Running, *prompt: int) -> int:
    body: dict[str, Any] = {"model": "fake", "prompt": list(prompt), "max_tokens": 2}
    return httpx2.post(f"{server.url}/v1/completions", json=body, timeout=SECONDS).status_code


def ready(server: Running) -> httpx2.Response:
    return httpx2.get(f"{server.url}/ready")


def fail_often(server: Running, *prompt: int) -> None:
    assert [complete(server, *prompt) for _ in range(self_check._FAILURES)] == [500] * self_check._FAILURES


def until_looked(server: Running) -> None:
    """Wait until the server has looked at all requests that have ended, and checked what it found."""
    check = server.service._self_check
    failed = server.model().engine.metrics().num_failed_requests
    server.until(lambda: check._watched[server.model()].num_failed >= failed and not check._tasks)


def test_a_server_whose_every_request_fails_is_not_ready_until_its_own_request_is_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, executor = damaged_engine()
    with running(engine, OPTIONS) as server:
        assert (complete(server, 1, 2), ready(server).status_code) == (200, 200)
        executor.is_damaged = True
        fail_often(server, 1, 2)
        server.until(lambda: ready(server).status_code == 503)
        (problem,) = ready(server).json()["problems"]
        assert problem.startswith("fake: every request fails, and so does one of the server's own: ")
        assert "nan" in problem
        assert httpx2.get(f"{server.url}/health").status_code == 200, "the engine runs, and a restart need not help"
        assert "ingot_ready 0.0" in httpx2.get(f"{server.url}/metrics").text
        assert caplog.text.count("restart the server, or reload an artifact that is whole") == 1
        executor.is_damaged = False
        server.until(lambda: ready(server).status_code == 200)
        assert "fake: requests are served again" in caplog.text
        assert complete(server, 1, 2) == 200
        server.require_nothing_left()


def test_failures_before_the_first_look_count_and_a_request_that_is_served_ends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(self_check, "_PAUSE_SECONDS", 1e6)

    async def main() -> None:
        engine, executor = damaged_engine()
        model, check = ServedModel("fake", AsyncEngine(engine), OPTIONS), self_check.SelfCheck()
        try:
            await model.warm_up()
            executor.is_damaged = True
            for _ in range(self_check._FAILURES):
                with pytest.raises(RequestFailed):
                    await model.engine.generate([1])
            check.look([model])
            while check._tasks:
                await asyncio.sleep(0.001)
            assert model.failing
            check.look([model])  # the server's own request was not served, either
            executor.is_damaged = False
            await model.engine.generate([1])
            check.look([model])
            assert not model.failing, "a client's request was served"
        finally:
            await check.close()
            await model.close()

    asyncio.run(main())


def test_requests_that_must_fail_do_not_make_a_server_unready() -> None:
    engine, executor = damaged_engine()
    with running(engine, OPTIONS) as server:
        executor.hostile = 7
        for _ in range(3):
            fail_often(server, 5, 7)
            until_looked(server)
            assert ready(server).status_code == 200
        assert complete(server, 5, 6) == 200


def test_a_few_failures_between_requests_that_are_served_are_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, executor = damaged_engine()
    with running(engine, OPTIONS) as server:
        monkeypatch.setattr(self_check, "find_failure", None)
        executor.hostile = 7
        for _ in range(2 * self_check._FAILURES):
            assert complete(server, 5, 7) == 500
            assert complete(server, 5, 6) == 200
            until_looked(server)
        assert not server.service.problems()


def test_a_reload_replaces_a_model_that_fails_every_request() -> None:
    engine, executor = damaged_engine()
    with running(engine, OPTIONS, reload=lambda name, is_new: text_engine()) as server:
        before = server.model()
        assert complete(server, 1, 2) == 200
        executor.is_damaged = True
        replacements = server.service.replacements
        assert isinstance(replacements, swap.Replacements)
        server.loop.call_soon_threadsafe(replacements.reload_all)
        server.until(lambda: replacements.last_reload("fake").state == "kept")
        assert server.model() is not before
        assert (complete(server, 1, 2), ready(server).status_code) == (200, 200)
