"""The messages between an engine's process and the process that reads it, over a connected socket.

Pickled, each after its length in bytes: both ends are processes of one program, of which one started the other, so what
arrives is as trusted as the code. Outputs of one choice that leave together travel as one.
"""

import io
import pickle
import queue
import select
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ingot.artifact import Artifact, ModelFacts
from ingot.errors import EngineError, IngotError
from ingot.runtime.adapter_registry import AdapterFacts
from ingot.runtime.beam_search import BeamParams
from ingot.runtime.load import EngineLoad
from ingot.runtime.metrics import EngineMetrics
from ingot.runtime.options import EngineOptions
from ingot.runtime.outputs import RequestOutput
from ingot.runtime.request_options import RequestOptions
from ingot.runtime.sampler import SampledToken
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.steps.batch import Int64Array

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 1 << 16
_SHORT_BYTES = 1 << 15  # less than a connection has room for when it has any
_NOTHING = object()
_PLAIN_TOKENS = 8192  # kept: making one takes ten times as long as finding it


# To the engine's process


class Load(NamedTuple):
    """The first message: load this artifact. Records of its loggers are sent from `log_level` on."""

    artifact: Artifact
    options: EngineOptions
    log_level: int


class Open(NamedTuple):
    """Serve a request. `key` names it in all that follows."""

    key: int
    prompt: Int64Array
    params: SamplingParams | BeamParams
    options: RequestOptions
    keep_logits: bool
    arrival_seconds: float
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


class Stop(NamedTuple):
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
    """Sends and receives messages. Any thread may send, one receives.

    The socket never blocks: an event loop that watches a descriptor may change its mode, so waiting is done here.

    failure  the error after which nothing more is sent; None before that
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._sending = threading.Lock()
        self._room = _poll(connected, select.POLLOUT)
        # one poll object each: two threads cannot wait with the same one
        self._writable = _poll(connected, select.POLLOUT)
        self._readable = _poll(connected, select.POLLIN)
        self._received = bytearray()
        self._buffer = bytearray(_READ_BYTES)  # a new one for each read leaves holes in malloc's heap
        self.failure: OSError | None = None

    def send(self, message: object) -> None:
        """Send a message; waits while the other end does not read.

        OSError when it has closed or the message cannot be sent. Both ends are then closed: the rest of a message that
        was sent in part would be read as the beginning of the next one.
        """
        self.send_packed(packed(message))

    def send_packed(self, data: bytes) -> None:
        """As `send`."""
        with self._sending:
            if self.failure:
                raise self.failure
            try:
                self._send_all(memoryview(data))
            except OSError as error:
                self.failure = error
                self._shut_down()
                raise

    def _send_all(self, rest: memoryview) -> None:
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                self._writable.poll()

    def has_room(self) -> bool:
        """Whether a message of ordinary size can be sent without waiting. One thread may ask."""
        return not self._sending.locked() and bool(self._room.poll(0))

    def receive(self) -> Any:
        """The next message. EOFError when the other end has closed or died."""
        while (message := self._next()) is _NOTHING:
            self._readable.poll()
            self._read()
        return message

    def receive_some(self) -> list[Any]:
        """The messages that have arrived whole, without waiting; more may be left. EOFError as `receive`."""
        self._read()
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

    def _read(self) -> None:
        try:
            num_bytes = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError as error:
            raise EOFError(str(error)) from error
        if not num_bytes:
            raise EOFError("the other process has closed the connection")
        self._received += memoryview(self._buffer)[:num_bytes]

    def _shut_down(self) -> None:
        with suppress(OSError):  # the other end has closed it
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it; the other end's `receive` raises."""
        self._shut_down()
        self._socket.close()


def _poll(connected: socket.socket, event: int) -> select.poll:
    poll = select.poll()
    poll.register(connected, event)
    return poll


class Sender:
    """Sends messages in order and does not wait for the other process.

    A short one leaves at once where the connection has room for it: to wake a thread for it takes longer than to send
    it, and the interpreter. A thread sends the others, and what follows them.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._order = threading.Lock()
        self._num_waiting = 0
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, name="ingot-messages", daemon=True).start()

    def send(self, message: object) -> None:
        """Send a message. A failure closes the connection (`Connection.failure`), which its reader finds."""
        data = packed(message)
        with self._order:
            if len(data) > _SHORT_BYTES or self._num_waiting or not self._connection.has_room():
                self._num_waiting += 1
                self._messages.put(data)
                return
            with suppress(OSError):
                self._connection.send_packed(data)

    def close(self) -> None:
        """End the thread after what waits."""
        self._messages.put(None)

    def _send_all(self) -> None:
        with suppress(OSError):
            while (data := self._messages.get()) is not None:
                self._connection.send_packed(data)
                with self._order:
                    self._num_waiting -= 1


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
