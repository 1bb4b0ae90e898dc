"""Models that are unloaded when idle, loaded again at the next request, and keep the server ready."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ingot.errors import IngotError
from ingot.runtime.engine.engine import Engine
from ingot.runtime.server import service
from ingot.runtime.server.options import ServerOptions
from tests.runtime.engines import text_engine
from tests.runtime.server.models.test_admission import gated_engine
from tests.runtime.server.servers import SECONDS, Running, running

OPTIONS = ServerOptions(drain_seconds=SECONDS, idle_unload_seconds=0.5)


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_WATCH_SECONDS", 0.01)


def complete(server: Running) -> str:
    with server.client() as client:
        return client.completions.create(model="fake", prompt=[1, 2], max_tokens=4, temperature=0).choices[0].text


def unloaded(server: Running) -> bool:
    return server.model().is_unloaded and not server.model().engine.is_healthy


def is_loaded(server: Running) -> float:
    """The metric."""
    text = httpx2.get(f"{server.url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return families["ingot_model_loaded"].samples[0].value


def test_an_idle_model_is_unloaded_and_loaded_by_the_requests_that_need_it() -> None:
    loads: list[str] = []
    running_servers: list[Running] = []

    def load(name: str, is_new: bool) -> Engine:
        assert not is_new
        loads.append(name)
        running_servers[0].until(lambda: running_servers[0].model().gate.num_open == 8)  # all wait for one load
        return text_engine()

    with running(text_engine(), OPTIONS, reload=load) as server, ThreadPoolExecutor(8) as threads:
        running_servers.append(server)
        expected = complete(server)
        for number in (1, 2):
            server.until(lambda: unloaded(server))
            assert httpx2.get(f"{server.url}/ready").status_code == 200
            assert httpx2.get(f"{server.url}/health").status_code == 200
            assert is_loaded(server) == 0
            assert {*threads.map(lambda _: complete(server), range(8))} == {expected}
            assert loads == ["fake"] * number
        server.require_nothing_left()


@pytest.mark.parametrize("failure", [IngotError("the folder is gone"), OSError(24, "Too many open files")])
def test_a_model_that_cannot_be_loaded_again_is_tried_at_the_next_request(failure: Exception) -> None:
    """Whatever the failure: an engine's process is not started without a file descriptor or memory for it."""
    found: list[Engine | Exception] = [failure, failure, text_engine()]

    def load(name: str, is_new: bool) -> Engine:
        one = found.pop(0)
        if isinstance(one, Exception):
            raise one
        return one

    with running(text_engine(), OPTIONS, reload=load) as server:
        server.until(lambda: unloaded(server))
        for _ in range(2):
            with pytest.raises(openai.InternalServerError) as caught:
                complete(server)
            assert caught.value.status_code == 503
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert f"could not be loaded again: {failure}" in caught.value.message
        assert complete(server)
        server.require_nothing_left()


def test_an_engine_that_is_loaded_again_and_fails_at_its_first_request_is_closed() -> None:
    broken, executor = gated_engine()
    executor.fails = True
    found = [broken, text_engine()]
    with running(text_engine(), OPTIONS, reload=lambda name, is_new: found.pop(0)) as server:
        server.until(lambda: unloaded(server))
        with pytest.raises(openai.InternalServerError, match="could not be loaded again"):
            complete(server)
        assert executor.closed
        assert complete(server)
        server.require_nothing_left()


def test_a_model_with_an_open_request_is_not_unloaded() -> None:
    async def stream(server: Running) -> int:
        async with server.async_client() as client:
            chunks = await client.completions.create(
                model="fake", prompt=[1], max_tokens=400, stream=True, extra_body={"ignore_eos": True}
            )
            return len([chunk async for chunk in chunks])

    with running(text_engine(), OPTIONS, reload=lambda name, is_new: text_engine()) as server:
        assert asyncio.run(stream(server)) > 1
        assert complete(server)
