"""The way out of a request: an answer as a whole, or events, of which the first sends the status.

Every answer has the request's id, and what its API key may still use when the head is sent: that of a whole answer is
sent after the generation, that of a stream before its first event.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from ingot.runtime.server.http.access import given_id, holder_of, new_id
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.http.connection import chunk_writer

_STREAM = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class ResponseWriter:
    """Writes one answer. `sending_since` is set while the client does not accept what was written.

    `send_seconds` is how long it did not, over the whole answer.

    `failure` writes an error as the last event of a stream and `error_body` as a whole answer, in the form of its
    endpoint. `status` is what was sent, `error` the error of the answer or of the end of the stream.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._chunks = chunk_writer(scope)
        self.has_ended = False
        self.status: int | None = None
        self.error: ApiError | None = None
        self.request_id = given_id(scope)
        self.sending_since: float | None = None
        self._sent_seconds = 0.0
        self.failure: Callable[[ApiError], bytes] = lambda error: sse(error.as_json())
        self.error_body: Callable[[ApiError], Mapping[str, object]] = ApiError.as_json

    async def whole(self, body: bytes) -> None:
        """Answer with JSON."""
        await self._begin({"content-type": "application/json", "content-length": str(len(body))})
        await self._write(body, more=False)

    async def events(self, data: bytes, *, more: bool = True) -> None:
        """Write events; the first call sends the status."""
        if more and data and self.is_free:
            self.write_events(data)
            return
        if self.status is None:
            await self._begin(_STREAM)
        await self._write(data, more=more)

    @property
    def is_free(self) -> bool:
        """Whether a stream has begun whose client accepts more: `write_events` does not wait then."""
        return self.status is not None and self._chunks is not None and self._chunks.is_free

    @property
    def send_seconds(self) -> float:
        """How long the client did not accept what was written, so far."""
        since = self.sending_since
        return self._sent_seconds + (0.0 if since is None else time.monotonic() - since)

    def write_events(self, data: bytes) -> None:
        """Write further events; only while `is_free`."""
        assert self._chunks
        self._chunks.write(data)

    async def fail(self, error: ApiError) -> None:
        """Answer with an error: by its status, or as the last event of a stream that has begun."""
        if self.has_ended:
            return
        self.error = error
        if self.status is not None:
            await self._write(self.failure(error), more=False)
            return
        self.status, self.has_ended = error.status, True
        response = error.response(self.error_body(error))
        response.headers.update(self._headers())
        await response(self._scope, self._receive, self._send)

    def _headers(self) -> dict[str, str]:
        self.request_id = self.request_id or new_id()
        return {"x-request-id": self.request_id, **holder_of(self._scope).headers()}

    async def _begin(self, headers: Mapping[str, str]) -> None:
        self.status = 200
        raw = [(name.encode(), value.encode()) for name, value in {**headers, **self._headers()}.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _write(self, data: bytes, *, more: bool) -> None:
        self.sending_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._sent_seconds, self.sending_since = self.send_seconds, None
        self.has_ended = not more


def sse(content: dict[str, Any]) -> bytes:
    """A server-sent event with JSON data."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"
