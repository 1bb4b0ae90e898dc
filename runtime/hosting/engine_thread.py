"""The thread that steps an engine: requests come in through a queue, outputs leave through an outlet.

Commands are executed between steps. The outlet of coroutines is their event loop: outputs return to each stream's own
queue, with at most one wake-up of a loop per step, so a slow reader delays no other: its outputs wait, and its
max_tokens bounds them. An engine in a process of its own has an outlet to the other process (`engine_process`).
"""

import asyncio
import logging
import math
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar

from ingot.errors import EngineError, IngotError
from ingot.runtime.asking.outputs import Completion, RequestOutput
from ingot.runtime.constraints.compiler import Grammar
from ingot.runtime.engine.engine import Engine
from ingot.runtime.requests.engine_request import EngineRequest

T = TypeVar("T")
Item: TypeAlias = "tuple[RequestHandle, RequestOutput | Exception]"

_log = logging.getLogger(__name__)
_PUT_AT_ONCE = 8  # outputs


class Outlet(Protocol):
    """Takes the outputs of requests to their readers. Hashable: one outlet gets all outputs of a step in one call."""

    def post(self, items: list[Item]) -> bool:
        """Send outputs, or the exceptions that end their requests. False when the readers are gone."""
        ...


@dataclass(eq=False, slots=True, kw_only=True)
class RequestHandle:
    """A request that is open, with the outlet of its outputs.

    interval_seconds   least time between two of its messages, for an outlet that gathers outputs
    reports_end        whether the outlet also gets its last output, or an exception, after it was cancelled
    """

    request: EngineRequest
    outlet: Outlet
    interval_seconds: float = 0.0
    reports_end: bool = False
    grammar: Grammar | None = None
    request_id: int | None = None
    cancelled: bool = False


class LoopOutlet:
    """The event loop in which streams are read.

    It puts a few outputs at a time into their queues, and looks at its sockets in between: to write the events of 64
    streams after one step takes milliseconds, which a client that is to be refused would wait for, more than once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Made in the thread of the loop."""
        self.loop = loop
        self._thread = threading.get_ident()
        self._waiting: deque[Item] = deque()
        self._goes_on = False  # the loop will put more

    def post(self, items: list[Item]) -> bool:
        """Put outputs into their streams' queues, in the loop, at once where it calls this. False when it is closed."""
        self._waiting.extend(items)
        if threading.get_ident() == self._thread:
            self._begin()
            return True
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._begin)
            return True
        return False

    def _begin(self) -> None:
        if not self._goes_on:
            self._put_some()

    def _put_some(self) -> None:
        for _ in range(min(_PUT_AT_ONCE, len(self._waiting))):
            stream, output = self._waiting.popleft()
            assert isinstance(stream, RequestStream)
            stream.put(output)
        self._goes_on = bool(self._waiting)
        if self._goes_on:
            self.loop.call_soon(self._put_some)


