"""The engine's process: load an artifact, serve what arrives over a socket, end when told to or left alone.

The main thread waits; one thread steps the engine (`EngineThread`), one reads messages, one writes outputs. Signals
that a terminal or a service manager sends to the whole group are ignored: the other process ends this one.
"""

import gc
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Self

from ingot.errors import IngotError, explain_threads
from ingot.runtime.asking.outputs import RequestOutput
from ingot.runtime.constraints.fair_threads import COMPILE_THREADS, FairThreads
from ingot.runtime.engine.engine import Engine
from ingot.runtime.hosting.engine_process_messages import (
    Adapters,
    AskMetrics,
    Cancel,
    Connection,
    Ended,
    LoadAdapter,
    LoadArtifact,
    Loaded,
    Log,
    Lot,
    Metrics,
    NotLoaded,
    Open,
    Outputs,
    Packed,
    StopProcess,
    UnloadAdapter,
)
from ingot.runtime.hosting.engine_thread import EngineThread, Item, RequestHandle, is_last, refusal
from ingot.runtime.thread_scheduling import current_core

_log = logging.getLogger(__name__)
_MOST_DELAY_SECONDS = 0.02  # of what is due, until a step is computed


def main(descriptor: int) -> None:
    """Serve the engine over a connected socket; returns when it is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(socket.socket(fileno=descriptor))
    try:
        load = connection.receive()
    except EOFError:
        _exit(connection.failure)
    assert isinstance(load, LoadArtifact)
    loggers = logging.getLogger("ingot")
    loggers.setLevel(load.log_level)
    loggers.addHandler(_Forwarded(connection))
    served = _Served(connection)
    try:
        with explain_threads("the engine's process"):
            threading.Thread(target=served.read, name="ingot-messages", daemon=True).start()
            served.begin(Engine.load(load.artifact, **vars(load.options)))
    except Exception as error:  # noqa: BLE001 (the other process raises it)
        if not isinstance(error, IngotError):
            _log.exception("the engine could not be loaded")
        connection.send(NotLoaded(error))
    else:
        served.serve()
    connection.flush()


def _exit(failure: Exception | None) -> NoReturn:
    """End at once, with a reason unless the other process ended the connection: no thread may hold this one."""
    if failure:
        shown = f"{type(failure).__name__}: {failure}"
        os.write(2, f"ingot: the engine's process {os.getpid()} ends: its connection failed: {shown}\n".encode())
    os._exit(1)


class _Served:
    """The engine's requests by key."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._engine: Engine | None = None
        self._thread: EngineThread | None = None
        self._open: dict[int, ServedRequest] = {}
        self._compilers = FairThreads(COMPILE_THREADS, "ingot-compile")

    def begin(self, engine: Engine) -> None:
        """Take requests."""
        gc.collect()
        gc.freeze()  # the model lives as long as the process, and a collection would visit it while all steps wait
        self._outlet = SocketOutlet(self._connection, engine, self._open, beside_steps=engine.leaves_a_core)
        if not engine.leaves_a_core:
            engine.call_when_cores_are_free(self._outlet.send_due)
        self._engine, self._thread = engine, EngineThread(engine)
        self._connection.send(
            Loaded(engine.model, engine.max_batch_tokens, engine.admission.load, engine.metrics(), engine.adapters)
        )

    def serve(self) -> None:
        """Serve until a message, a failure of the engine or the end of the other process stops it."""
        assert self._thread
        self._thread.join()
        self._outlet.close()
        self._connection.send(Ended(self._thread.ended or ""))

    def read(self) -> None:
        """Read messages. When the other process dies, this one ends at once."""
        try:
            while True:
                self._execute(self._connection.receive())
        except EOFError:
            _exit(self._connection.failure)
        except Exception as error:  # noqa: BLE001 (the process ends with it)
            _exit(error)

    def _execute(self, message: Any) -> None:
        if self._thread is None or self._engine is None:
            return  # told to stop while it loads: the end of the connection follows
        match message:
            case Open():
                handle = ServedRequest.of(message, self._outlet)
                self._open[message.key] = handle
                if message.request.params.constraint is None:
                    self._send(handle)
                else:
                    self._compile_in_turn(handle)
            case Cancel(key):
                if found := self._open.pop(key, None):
                    self._thread.cancel(found)
                    self._outlet.drop(found)
            case AskMetrics():
                self._connection.send(Metrics(self._engine.metrics()))
            case LoadAdapter() | UnloadAdapter():
                self._in_thread(partial(self._change_adapters, message), partial(self._report_adapters, message))
            case StopProcess(reason, flush_seconds):
                self._thread.stop(reason, flush_seconds)

    def _in_thread(self, work: Callable[[], object], refuse: Callable[[Exception], object], group: str = "") -> None:
        """Do what takes long, unless the system has no thread for it: only that fails then."""

        def report(done: "Future[object]") -> None:
            if isinstance(error := done.exception(), Exception):
                refuse(error)

        self._compilers.submit(work, group).add_done_callback(report)

    def _compile_in_turn(self, handle: "ServedRequest") -> None:
        """Compile a constraint in a thread, in turn with those of other groups, unless it is known."""
        assert self._engine
        if self._engine.constraints.is_known(handle.request.params.constraint):
            self._compile(handle)
        else:
            group = handle.request.options.group
            self._in_thread(partial(self._compile, handle), partial(self._refuse, handle), group)

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
        self._report_adapters(message, error)

    def _report_adapters(self, message: LoadAdapter | UnloadAdapter, error: Exception | None) -> None:
        assert self._engine
        self._connection.send(Adapters(message.key, self._engine.adapters, error))

    def _compile(self, handle: "ServedRequest") -> None:
        assert self._engine
        if handle.key not in self._open:
            return  # it was cancelled while it waited
        try:
            handle.grammar = self._engine.compile(handle.request.params)
        except Exception as error:  # noqa: BLE001 (its reader raises it)
            self._refuse(handle, error)
        else:
            self._send(handle)

    def _refuse(self, handle: "ServedRequest", error: Exception) -> None:
        self._outlet.post([(handle, refusal(error))])

    def _send(self, handle: "ServedRequest") -> None:
        assert self._thread
        try:
            self._thread.send(handle)
        except IngotError as error:
            self._outlet.post([(handle, error)])


