"""The engine's process: load an artifact, serve what arrives over a socket, end when told to or left alone.

The main thread waits; one thread steps the engine (`EngineThread`), one reads messages, one writes outputs. Signals
that a terminal or a service manager sends to the whole group are ignored: the other process ends this one.
"""

import gc
import logging
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from ingot.errors import IngotError
from ingot.runtime.engine import Engine
from ingot.runtime.engine_process.messages import (
    Adapters,
    AskMetrics,
    Cancel,
    Connection,
    Ended,
    Load,
    LoadAdapter,
    Loaded,
    Log,
    Metrics,
    NotLoaded,
    Open,
    Outputs,
    Packed,
    Stop,
    UnloadAdapter,
    joined,
    pack,
)
from ingot.runtime.engine_thread import EngineRequest, EngineThread, Item, refusal
from ingot.runtime.outputs import RequestOutput

_COMPILE_THREADS = 2
_GATHER_SECONDS = 0.002  # between two messages with outputs, unless one begins or ends a request


def main(descriptor: int) -> None:
    """Serve the engine over a connected socket; returns when it is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(socket.socket(fileno=descriptor))
    load = connection.receive()
    assert isinstance(load, Load)
    loggers = logging.getLogger("ingot")
    loggers.setLevel(load.log_level)
    loggers.addHandler(_Forwarded(connection))
    served = _Served(connection)
    threading.Thread(target=served.read, name="ingot-messages", daemon=True).start()
    try:
        engine = Engine.load(load.artifact, **vars(load.options))
    except IngotError as error:
        connection.send(NotLoaded(error))
        return
    gc.collect()
    gc.freeze()  # the model lives as long as the process, and a collection would visit it while all steps wait
    served.serve(engine)


class _Served:
    """The engine's requests by key."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._engine: Engine | None = None
        self._thread: EngineThread | None = None
        self._open: dict[int, _Request] = {}
        self._compilers = ThreadPoolExecutor(_COMPILE_THREADS, "ingot-compile")

    def serve(self, engine: Engine) -> None:
        """Serve until a message, a failure of the engine or the end of the other process stops it."""
        self._outlet = _SocketOutlet(self._connection, engine, self._open)
        self._engine, self._thread = engine, EngineThread(engine)
        self._connection.send(
            Loaded(engine.model, engine.max_batch_tokens, engine.admission.load, engine.metrics(), engine.adapters)
        )
        self._thread.join()
        self._outlet.close()
        self._connection.send(Ended(self._thread.ended or ""))

    def read(self) -> None:
        """Read messages. When the other process dies, this one ends at once."""
        try:
            while True:
                self._execute(self._connection.receive())
        except EOFError:
            os._exit(1)  # no thread is to hold it: a step may hang

    def _execute(self, message: Any) -> None:
        if self._thread is None or self._engine is None:
            return  # told to stop while it loads: the end of the connection follows
        match message:
            case Open():
                request = _Request.of(message, self._outlet)
                self._open[message.key] = request
                if message.params.constraint is None:
                    self._send(request)
                else:
                    self._compilers.submit(self._compile, request)
            case Cancel(key):
                if found := self._open.pop(key, None):
                    self._thread.cancel(found)
            case AskMetrics():
                self._connection.send(Metrics(self._engine.metrics()))
            case LoadAdapter() | UnloadAdapter():
                self._compilers.submit(self._change_adapters, message)
            case Stop(reason, flush_seconds):
                self._thread.stop(reason, flush_seconds)

    def _change_adapters(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Read an adapter here, and let the engine's thread take it between two steps."""
        assert self._engine
        assert self._thread
        error = None
        try:
            if isinstance(message, LoadAdapter):
                adapter = self._engine.read_adapter(message.name, message.path)
                register = partial(Engine.register_adapter, adapter=adapter, path=message.path, replace=message.replace)
                self._thread.call(register).result()
            else:
                self._thread.call(partial(Engine.unload_adapter, name=message.name)).result()
        except Exception as problem:  # noqa: BLE001 (the caller raises it)
            error = problem
        with suppress(OSError):  # the other process died
            self._connection.send(Adapters(message.key, self._engine.adapters, error))

    def _compile(self, request: "_Request") -> None:
        assert self._engine
        try:
            request.grammar = self._engine.compile(request.params)
        except Exception as error:  # noqa: BLE001 (its reader raises it)
            self._outlet.post([(request, refusal(error))])
        else:
            self._send(request)

    def _send(self, request: "_Request") -> None:
        assert self._thread
        try:
            self._thread.send(request)
        except IngotError as error:
            self._outlet.post([(request, error)])


@dataclass(eq=False, slots=True, kw_only=True)
class _Request(EngineRequest):
    """A request that the other process named."""

    key: int
    has_begun: bool = False

    @classmethod
    def of(cls, message: Open, outlet: "_SocketOutlet") -> Self:
        """The request of a message."""
        return cls(**message._asdict(), outlet=outlet)


class _SocketOutlet:
    """Sends outputs from a thread of its own: steps do not wait for the other process, which wakes seldom.

    What arrives while a message is sent, or soon after one, leaves with the next; outputs of a request that wait are
    joined. First outputs and ends do not wait.
    """

    def __init__(self, connection: Connection, engine: Engine, open_requests: dict[int, _Request]) -> None:
        self._connection = connection
        self._engine = engine
        self._open = open_requests
        self._changed = threading.Condition()
        self._items: list[tuple[int, Packed | Exception]] = []
        self._last: dict[int, int] = {}  # the place of each key's last item
        self._is_urgent = False
        self._closed = False
        self._thread = threading.Thread(target=self._write, name="ingot-outputs", daemon=True)
        self._thread.start()

    def post(self, items: list[Item]) -> bool:
        """Send outputs soon."""
        with self._changed:
            for request, output in items:
                assert isinstance(request, _Request)
                self._add(request, output)
            self._changed.notify()
        return True

    def close(self) -> None:
        """Send what waits."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _add(self, request: _Request, output: RequestOutput | Exception) -> None:
        key = request.key
        is_last = isinstance(output, Exception) or output.finished
        self._is_urgent |= is_last or not request.has_begun
        request.has_begun = True
        if is_last:
            self._open.pop(key, None)
        packed = output if isinstance(output, Exception) else pack(output)
        place = self._last.get(key)
        if place is not None and not isinstance(packed, Exception):
            before = self._items[place][1]
            both = None if isinstance(before, Exception) else joined(before, packed)
            if both is not None:
                self._items[place] = key, both
                return
        self._last[key] = len(self._items)
        self._items.append((key, packed))

    def _write(self) -> None:
        sent = 0.0
        with suppress(OSError):  # the other process died: the thread that reads ends this one
            while items := self._take(sent):
                sent = time.monotonic()
                self._connection.send(Outputs(items, self._engine.admission.load))

    def _take(self, sent: float) -> list[tuple[int, Packed | Exception]]:
        """Wait for items; empty once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed)
            self._changed.wait_for(lambda: self._is_urgent or self._closed, sent + _GATHER_SECONDS - time.monotonic())
            items, self._items, self._last, self._is_urgent = self._items, [], {}, False
        return items


class _Forwarded(logging.Handler):
    """Sends records to the other process, whose loggers handle them."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record."""
        with suppress(OSError):
            self._connection.send(Log(record.name, record.levelno, record.getMessage()))