@dataclass(eq=False, slots=True, kw_only=True)
class RequestStream(RequestHandle):
    """A request whose outputs one coroutine reads, from a queue of its own.

    direct   takes an output instead of the coroutine, which waits and has read all others; False: it does not. To wake
             a coroutine takes longer than to write an event. It gets no errors and no output that ends a choice.
    ended    gets the request's result, also that of one which was aborted because the coroutine left; cancelled without
             a result
    """

    outputs: deque[RequestOutput | Exception] = field(default_factory=deque)
    finished: bool = False
    has_last: bool = False  # the output that ends it has arrived
    direct: Callable[[RequestOutput], bool] | None = None
    ended: asyncio.Future[Completion] | None = None
    _reading: asyncio.Future[None] | None = None
    _resting: asyncio.Future[None] | None = None

    async def next(self) -> RequestOutput:
        """Wait for the next output, which may have the error of a choice; raises what ends the stream otherwise."""
        while not self.outputs:
            self._reading = asyncio.get_running_loop().create_future()
            try:
                await self._reading
            finally:
                self._reading = None
        output = self.outputs.popleft()
        self.finished = is_last(output)
        if isinstance(output, Exception):
            raise output
        return output

    async def next_all(self) -> list[RequestOutput]:
        """As `next`, with all outputs that have arrived, oldest first. The next call raises what ends the stream."""
        outputs = [await self.next()]
        while self.outputs and not isinstance(self.outputs[0], Exception):
            outputs.append(await self.next())
        return outputs

    async def rest(self, seconds: float) -> None:
        """Let outputs gather for this long, or until the last one has arrived."""
        if self.has_last:
            return
        loop = asyncio.get_running_loop()
        self._resting = loop.create_future()
        timer = loop.call_later(seconds, self._wake) if seconds < math.inf else None
        try:
            await self._resting
        finally:
            self._resting = None
            if timer:
                timer.cancel()

    def put(self, output: RequestOutput | Exception) -> None:
        """Add an output, in the loop that reads it."""
        if self.direct and self._reading and not self.outputs and _is_plain(output) and self.direct(output):
            return
        self.outputs.append(output)
        if self._reading and not self._reading.done():
            self._reading.set_result(None)
        if is_last(output):
            self.has_last = True
            self._wake()
            self._end(None if isinstance(output, Exception) else output.result)

    def _end(self, result: Completion | None) -> None:
        if self.ended is None or self.ended.done():
            return
        if result is None:
            self.ended.cancel()
        else:
            self.ended.set_result(result)

    def _wake(self) -> None:
        if self._resting and not self._resting.done():
            self._resting.set_result(None)


def is_last(output: RequestOutput | Exception) -> bool:
    """Return whether an output, or an exception in its place, ends its request."""
    return isinstance(output, Exception) or output.finished


def _is_plain(output: RequestOutput | Exception) -> TypeGuard[RequestOutput]:
    return isinstance(output, RequestOutput) and output.completion is None and output.result is None


@dataclass(eq=False, slots=True)
class EngineCall:
    """A function of the engine that its thread calls between two steps, and its result."""

    function: Callable[[Engine], Any]
    result: "Future[Any]" = field(default_factory=Future)

    def run(self, engine: Engine) -> None:
        """Call it, unless its caller was cancelled."""
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            found = self.function(engine)
        except Exception as error:  # noqa: BLE001 (the caller raises it)
            self.result.set_exception(error)
        else:
            self.result.set_result(found)

    def fail(self, error: Exception) -> None:
        """Have its caller raise an error, unless that was cancelled."""
        if self.result.set_running_or_notify_cancel():
            self.result.set_exception(error)