@dataclass(eq=False, slots=True, kw_only=True)
class ServedRequest(RequestHandle):
    """A request that the other process named, and its outputs that have not left.

    due   when they are to leave: at the end of their step (-inf) where one is the first or an error
    """

    key: int
    waiting: list[Lot | RequestOutput | Exception] = field(default_factory=list)
    due: float = -math.inf

    @classmethod
    def of(cls, message: Open, outlet: "SocketOutlet") -> Self:
        """The request of a message."""
        return cls(**message._asdict(), outlet=outlet)

    def add(self, output: RequestOutput | Exception, now: float) -> None:
        """Have an output wait."""
        if isinstance(output, Exception) or output.completion or output.result:
            self.waiting.append(output)
            if isinstance(output, Exception):
                self.due = -math.inf
            elif output.finished:
                self.due = min(self.due, now)
            return
        for lot in self.waiting:
            if isinstance(lot, Lot) and lot.index == output.index:
                lot.add(output)
                return
        self.waiting.append(Lot(output))

    def take(self, now: float) -> list[tuple[int, Packed | Exception]]:
        """What waits, to leave now."""
        items = [(self.key, each.packed() if isinstance(each, Lot) else each) for each in self.waiting]
        self.waiting = []
        self.due = now + self.interval_seconds if self.interval_seconds else -math.inf
        return items


