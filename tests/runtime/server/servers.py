"""Servers for tests: a real uvicorn on a free port, in a thread, with engines on the fake executor."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai

from ingot.runtime.engine.engine import Engine
from ingot.runtime.hosting.async_engine import AsyncEngine
from ingot.runtime.server import lifecycle
from ingot.runtime.server.http.access import ApiKeys
from ingot.runtime.server.models.served_models import Models, ServedModel
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.server.service import Service

SECONDS = 60.0  # a test that hangs fails after this


@dataclass
class Running:
    """A server that runs, with what is needed to look into it from the test's thread."""

    url: str
    service: Service
    loop: asyncio.AbstractEventLoop
    stop_event: asyncio.Event
    thread: threading.Thread

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def model(self, name: str = "fake") -> ServedModel:
        return self.service.models.by_name[name]

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0, "timeout": SECONDS, **options}
        )

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=SECONDS)

    def stop(self) -> None:
        """As SIGTERM does."""
        self.loop.call_soon_threadsafe(self.stop_event.set)

    def join(self) -> None:
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()

    def until(self, condition: Any) -> None:
        """Wait until a condition holds."""
        waited = threading.Event()
        for _ in range(int(SECONDS * 500)):
            if condition():
                return
            waited.wait(0.002)
        raise AssertionError("the condition never held")

    def require_nothing_left(self) -> None:
        """Wait until no request is open, no block is in use, and nothing is counted as waiting."""
        for model in self.service.models.all:
            self.until(lambda gate=model.gate: gate.num_open == 0)
            metrics = model.engine.metrics
            self.until(lambda metrics=metrics: not metrics().num_running and not metrics().num_waiting)
            self.until(lambda metrics=metrics: metrics().blocks_in_use == 0)
            assert model.gate.waiting_tokens == 0
        self.until(lambda: self.service.num_open == 0)


@contextmanager
def running(
    engines: Engine | Mapping[str, Engine],
    options: ServerOptions | None = None,
    *,
    aliases: Mapping[str, str] | None = None,
    keys: ApiKeys | None = None,
    admin_keys: ApiKeys | None = None,
    send_buffer_bytes: int | None = None,
    reload: Callable[[str, bool], Engine] | None = None,
) -> Iterator[Running]:
    """A server of engines by name; one without a name is "fake". It drains at the end."""
    options = options or ServerOptions(drain_seconds=SECONDS)
    by_name = engines if isinstance(engines, Mapping) else {"fake": engines}
    service = Service(options, "1.2.3")
    listening = lifecycle.listen("127.0.0.1", 0)
    if send_buffer_bytes:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    url = lifecycle.address_of(listening)
    is_ready = threading.Event()
    started: list[Running] = []
    failures: list[BaseException] = []

    def load() -> Models:
        models = [ServedModel(name, AsyncEngine(engine), options) for name, engine in by_name.items()]
        return Models(models, aliases)

    def load_again(name: str, is_new: bool) -> ServedModel:
        assert reload
        return ServedModel(name, AsyncEngine(reload(name, is_new)), options)

    async def serve() -> None:
        stop = asyncio.Event()
        started.append(Running(url, service, asyncio.get_running_loop(), stop, thread))
        await lifecycle.run(
            service,
            listening,
            load,
            keys=keys,
            admin_keys=admin_keys,
            reload=load_again if reload else None,
            on_ready=lambda models: is_ready.set(),
            stop=stop,
        )

    def main() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001 (raised in the test's thread)
            failures.append(error)
        finally:
            is_ready.set()

    thread = threading.Thread(target=main, name="server")
    thread.start()
    assert is_ready.wait(SECONDS)
    try:
        if failures:
            raise failures[0]
        yield started[0]
    finally:
        if not failures and thread.is_alive():
            started[0].stop()
        thread.join(SECONDS)
    assert not thread.is_alive()
    assert not failures, failures
