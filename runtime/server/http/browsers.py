"""Requests that web pages make: a page must not use a server because its reader's browser can reach it.

A browser sends what any page asks for, also to the reader's own machine and network. Two ways lead there:

    another origin   the page's requests say where it is from (Origin, or Sec-Fetch-Site)
    rebinding        the page's own name is resolved to the server's address: Host still has that name

So a server without keys refuses requests of other origins that are not allowed, and one that listens on a loopback
address alone refuses names that are not its own. Addresses cannot be rebound, and a page cannot send a key that it
does not have: neither is refused.
"""

import ipaddress
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingot.errors import UsageError, shown
from ingot.runtime.server.http.access import given_id, new_id
from ingot.runtime.server.http.api_error import ApiError

_ANY = "*"
_OWN_NAMES = frozenset({"host.docker.internal", "host.containers.internal"})  # of a machine, for its containers
_PREFLIGHT_SECONDS = "600"
_METHODS = "GET, POST, DELETE"
_EXPOSED = ", ".join(
    (
        *("x-request-id", "retry-after", "retry-after-ms"),
        *(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
    )
)


@dataclass(frozen=True)
class WebRules:
    """What pages may do. Raises UsageError for an origin or a name that cannot be one.

    hosts      names by which the server may be called besides its own; "*" allows all; empty: as the address says
    origins    origins whose pages may use it, such as https://app.example; "*" allows all
    own_name   the name that it listens on
    is_local   it listens on a loopback address
    has_keys   requests need a key
    """

    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    own_name: str = ""
    is_local: bool = False
    has_keys: bool = False

    def __post_init__(self) -> None:
        for name in self.hosts:
            if name != _ANY and (not name or _name_of(name) != name.lower().removeprefix("[").removesuffix("]")):
                raise UsageError(
                    f"allowed_hosts has {shown(name)}; it must be a host's name without a scheme and a port, such as"
                    " llm.example, or * for all"
                )
        for origin in self.origins:
            if origin not in (_ANY, "null") and not _is_origin(origin):
                raise UsageError(
                    f"allowed_origins has {shown(origin)}; it must be a scheme and a host, such as https://app.example"
                    " or http://localhost:3000, or * for all"
                )

    def knows_host(self, host: str) -> bool:
        """Whether a Host is one of the server's or a local name, or an address, or of a client that sends none."""
        name = _name_of(host)
        if not host or _ANY in self.hosts or _is_address(name):
            return True
        if name and "." not in name:  # of a machine or a container nearby: the public DNS has no such names
            return True
        own = {*_OWN_NAMES, *map(str.lower, (self.own_name, *self.hosts))}
        return bool(name) and (name in own or name.endswith(".localhost"))

    @property
    def checks_hosts(self) -> bool:
        """Whether other names are refused."""
        return bool(self.hosts) or (self.is_local and not self.has_keys)

    def allows_origin(self, origin: str) -> bool:
        """Whether pages of an origin may use the server and read what it answers."""
        return _ANY in self.origins or origin in self.origins

    def require(self, scope: Scope) -> str:
        """Raise ApiError for a request that no allowed page makes; returns the origin of one that an allowed page
        makes.
        """
        headers = _headers(scope, (b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"content-type"))
        host, origin = headers.get("host", ""), headers.get("origin", "")
        if self.checks_hosts and not self.knows_host(host):
            raise ApiError(
                403,
                f"the Host {shown(host)} is not one of this server's names; start it with --allowed-host"
                f" {_name_of(host) or 'NAME'} if it is",
                code="host_not_allowed",
            )
        site = headers.get("sec-fetch-site", "")
        is_allowed = bool(origin) and self.allows_origin(origin)
        if not is_allowed and self._is_foreign(scope, host, origin, site, headers.get("sec-fetch-mode", "")):
            whose = f"of the origin {shown(origin)}" if origin else "of another site"
            raise ApiError(
                403,
                f"a web page {whose} may not use this server; start it with --allowed-origins"
                f" {origin if _is_origin(origin) else 'URL'} to allow it",
                code="origin_not_allowed",
            )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        has_form = scope["method"] == "POST" and kind and kind != "application/json"
        if has_form and (origin or site):
            raise ApiError(415, f"the Content-Type is {shown(kind)}; a web page must send application/json")
        return origin if is_allowed else ""

    def _is_foreign(self, scope: Scope, host: str, origin: str, site: str, mode: str) -> bool:
        """Whether a request is of a page that is not of this server, and needs no key to do something."""
        is_preflight = scope["method"] == "OPTIONS" and origin
        if self.has_keys and not is_preflight:
            return False
        if origin:
            is_own = urlsplit(origin).netloc.lower() == host.lower() if _is_origin(origin) else False
            return not (is_own and self.knows_host(host))
        is_link = scope["method"] in ("GET", "HEAD") and mode in ("navigate", "")
        return site in ("cross-site", "same-site") and not is_link


class GuardPages:
    """ASGI middleware: refuses what `WebRules` refuse, and answers browsers on behalf of allowed pages (CORS)."""

    def __init__(self, app: ASGIApp, rules: WebRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            origin = self._rules.require(scope)
        except ApiError as error:
            response = error.response()
            response.headers["x-request-id"] = given_id(scope) or new_id()
            response.headers["connection"] = "close"  # the body is not read
            await response(scope, receive, send)
            return
        if not origin:
            await self._app(scope, receive, send)
            return
        asked = _headers(scope, (b"access-control-request-method", b"access-control-request-headers"))
        if scope["method"] == "OPTIONS" and asked.get("access-control-request-method"):
            await Response(status_code=204, headers=self._preflight(origin, asked))(scope, receive, send)
            return

        async def readable(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = {**self._allowing(origin), "access-control-expose-headers": _EXPOSED}
                message["headers"] = [*message["headers"], *((n.encode(), v.encode()) for n, v in added.items())]
            await send(message)

        await self._app(scope, receive, readable)

    def _allowing(self, origin: str) -> dict[str, str]:
        return {"access-control-allow-origin": origin, "vary": "Origin"}

    def _preflight(self, origin: str, asked: dict[str, str]) -> dict[str, str]:
        return {
            **self._allowing(origin),
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": asked.get("access-control-request-headers", "content-type"),
            "access-control-allow-private-network": "true",
            "access-control-max-age": _PREFLIGHT_SECONDS,
        }


def _headers(scope: Scope, names: Collection[bytes]) -> dict[str, str]:
    """Some headers. ApiError for one that is given twice: the server and a proxy may read different ones."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        if name in names:
            text = name.decode()
            if text in found and name in (b"host", b"origin"):
                raise ApiError(400, f"the request has more than one header {text}; send one")
            found[text] = value.decode("latin-1").strip()
    return found


def _name_of(host: str) -> str:
    """The name or address in a Host, without its port; empty for one that cannot be one."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_origin(text: str) -> bool:
    """Whether a text is an origin as browsers send it: a scheme, a host and perhaps a port."""
    try:
        parts = urlsplit(text)
        return bool(parts.scheme and parts.hostname) and text == f"{parts.scheme}://{parts.netloc}" and "@" not in text
    except ValueError:
        return False