class SocketOutlet:
    """Sends outputs to the other process, where a step does not have to wait for that.

    Outputs of a request leave together, `interval_seconds` after those before them or when the last one has come. What
    is due leaves when the executor has computed the next step, or while a GPU does: the other process then works while
    this one needs one core, and not while the executor needs all of them. With `beside_steps` the executor leaves a
    core to others, and a thread sends what is due while the next step is computed. First outputs and errors leave at
    the end of their step, as does all that is due if steps take long or none follows. What finds the other process busy
    is sent by the thread a little later.
    """

    def __init__(
        self,
        connection: Connection,
        engine: Engine,
        open_requests: dict[int, ServedRequest],
        *,
        beside_steps: bool = False,
    ) -> None:
        self._connection = connection
        self._engine = engine
        self._open = open_requests
        self._beside_steps = beside_steps
        self._step_ended = False  # and the thread has not sent what was due then
        self._is_sending = False  # the thread
        self._changed = threading.Condition()
        self._waiting: set[ServedRequest] = set()
        self._posted = -math.inf  # when a step ended
        self._wakes = math.inf  # when the thread looks again by itself
        self._closed = False
        self._core: int | None = None  # of the engine's thread
        self._thread = threading.Thread(target=self._write, name="ingot-outputs", daemon=True)
        self._thread.start()

    def post(self, items: list[Item]) -> bool:
        """Send outputs when they are due."""
        now = time.monotonic()
        with self._changed:
            for handle, output in items:
                assert isinstance(handle, ServedRequest)
                if is_last(output):
                    self._open.pop(handle.key, None)
                if not handle.cancelled or (handle.reports_end and is_last(output)):
                    handle.add(output, now)
                    self._waiting.add(handle)
            waits = now - self._posted < _MOST_DELAY_SECONDS and self._engine.has_unfinished()
            self._send(-math.inf if waits else now)
            self._posted = now
            due = self._next_due()
            self._step_ended = (self._beside_steps or self._is_sending) and due <= now
            if self._step_ended or due + _MOST_DELAY_SECONDS < self._wakes:
                self._changed.notify()
        return True

    def send_due(self) -> None:
        """Send what is due, if the other process has room for it."""
        with self._changed:
            self._send(time.monotonic())

    def _send(self, latest: float) -> None:
        if self._is_sending:
            return  # what is due may follow what the thread has taken
        if self._next_due() <= latest and self._waiting and self._connection.has_room():
            self._core = current_core()
            self._connection.send(self._message(latest))

    @property
    def num_waiting(self) -> int:
        """Requests with outputs that have not left."""
        return len(self._waiting)

    def drop(self, handle: ServedRequest) -> None:
        """Forget what waits of a request that was cancelled."""
        with self._changed:
            self._waiting.discard(handle)
            handle.waiting = []

    def close(self) -> None:
        """Send what waits."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _next_due(self) -> float:
        """When something is due; inf: nothing waits."""
        return min((handle.due for handle in self._waiting), default=math.inf)

    def _message(self, latest: float) -> Outputs:
        """What is due at `latest`."""
        due = [handle for handle in self._waiting if handle.due <= latest]
        self._waiting.difference_update(due)
        now = time.monotonic()
        return Outputs([item for handle in due for item in handle.take(now)], self._engine.admission.load, self._core)

    def _write(self) -> None:
        try:
            with self._changed:
                while not (self._closed and not self._waiting):
                    self._sleep()
                    self._send_late()
        except Exception as error:  # noqa: BLE001 (the thread that reads ends the process with it)
            self._connection.fail(error)

    def _send_late(self) -> None:
        """Send what is due and no step has sent; steps wait neither for this nor for the other process."""
        self._is_sending = True
        try:
            with self._unlocked():
                self._connection.wait_for_room()
            message = self._message(math.inf if self._closed else time.monotonic())
            if message.items:
                with self._unlocked():
                    self._connection.send(message)
        finally:
            self._is_sending = False

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()

    def _sleep(self) -> None:
        """Wait until a message is due that no step has sent."""
        while not self._closed and not self._step_ended:
            now = time.monotonic()
            due = self._next_due()
            if due + _MOST_DELAY_SECONDS <= now:
                break
            self._wakes = due + _MOST_DELAY_SECONDS
            self._changed.wait(None if self._wakes == math.inf else self._wakes - now)
        self._wakes = -math.inf
        self._step_ended = False


class _Forwarded(logging.Handler):
    """Sends records to the other process, whose loggers handle them. While it does not read, records are dropped."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record, its traceback as part of its text."""
        try:
            text = self.format(record)
            if self._num_dropped:
                text += f" ({self._num_dropped} records before this one were dropped: they were not read in time)"
            is_sent = self._connection.offer(Log(record.name, record.levelno, text))
            self._num_dropped = 0 if is_sent else self._num_dropped + 1
        except Exception:  # noqa: BLE001 (as every handler)
            self.handleError(record)
