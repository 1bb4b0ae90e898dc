"""What is checked before a request is parsed: its API key, and the size of its body."""

import asyncio
import hmac
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from ingot.errors import UsageError
from ingot.runtime.server.api_error import ApiError
from ingot.runtime.server.key_limits import Holder, Limits, limits_of
from ingot.runtime.server.options import ServerOptions

_LEAST_KEY_CHARS = 8
ADMIN_PATHS = ("/admin/reload", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # with keys of their own
_OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics", "/openapi.json", *ADMIN_PATHS})
_HOLDER = "ingot.holder"
_ANYONE = Holder("", Limits())


class ApiKeys:
    """Keys that are allowed, kept as digests. Comparing takes the same time for every key, right or wrong."""

    def __init__(self, holders: Mapping[str, Holder]) -> None:
        """The holders by their keys."""
        self._holders = tuple((sha256(key.encode()).digest(), holder) for key, holder in holders.items())

    @classmethod
    def read(cls, file: Path) -> "ApiKeys":
        """A key per line, and after it what its holder may do; see `limits_of`.

        Empty lines and those that begin with # do not count. UsageError for a file without keys.
        """
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except UnicodeDecodeError as error:
            raise UsageError(f"{file} is not UTF-8 text; write one API key per line") from error
        holders: dict[str, Holder] = {}
        for number, line in enumerate(lines, 1):
            if not line or line.startswith("#"):
                continue
            key, *settings = line.split()
            if len(key) < _LEAST_KEY_CHARS or not key.isascii():
                raise UsageError(
                    f"{file}:{number}: a key must be at least {_LEAST_KEY_CHARS} ASCII characters without spaces"
                )
            holders[key] = Holder(sha256(key.encode()).digest()[:8].hex(), limits_of(settings, f"{file}:{number}"))
        if not holders:
            raise UsageError(f"{file} has no API key; write one per line")
        return cls(holders)

    def holder_of(self, key: str) -> Holder | None:
        """The key's holder; None for a wrong key."""
        digest = sha256(key.encode()).digest()
        found = None
        for own, holder in self._holders:  # all of them, whatever matches
            if hmac.compare_digest(digest, own):
                found = holder
        return found


class RequireKey:
    """ASGI middleware: refuses requests without a key, except for probes, metrics and the version.

    ADMIN_PATHS have keys of their own.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = bearer_key(scope)
        holder = self._keys.holder_of(key) if key else None
        if holder is None:
            message = "the API key is wrong" if key else "an API key is required"
            error = ApiError(401, f"{message}: send Authorization: Bearer KEY", code="invalid_api_key")
            await error.response()(scope, receive, send)
            return
        scope[_HOLDER] = holder
        await self._app(scope, receive, send)


def bearer_key(scope: Scope) -> str:
    """The key that a request has; empty without one."""
    kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def holder_of(scope: Scope) -> Holder:
    """The holder of the request's key; without keys all requests have the same, which has no limits."""
    holder: Holder = scope.get(_HOLDER, _ANYONE)
    return holder


async def read_body(scope: Scope, receive: Receive, options: ServerOptions) -> bytes:
    """The whole body. ApiError 413 for one that is too long, 408 for one that takes too long to arrive."""
    announced = Headers(scope=scope).get("content-length", "")
    if announced.isdecimal() and len(announced) < 20 and int(announced) > options.max_body_bytes:
        raise _too_long(f"has {int(announced)} bytes, more", options)
    pieces, size = [], 0
    try:
        async with asyncio.timeout(options.body_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                pieces.append(message.get("body", b""))
                size += len(pieces[-1])
                if size > options.max_body_bytes:
                    raise _too_long("has more bytes", options)
                if not message.get("more_body", False):
                    return b"".join(pieces)
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {options.body_seconds:g} s") from error


def _too_long(found: str, options: ServerOptions) -> ApiError:
    return ApiError(413, f"the body {found} than allowed; max_body_bytes is {options.max_body_bytes}")
