"""Check a request before it is parsed: its API key, the size of its body, and that of all bodies together."""

import asyncio
import hmac
import logging
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from xxhash import xxh3_128_digest

from ingot.errors import UsageError, shown, shown_path
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.http.rate_limits import Holder, KeyLimits, limits_of
from ingot.runtime.server.http.retry import Client
from ingot.runtime.server.options import ServerOptions

_log = logging.getLogger(__name__)
_LEAST_KEY_CHARS = 8
_MOST_ID_CHARS = 128
_ROOM_RETRY_SECONDS = 1.0
ADMIN_PATHS = ("/admin/reload", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # with keys of their own
_OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics", "/openapi.json", *ADMIN_PATHS})
_HOLDER = "ingot.holder"
_ANYONE = Holder("", KeyLimits())


class _Key(NamedTuple):
    digest: bytes
    holder: Holder
    place: str  # file and line


class ApiKeys:
    """Keys that are allowed, kept as digests. Comparing takes the same time for every key, right or wrong."""

    def __init__(self, holders: Mapping[str, Holder], places: Mapping[str, str] | None = None) -> None:
        """The holders by their keys; the places are where the keys are written, for messages."""
        places = places or {}
        self._keys = tuple(_Key(_digest(key), holder, places.get(key, "")) for key, holder in holders.items())

    @classmethod
    def read(cls, file: Path) -> "ApiKeys":
        """A key per line, and after it what its holder may do; see `limits_of`.

        Empty lines and those that begin with # do not count. UsageError for a file that cannot be read, for one without
        keys, and for a key that is given twice.
        """
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
        except UnicodeDecodeError as error:
            raise UsageError(f"{file} is not UTF-8 text; write one API key per line") from error
        except (OSError, ValueError) as error:  # ValueError: no system has such a path
            reason = getattr(error, "strerror", None) or error
            message = f"{shown_path(file)} cannot be read as API keys: {reason}; name a file with one key per line"
            raise UsageError(message) from error
        holders: dict[str, Holder] = {}
        places: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            if not line or line.startswith("#"):
                continue
            place, (key, *settings) = f"{file}:{number}", line.split()
            if len(key) < _LEAST_KEY_CHARS or not key.isascii():
                raise UsageError(f"{place}: a key must be at least {_LEAST_KEY_CHARS} ASCII characters without spaces")
            if key in holders:
                raise UsageError(f"{place}: the key is the same as that of {places[key]}; leave one of them out")
            holders[key] = Holder(_digest(key)[:8].hex(), limits_of(settings, place))
            places[key] = place
        if not holders:
            raise UsageError(f"{file} has no API key; write one per line")
        return cls(holders, places)

    def holder_of(self, key: str) -> Holder | None:
        """The key's holder; None for a wrong key."""
        digest = _digest(key)
        found = None
        for each in self._keys:  # all of them, whatever matches
            if hmac.compare_digest(digest, each.digest):
                found = each.holder
        return found

    def replace(self, others: "ApiKeys") -> None:
        """Allow other keys from now on. A key that stays has its new limits, and its budgets as they are."""
        holders = {key.digest: key.holder for key in self._keys}
        for key in others._keys:
            holders.setdefault(key.digest, key.holder).change(key.holder.limits)
        self._keys = tuple(key._replace(holder=holders[key.digest]) for key in others._keys)

    def require_apart(self, users: "ApiKeys") -> None:
        """Raise UsageError where these keys, of administrators, have one of the users."""
        of_users = {key.digest: key for key in users._keys}
        for key in self._keys:
            if key.digest in of_users:
                raise UsageError(
                    f"{key.place}: the admin key is the API key of {of_users[key.digest].place}, so its users could"
                    " change what is served; write another key"
                )


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


class KeyFiles:
    """The keys of the users and of the administrators, in two files that may change; None without a file.

    Raises UsageError for a file that cannot be used, and for a key that is in both.
    """

    def __init__(self, users: Path | None, administrators: Path | None) -> None:
        self._files = (users, administrators)
        self.users, self.administrators = self._read()

    def reload(self) -> None:
        """Read both files again. If one has an error, all keys stay as they are, and the log has the reason."""
        try:
            users, administrators = self._read()
        except UsageError as error:
            _log.error("the API keys stay as they were: %s", error)
            return
        for present, new in ((self.users, users), (self.administrators, administrators)):
            if present and new:
                present.replace(new)
        if any(self._files):
            _log.warning("the API keys were read again")

    def _read(self) -> tuple[ApiKeys | None, ApiKeys | None]:
        users, administrators = (ApiKeys.read(file) if file else None for file in self._files)
        if users and administrators:
            administrators.require_apart(users)
        return users, administrators


class RequireKey:
    """ASGI middleware: refuses requests without a key, except for probes, metrics and the version.

    ADMIN_PATHS have keys of their own.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            try:
                require_key(scope, self._keys)
            except ApiError as error:
                response = error.response()
                response.headers["x-request-id"] = given_id(scope) or new_id()
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def require_key(scope: Scope, keys: ApiKeys) -> None:
    """Raise ApiError 401 for a request without one of the keys; `holder_of` has its holder from then on."""
    key = bearer_key(scope)
    holder = keys.holder_of(key) if key else None
    if holder is None:
        message = "the API key is wrong" if key else "an API key is required"
        raise ApiError(401, f"{message}: send Authorization: Bearer KEY", code="invalid_api_key")
    scope[_HOLDER] = holder


def bearer_key(scope: Scope) -> str:
    """The key that a request has, as OpenAI's clients send it or as Anthropic's; empty without one."""
    headers = Headers(scope=scope)
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "").strip()


def given_id(scope: Scope) -> str | None:
    """The client's own id of the request, if it is one that may be written back."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if given.isascii() and given.isprintable() and 0 < len(given) <= _MOST_ID_CHARS else None


def new_id() -> str:
    """An id for a request that has none, neither its client's nor that of an answer."""
    return f"req-{uuid.uuid4().hex}"


def holder_of(scope: Scope) -> Holder:
    """The holder of the request's key; without keys all requests have the same, which has no limits."""
    holder: Holder = scope.get(_HOLDER, _ANYONE)
    return holder


def client_of(scope: Scope, body: bytes) -> Client:
    """The client of a request, by which one that was refused is recognized when it comes again."""
    holder, (address, _) = holder_of(scope), scope.get("client") or ("", 0)
    whose = holder.group or address  # a key may be used from several addresses
    number = Headers(scope=scope).get("x-stainless-retry-count")  # of OpenAI's clients
    return Client(xxh3_128_digest(body + b"\0" + whose.encode()), holder.group, begins=number == "0")


class BodyRoom:
    """Bytes of the bodies of open requests: those that arrive and those that were read, until their requests end.

    Together they have at most `held_body_bytes`, and those of one key's holder half of that, or one longest body.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self._most = max(options.held_body_bytes, options.max_body_bytes)
        self._most_of_group = max(options.held_body_bytes // 2, options.max_body_bytes)
        self.num_bytes = 0
        self._num_bytes_of: Counter[str] = Counter()

    @contextmanager
    def body(self, group: str) -> Iterator["HeldBody"]:
        """A body of one of a group's requests, whose bytes count until the end of this context."""
        held = HeldBody(self, group)
        try:
            yield held
        finally:
            self._count(group, -held.num_bytes)

    def take(self, group: str, num_bytes: int) -> None:
        """Count bytes that have arrived. Raises ApiError 429 if there is no room for them."""
        if self.num_bytes + num_bytes > self._most:
            raise _no_room("the bodies of open requests", self._most)
        if group and self._num_bytes_of[group] + num_bytes > self._most_of_group:
            raise _no_room("the bodies of this key's open requests", self._most_of_group)
        self._count(group, num_bytes)

    def _count(self, group: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._num_bytes_of[group] += num_bytes
        if not self._num_bytes_of[group]:
            del self._num_bytes_of[group]


class HeldBody:
    """The bytes of one body that count in a `BodyRoom`."""

    def __init__(self, room: BodyRoom, group: str) -> None:
        self.options = room.options
        self.num_bytes = 0
        self._room = room
        self._group = group

    def take(self, num_bytes: int) -> None:
        """Count further bytes of the body."""
        self._room.take(self._group, num_bytes)
        self.num_bytes += num_bytes


async def read_body(scope: Scope, receive: Receive, held: HeldBody) -> bytes:
    """The whole body. ApiError 413 for one that is too long, 408 for one that takes too long to arrive, 415 for one
    that is compressed, 429 where the bodies of all open requests are too long together.
    """
    options = held.options
    headers = Headers(scope=scope)
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(415, f"the body has the Content-Encoding {shown(encoding)}; send it without one")
    announced = headers.get("content-length", "")
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
                held.take(len(pieces[-1]))
                if not message.get("more_body", False):
                    return b"".join(pieces)
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {options.body_seconds:g} s") from error


def _too_long(found: str, options: ServerOptions) -> ApiError:
    return ApiError(413, f"the body {found} than allowed; max_body_bytes is {options.max_body_bytes}")


def _no_room(whose: str, most: int) -> ApiError:
    return ApiError(
        429,
        f"{whose} have as many bytes together as are allowed, {most}; try again in {_ROOM_RETRY_SECONDS:g}s",
        code="overloaded",
        retry_after_seconds=_ROOM_RETRY_SECONDS,
    )