class EngineThread:
    """Steps an engine, which it owns, until it is stopped or fails, and closes it then.

    lock     held while `ended` and `stopped` are read or set together with what must agree with them
    ended    why no more streams are opened; None while they are
    stopped  whether the thread takes no more commands
    """

    def __init__(self, engine: Engine) -> None:
        self.lock = threading.Lock()
        self.ended: str | None = None
        self.stopped = False
        self._engine = engine
        self._commands: queue.SimpleQueue[RequestHandle | EngineCall | None] = queue.SimpleQueue()
        self._open: dict[int, RequestHandle] = {}  # used by the thread only
        self._flush_seconds: float | None = None  # of `Engine.close`
        self._thread = threading.Thread(target=self._run, name="ingot-engine", daemon=True)
        self._thread.start()

    def send(self, handle: RequestHandle) -> None:
        """Have a request served. EngineError once the thread is stopped."""
        with self.lock:
            if self.stopped:
                raise EngineError(self.ended)
            self._commands.put(handle)

    def call(self, function: Callable[[Engine], T]) -> "Future[T]":
        """Have a function called between two steps. EngineError once the thread is stopped."""
        call = EngineCall(function)
        with self.lock:
            if self.stopped:
                raise EngineError(self.ended)
            self._commands.put(call)
        return call.result

    def cancel(self, handle: RequestHandle) -> None:
        """Abort a request that is not read any more."""
        handle.cancelled = True
        self._commands.put(handle)

    def stop(self, reason: str, flush_seconds: float | None = None) -> None:
        """End the thread after the commands that were sent; no command may follow."""
        with self.lock:
            self.ended = self.ended or reason
            if not self.stopped:
                self.stopped = True
                self._flush_seconds = flush_seconds
                self._commands.put(None)

    def join(self) -> None:
        """Wait until the thread has ended, and the engine is closed."""
        self._thread.join()

    # All methods from here on run in the thread.

    def _run(self) -> None:
        try:
            while self._execute_commands():
                self._deliver(self._engine.step())
                if self._engine.error:
                    raise self._engine.error
        except BaseException as error:  # noqa: BLE001 (not swallowed: every reader raises it)
            self._fail(error)
        finally:
            try:
                self._abort_all()
            finally:
                self._engine.close(flush_seconds=self._flush_seconds)

    def _execute_commands(self) -> bool:
        """Execute waiting commands, or wait for one when the engine is idle. False once the engine is to end."""
        while not (self._commands.empty() and self._engine.has_unfinished()):
            command = self._commands.get()
            if command is None:
                return False
            if isinstance(command, EngineCall):
                command.run(self._engine)
            elif command.cancelled:
                self._abort(command)
            else:
                self._add(command)
        return True

    def _add(self, handle: RequestHandle) -> None:
        try:
            request_id = self._engine.submit(handle.request, handle.grammar)
        except Exception as error:  # noqa: BLE001 (its reader raises it)
            handle.outlet.post([(handle, refusal(error))])
            return
        handle.request_id = request_id
        self._open[request_id] = handle

    def _abort(self, handle: RequestHandle) -> None:
        outputs: list[RequestOutput] = []
        if handle.request_id is not None:
            outputs = self._engine.end(handle.request_id)
            self._open.pop(handle.request_id, None)
        if handle.reports_end:
            none = EngineError("the request was cancelled before the engine took it")  # or its last output was posted
            handle.outlet.post([(handle, outputs[-1] if outputs else none)])

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Send outputs to their readers, with one call for each outlet."""
        by_outlet: dict[Outlet, list[Item]] = defaultdict(list)
        for output in outputs:
            handle = self._open.get(output.request_id)
            if handle:
                by_outlet[handle.outlet].append((handle, output))
            if output.finished:
                self._open.pop(output.request_id, None)
        for outlet, items in by_outlet.items():
            if not outlet.post(items):
                for handle, _ in items:
                    self._abort(handle)

    def _fail(self, error: BaseException) -> None:
        _log.error("the engine failed", exc_info=error)
        known = str(error) if error is self._engine.error else None
        self.stop(known or f"the engine failed and takes no more requests: {error}; load it again")
        for handle in self._open.values():
            failure = EngineError(f"the engine failed while it served this request: {error}")
            failure.__cause__ = error
            handle.outlet.post([(handle, failure)])
        self._open.clear()

    def _abort_all(self) -> None:
        """Abort running requests, and refuse those that were sent but not added."""
        for request_id, handle in self._open.items():
            handle.outlet.post([(handle, output) for output in self._engine.end(request_id)])
        self._open.clear()
        while not self._commands.empty():
            waiting = self._commands.get()
            if isinstance(waiting, EngineCall):
                waiting.fail(EngineError(self.ended))
            elif waiting and (waiting.reports_end or not waiting.cancelled) and self.ended:
                waiting.outlet.post([(waiting, EngineError(self.ended))])


def refusal(error: Exception) -> IngotError:
    """The error of a request that could not be added."""
    if isinstance(error, IngotError):
        return error
    _log.error("a request could not be added", exc_info=error)
    failure = EngineError(f"the request could not be added: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
