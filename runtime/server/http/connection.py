"""HTTP connections with bounds of their own: uvicorn's protocol waits for ever for the head of a request.

A connection is closed when a head takes longer than `body_seconds` to arrive, from the connection or from the head's
first byte, or has more than 64 KiB. A body has its bounds in `access.read_body`, and idle time between two requests is
uvicorn's `timeout_keep_alive`.

Chunks of a stream may go to the socket past the layers of ASGI, which take most of the time of an event: see
`ChunkWriter`.
"""

import asyncio
import weakref
from functools import partial
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.auto import AutoHTTPProtocol

_MAX_HEAD_BYTES = 64 << 10
_CYCLE = "ingot.cycle"


class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol, with a time for each head."""

    def __init__(self, *arguments: object, head_seconds: float, **options: object) -> None:
        super().__init__(*arguments, **options)
        self._head_seconds = head_seconds
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:  # the head is complete
            self._stop_timer()
            return
        self._head_bytes += len(data)
        if self._head_bytes > _MAX_HEAD_BYTES:
            self.transport.close()
        elif self._timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
        """A request begins; its task runs later, so what the scope gets here is there from the start."""
        super().on_headers_complete()
        if hasattr(self.cycle, "chunked_encoding"):  # of httptools; h11 writes all through its own state
            self.scope[_CYCLE] = weakref.ref(self.cycle)  # which has the scope: neither is to wait for a collection

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(error)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._head_seconds, self.transport.close)

    def _stop_timer(self) -> None:
        self._head_bytes = 0
        if self._timer:
            self._timer.cancel()
            self._timer = None


class ChunkWriter:
    """Writes chunks of an answer that has begun, as ASGI's `send` does, without waiting."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle

    @property
    def is_free(self) -> bool:
        """False if the client reads too slowly, has left, or the answer is not sent in chunks: then `send` is to be
        used, which waits.
        """
        cycle = self._cycle
        return not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete) and cycle.chunked_encoding

    def write(self, data: bytes) -> None:
        """Write a chunk; only while `is_free`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def chunk_writer(scope: Scope) -> ChunkWriter | None:
    """The writer of a request's answer; None where the connection has no such way."""
    found = scope.get(_CYCLE)
    cycle = found() if found else None
    return ChunkWriter(cycle) if cycle else None


def protocol_with(head_seconds: float) -> "partial[BoundedProtocol]":
    """What makes the protocol of each connection."""
    return partial(BoundedProtocol, head_seconds=head_seconds)
