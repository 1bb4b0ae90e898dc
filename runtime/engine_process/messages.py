"""The messages between an engine's process and the process that reads it, over a connected socket.

Pickled, each after its length in bytes: both ends are processes of one program, of which one started the other, so what
arrives is as trusted as the code. Outputs of one request that leave together travel as one.
"""

import io
import pickle
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
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


class Cancel(NamedTuple):
    """Abort a request."""

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
    """Outputs by key, packed (`pack`), or the errors that end requests; and the engine's load after them."""

    items: "Sequence[tuple[int, Packed | Exception]]"
    load: EngineLoad


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


def pack(output: RequestOutput) -> Packed:
    """An output in the form in which it travels: plain tuples take a fifth of the time of dataclasses."""
    if output.completion or output.result:
        return output
    tokens = [token.token_id if token.logprob is None else _fields(token) for token in output.tokens]
    return output.request_id, output.text, tokens, output.index


def unpack(packed: Packed) -> RequestOutput:
    """The output of `pack`."""
    if isinstance(packed, RequestOutput):
        return packed
    request_id, text, tokens, index = packed
    sampled = tuple(SampledToken(*token) if isinstance(token, tuple) else SampledToken(token) for token in tokens)
    return RequestOutput(request_id, text, sampled, index=index)


def joined(first: Packed, second: Packed) -> Packed | None:
    """Two outputs of one request as one; None where they are of two choices, or one is the last of its choice."""
    if isinstance(first, RequestOutput) or isinstance(second, RequestOutput) or first[3] != second[3]:
        return None
    return first[0], first[1] + second[1], [*first[2], *second[2]], first[3]


def _fields(token: SampledToken) -> tuple[Any, ...]:
    return token.token_id, token.logprob, token.top


class Connection:
    """Sends and receives messages. Any thread may send, one receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()
        self._received = b""

    def send(self, message: object) -> None:
        """Send a message; waits while the other end does not read. OSError when it has closed."""
        buffer = io.BytesIO()
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
        data = buffer.getbuffer()
        with self._sending:
            self._socket.sendall(b"".join((_LENGTH.pack(len(data)), data)))

    def receive(self) -> Any:
        """The next message. EOFError when the other end has closed or died."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        return pickle.loads(self._take(length))

    def _take(self, length: int) -> bytes:
        parts, have = [self._received], len(self._received)
        while have < length:
            try:
                data = self._socket.recv(max(_READ_BYTES, length - have))
            except OSError as error:
                raise EOFError(str(error)) from error
            if not data:
                raise EOFError("the other process has closed the connection")
            parts.append(data)
            have += len(data)
        whole = b"".join(parts)
        self._received = whole[length:]
        return whole[:length]

    def close(self) -> None:
        """Close it; the other end's `receive` raises."""
        with suppress(OSError):  # the other end has closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


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
