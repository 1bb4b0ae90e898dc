"""Web pages: none uses a server that did not allow it, whatever name it calls it by, and other clients are served."""

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from ingot.errors import UsageError
from ingot.runtime.server.http.browsers import WebRules
from ingot.runtime.server.options import ServerOptions
from tests.runtime.engines import text_engine
from tests.runtime.server.http.test_access import keys_of
from tests.runtime.server.servers import SECONDS, Running, running

_BODY = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
_PAGE = "http://evil.example"
_APP = "https://app.example"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(text_engine()) as server:
        yield server


@pytest.fixture(scope="module")
def open_server() -> Iterator[Running]:
    options = ServerOptions(allowed_origins=(_APP,), allowed_hosts=("llm.example",), drain_seconds=SECONDS)
    with running(text_engine(), options) as server:
        yield server


def ask(server: Running, method: str = "POST", path: str = "/v1/completions", **headers: str) -> httpx2.Response:
    content = _BODY if method == "POST" else None
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.request(method, server.url + path, headers=given, content=content, timeout=SECONDS)


def test_clients_that_are_not_browsers_are_served_as_ever(server: Running) -> None:
    assert ask(server).status_code == 200
    assert ask(server, content_type="application/x-www-form-urlencoded").status_code == 200, "curl -d"
    assert ask(server, content_type="application/json; charset=utf-8").status_code == 200
    with socket.create_connection(("127.0.0.1", server.port), SECONDS) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert connection.recv(100).split()[1] == b"200", "HTTP/1.0 needs no Host"


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "a.localhost:1", "127.0.0.1", "[::1]:8000", "10.1.2.3:8", "box:80"]
)
def test_own_names_and_addresses_are_served(server: Running, host: str) -> None:
    assert ask(server, host=host).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "["]
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/v1/models")])
def test_a_name_that_was_rebound_is_refused(server: Running, host: str, method: str, path: str) -> None:
    refused = ask(server, method, path, host=host)
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "host_not_allowed"
    assert "is not one of this server's names; start it with --allowed-host" in refused.json()["error"]["message"]
    assert refused.headers["x-request-id"]


def test_two_hosts_are_refused(server: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
    connection.putrequest("GET", "/health", skip_host=True)
    connection.putheader("Host", "localhost")
    connection.putheader("Host", "evil.example")
    connection.endheaders()
    assert connection.getresponse().status == 400
    connection.close()


@pytest.mark.parametrize("kind", ["text/plain", "application/json", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("origin", [_PAGE, "null", "http://localhost:3000", "https://localhost", "http://[", ""])
def test_a_page_of_another_origin_is_refused(server: Running, kind: str, origin: str) -> None:
    headers = {"origin": origin} if origin else {"sec_fetch_site": "cross-site"}
    refused = ask(server, content_type=kind, **headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert "access-control-allow-origin" not in refused.headers
    assert refused.headers["connection"] == "close", "the body is not read"
    asked = ask(server, "OPTIONS", access_control_request_method="POST", **headers)
    assert asked.status_code in (403, 405)


def test_a_page_embeds_nothing_and_a_link_is_followed(server: Running) -> None:
    assert ask(server, "GET", "/v1/models", sec_fetch_site="cross-site", sec_fetch_mode="no-cors").status_code == 403
    assert ask(server, "GET", "/v1/models", sec_fetch_site="cross-site", sec_fetch_mode="navigate").status_code == 200
    assert ask(server, "GET", "/v1/models", sec_fetch_site="none", sec_fetch_mode="navigate").status_code == 200


def test_a_page_of_the_same_origin_sends_json(server: Running) -> None:
    own = {"origin": server.url, "host": f"127.0.0.1:{server.port}"}
    assert ask(server, content_type="application/json", **own).status_code == 200
    refused = ask(server, content_type="text/plain", **own)
    assert refused.status_code == 415
    assert "a web page must send application/json" in refused.json()["error"]["message"]


def test_an_allowed_page_may_use_the_server_and_read_its_answers(open_server: Running) -> None:
    preflight = ask(
        open_server,
        "OPTIONS",
        origin=_APP,
        access_control_request_method="POST",
        access_control_request_headers="authorization,x-stainless-os",
    )
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == _APP
    assert preflight.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    for path in ("/v1/completions", "/tokenize"):
        answer = ask(open_server, path=path, origin=_APP, content_type="application/json")
        assert answer.headers["access-control-allow-origin"] == _APP, "errors too"
        assert "retry-after-ms" in answer.headers["access-control-expose-headers"]
    assert ask(open_server, origin=f"{_APP}.evil.example", content_type="application/json").status_code == 403
    assert ask(open_server, origin=_APP, content_type="text/plain").status_code == 415
    assert ask(open_server, host="llm.example:80").status_code == 200
    assert ask(open_server, host="other.example:80").status_code == 403


def test_with_keys_a_page_needs_one_and_any_name_is_served(tmp_path: Path) -> None:
    with running(text_engine(), keys=keys_of(tmp_path, "first-key-1\n")) as server:
        given: dict[str, Any] = {"authorization": "Bearer first-key-1", "content_type": "application/json"}
        assert ask(server, host="llm.example", **given).status_code == 200
        answer = ask(server, origin=_PAGE, **given)
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers, "the page cannot read it"
        assert ask(server, origin=_PAGE).status_code == 401
        asked = ask(server, "OPTIONS", origin=_PAGE, access_control_request_method="POST")
        assert asked.status_code == 403


def test_a_server_that_all_machines_reach_is_called_by_any_name() -> None:
    assert not WebRules(is_local=False).checks_hosts
    assert WebRules(is_local=True).checks_hosts
    assert not WebRules(is_local=True, has_keys=True).checks_hosts
    assert WebRules(hosts=("a.example",), has_keys=True).checks_hosts
    assert WebRules(hosts=("*",)).knows_host("b.example")
    assert WebRules(own_name="Box").knows_host("box:80")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hosts": ("http://a.example",)}, "allowed_hosts has 'http://a.example'; it must be a host's name"),
        ({"hosts": ("a.example:80",)}, "allowed_hosts has 'a.example:80'"),
        ({"hosts": ("",)}, "allowed_hosts has ''"),
        ({"origins": ("app.example",)}, "allowed_origins has 'app.example'; it must be a scheme and a host"),
        ({"origins": ("https://app.example/",)}, "allowed_origins has 'https://app.example/'"),
    ],
)
def test_names_and_origins_are_checked(given: dict[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        WebRules(**given)  # type: ignore[arg-type]
