"""HTTP connections with bounds of their own: uvicorn's protocol waits for ever for the head of a request.

A connection is closed when a head takes longer than `body_seconds` to arrive, from the connection or from the head's
first byte, or has more than 64 KiB. A body has its bounds in `access.read_body`, and idle time between two requests is
uvicorn's `timeout_keep_alive`.
"""

import asyncio
from functools import partial

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_MAX_HEAD_BYTES = 64 << 10


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


def protocol_with(head_seconds: float) -> "partial[BoundedProtocol]":
    """What makes the protocol of each connection."""
    return partial(BoundedProtocol, head_seconds=head_seconds)
