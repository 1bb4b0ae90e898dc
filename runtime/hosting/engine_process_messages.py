"""The messages between an engine's process and the process that reads it, over a connected socket.

Pickled, each after its length in bytes: both ends are processes of one program, of which one started the other, so what
arrives is as trusted as the code. Outputs of one choice that leave together travel as one.
"""

import io
import pickle
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ingot.artifact import Artifact, ModelFacts
from ingot.errors import EngineError, IngotError
from ingot.runtime.asking.outputs import RequestOutput, SampledToken
from ingot.runtime.engine.adapter_registry import AdapterFacts
from ingot.runtime.options import EngineOptions
from ingot.runtime.requests.engine_request import EngineRequest
from ingot.runtime.steps.metrics import EngineMetrics
from ingot.runtime.steps.service_rates import EngineLoad

MOST_WAITING_BYTES = 64 << 20
"""Bytes that wait for a process which does not read, before it is offered no more."""
_LENGTH = struct.Struct("<Q")
_READ_BYTES = 1 << 16
_LOOK_MS = 1000  # between two looks at whether a connection has ended, in case the system does not say
_NOTHING = object()
_PLAIN_TOKENS = 8192  # kept: making one takes ten times as long as finding it


# To the engine's process


class LoadArtifact(NamedTuple):
    """The first message: load this artifact. Records of its loggers are sent from `log_level` on."""

    artifact: Artifact
    options: EngineOptions
    log_level: int


class Open(NamedTuple):
    """Serve a request. `key` names it in all that follows."""

    key: int
    request: EngineRequest
    interval_seconds: float
    reports_end: bool


class Cancel(NamedTuple):
    """Abort a request. If it reports its end, its last output or an error follows."""

    key: int


class AskMetrics(NamedTuple):
    """Send the engine's metrics."""


class LoadAdapter(NamedTuple):
    """Load a LoRA adapter; `key` names the answer."""

    key: int
    name: str
    path: Path
    replace: bool


class UnloadAdapter(NamedTuple):
    """Unload a LoRA adapter; `key` names the answer."""

    key: int
    name: str


class StopProcess(NamedTuple):
    """End the requests, close the engine and the process."""

    reason: str
    flush_seconds: float | None


# From it


class Loaded(NamedTuple):
    """The engine takes requests."""

    model: ModelFacts
    max_batch_tokens: int
    load: EngineLoad
    metrics: EngineMetrics
    adapters: Mapping[str, AdapterFacts]


class NotLoaded(NamedTuple):
    """The engine could not be loaded; the process ends."""

    error: Exception


class Outputs(NamedTuple):
    """Outputs by key, packed (`Lot`), or the errors that end requests; and the engine's load after them.

    core  on which the engine's thread last sent; None where the system does not say
    """

    items: "Sequence[tuple[int, Packed | Exception]]"
    load: EngineLoad
    core: int | None = None


class Metrics(NamedTuple):
    """The answer to AskMetrics."""

    metrics: EngineMetrics


class Adapters(NamedTuple):
    """The answer to LoadAdapter or UnloadAdapter: what is loaded now, or why it was refused."""

    key: int
    adapters: Mapping[str, AdapterFacts]
    error: Exception | None


class Log(NamedTuple):
    """A record of a logger."""

    name: str
    level: int
    text: str


class Ended(NamedTuple):
    """The engine is closed; why it took no more requests."""

    reason: str


Packed = tuple[int, str, Sequence[int | tuple[Any, ...]], int] | RequestOutput
"""The engine's number of the request, text, tokens (an id, or the fields of a SampledToken), index of the choice; the
last output of a choice as it is."""


class Lot:
    """Outputs of one choice that leave together, none of them its last.

    Packed they are plain tuples, which take a fifth of the time of dataclasses to travel.
    """

    __slots__ = ("_request_id", "_texts", "_tokens", "index")

    def __init__(self, first: RequestOutput) -> None:
        self._request_id = first.request_id
        self._texts: list[str] = []
        self._tokens: list[int | tuple[Any, ...]] = []
        self.index = first.index
        self.add(first)

    def add(self, output: RequestOutput) -> None:
        """Add the next output of the choice."""
        self._texts.append(output.text)
        for token in output.tokens:
            self._tokens.append(token.token_id if token.logprob is None else (token.token_id, token.logprob, token.top))

    def packed(self) -> Packed:
        """All of them as one."""
        return self._request_id, "".join(self._texts), self._tokens, self.index


def unpack(packed: Packed) -> RequestOutput:
    """The output that a lot was, or the last one of a choice as it is."""
    if isinstance(packed, RequestOutput):
        return packed
    request_id, text, tokens, index = packed
    sampled = tuple(SampledToken(*token) if isinstance(token, tuple) else _plain_token(token) for token in tokens)
    return RequestOutput(request_id, text, sampled, index=index)


@lru_cache(_PLAIN_TOKENS)
def _plain_token(token_id: int) -> SampledToken:
    return SampledToken(token_id)


class Connection:
    """Sends and receives messages. Any thread may send, and does not wait; one receives.

    A message leaves at once as far as the socket has room for it: to wake a thread for it takes longer than to send it,
    and the interpreter. A thread sends the rest, and what follows it. No call blocks in the socket, whose mode an event
    loop that watches it may change: all waiting is done by poll.

    An error ends the connection for both processes: what follows half a message would be read as its rest.

    failure  the error that ended it; None before that, and where the other process ended it
    """

    def __init__(self, connected: socket.socket) -> None:
        # no time limit of Python's, under which a call waits whatever its flags
        connected.setblocking(False)
        self._socket = connected
        self._readable = _poll(connected, select.POLLIN)
        self._received = bytearray()
        self._buffer = bytearray(_READ_BYTES)  # a new one for each read leaves holes in malloc's heap
        self._changed = threading.Condition()
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self._has_ended = False
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._send_waiting, name="ingot-messages", daemon=True)
        self._thread.start()

    def send(self, message: object) -> None:
        """Send a message. Nothing happens once the connection has ended: the thread that receives learns that."""
        self._put(packed(message))

    def offer(self, message: object) -> bool:
        """As `send`; False, and nothing is sent, if too many bytes wait for the other process to read.

        One message is taken whatever its size.
        """
        data = packed(message)
        with self._changed:
            if self._waiting and self._waiting_bytes + len(data) > MOST_WAITING_BYTES:
                return False
            self._put(data)
        return True

    def has_room(self) -> bool:
        """Return whether a message of ordinary size would leave at once."""
        with self._changed:
            if self._waiting or self._has_ended:
                return False
            try:
                return bool(_poll(self._socket, select.POLLOUT).poll(0))
            except OSError as error:
                self.fail(error)
                return False

    def wait_for_room(self) -> None:
        """Wait until `has_room`, or the connection has ended."""
        self.flush()
        while not self.has_room() and not self._has_ended:
            _poll(self._socket, select.POLLOUT).poll(_LOOK_MS)

    def flush(self) -> None:
        """Wait until all messages have left, or the connection has ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)

    def fail(self, error: Exception) -> None:
        """End the connection for an error."""
        with self._changed:
            if not self._has_ended and not isinstance(error, BrokenPipeError | ConnectionResetError):
                self.failure = error
            self._end()

    def close(self) -> None:
        """Close it; the other end's `receive` raises."""
        with self._changed:
            self._end()
        self._thread.join()  # or it might use a descriptor that is another file's by then
        self._socket.close()

    def receive(self) -> Any:
        """The next message. EOFError when the connection has ended."""
        while (message := self._next()) is _NOTHING:
            self._read(wait=True)
        return message

    def receive_some(self) -> list[Any]:
        """The messages that have arrived whole, without waiting; more may be left. EOFError as `receive`."""
        self._read(wait=False)
        messages = []
        while (message := self._next()) is not _NOTHING:
            messages.append(message)
        return messages

    def fileno(self) -> int:
        """The descriptor of its socket, to wait for messages."""
        return self._socket.fileno()

    def _next(self) -> Any:
        """Take the first message that has arrived whole; _NOTHING without one."""
        if len(self._received) < _LENGTH.size:
            return _NOTHING
        (length,) = _LENGTH.unpack_from(self._received)
        end = _LENGTH.size + length
        if len(self._received) < end:
            return _NOTHING
        with memoryview(self._received) as view, view[_LENGTH.size : end] as data:
            message = pickle.loads(data)
        del self._received[:end]
        return message

    def _read(self, *, wait: bool) -> None:
        try:
            if wait:
                self._readable.poll()
            num_bytes = self._socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            self.fail(error)
            raise EOFError(str(error)) from error
        if not num_bytes:
            raise EOFError("the other process has closed the connection")
        self._received += memoryview(self._buffer)[:num_bytes]

    def _put(self, data: bytes) -> None:
        with self._changed:
            if self._has_ended:
                return
            self._waiting.append(memoryview(data))
            self._waiting_bytes += len(data)
            if len(self._waiting) == 1:
                self._send_some()
            if self._waiting:
                self._changed.notify_all()

    def _send_some(self) -> None:
        """Send what there is room for of the first message that waits. Called with the lock."""
        try:
            first = self._waiting[0]
            count = self._socket.send(first, socket.MSG_DONTWAIT)
            self._waiting_bytes -= count
            if count < len(first):
                self._waiting[0] = first[count:]
            else:
                self._waiting.popleft()
        except BlockingIOError:
            return
        except Exception as error:  # noqa: BLE001 (the thread that receives reports it)
            self.fail(error)
        if not self._waiting:
            self._changed.notify_all()

    def _send_waiting(self) -> None:
        try:
            writable = _poll(self._socket, select.POLLOUT)
            while self._await_message():
                writable.poll(_LOOK_MS)
                with self._changed:
                    if self._waiting:
                        self._send_some()
        except Exception as error:  # noqa: BLE001 (the thread that receives reports it)
            self.fail(error)

    def _await_message(self) -> bool:
        """Wait until a message waits; False once the connection has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._has_ended)
            return not self._has_ended

    def _end(self) -> None:
        self._has_ended = True
        self._waiting.clear()
        self._waiting_bytes = 0
        self._changed.notify_all()
        with suppress(OSError):  # the other process has closed it
            self._socket.shutdown(socket.SHUT_RDWR)


def _poll(connected: socket.socket, event: int) -> select.poll:
    """An object to wait with; two threads cannot wait with the same one."""
    poll = select.poll()
    poll.register(connected, event)
    return poll


def packed(message: object) -> bytes:
    """A message as it travels."""
    buffer = io.BytesIO(_LENGTH.pack(0))
    buffer.seek(_LENGTH.size)
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    view = buffer.getbuffer()
    _LENGTH.pack_into(view, 0, len(view) - _LENGTH.size)
    view.release()
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Ingot's errors keep class, message and attributes; any other becomes an EngineError with its name."""

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, BaseException):
            return NotImplemented
        if not isinstance(value, IngotError):
            value = EngineError(f"{type(value).__name__}: {value}")
        return _error, (type(value), value.args, vars(value))


def _error(kind: type[IngotError], args: tuple[Any, ...], attributes: Mapping[str, Any]) -> IngotError:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error
