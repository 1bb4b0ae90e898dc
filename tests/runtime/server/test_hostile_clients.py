"""Clients that send garbage, stop in the middle, or leave: others are served, and nothing is left of them."""

import contextlib
import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ingot.runtime.server.options import ServerOptions
from tests.runtime.engines import text_engine
from tests.runtime.server.servers import SECONDS, Running, running


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS)


def request_of(body: Any, path: str = "/v1/completions") -> bytes:
    text = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text
    )


def require_service(server: Running) -> None:
    """Another client is served."""
    with server.client() as client:
        assert client.completions.create(model="fake", prompt="def read", max_tokens=3).choices[0].text


def read_all(connection: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        while data := connection.recv(65536):
            found += data
    return found


def damaged(request: bytes, rng: random.Random) -> bytes:
    """A request with bytes changed, removed or added, or cut, at random places."""
    found = bytearray(request)
    for _ in range(rng.randint(1, 8)):
        place = rng.randrange(len(found))
        match rng.randrange(4):
            case 0:
                found[place] = rng.randrange(256)
            case 1:
                del found[place : place + rng.randint(1, 9)]
            case 2:
                found[place:place] = rng.randbytes(rng.randint(1, 9))
            case _:
                found[place:place] = rng.choice(
                    [b"\r\n", b"\0", b"chunked", b"[" * 50, b"\xed\xa0\x80", b"1e999", b'"']
                )
    return bytes(found)


def test_damaged_requests_get_an_error_or_an_answer_and_hurt_no_other() -> None:
    rng = random.Random(0)
    body = {"prompt": [1, 2, 3], "max_tokens": 2, "stream": True, "stop": ["x"], "logit_bias": {"5": 1.5}}
    with running(text_engine(), ServerOptions(body_seconds=0.2, drain_seconds=SECONDS)) as server:

        def one(request: bytes) -> bytes:
            with connect(server) as connection:
                connection.settimeout(2)  # what was damaged may keep the connection open
                with contextlib.suppress(ConnectionError):
                    connection.sendall(request)
                return read_all(connection)

        requests = [damaged(request_of(body), rng) for _ in range(300)]
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(one, requests))
        statuses = [int(answer[9:12]) for answer in answers if answer.startswith(b"HTTP/1.1 ")]
        assert len(statuses) > 100
        assert 400 in statuses
        assert 500 not in statuses
        require_service(server)
        server.require_nothing_left()


def test_clients_that_leave_at_any_byte_free_their_blocks() -> None:
    rng = random.Random(1)
    with running(text_engine(num_blocks=64), ServerOptions(max_requests=64, drain_seconds=SECONDS)) as server:

        def leave(seed: int) -> None:
            own = random.Random(seed)
            body = {
                "prompt": [1] * own.randint(1, 40),
                "max_tokens": 200,
                "stream": own.random() < 0.7,
                "ignore_eos": True,
            }
            request = request_of({**body, "n": own.choice([1, 1, 2])})
            with connect(server) as connection:
                connection.sendall(request[: own.choice([len(request), own.randrange(len(request))])])
                connection.settimeout(own.choice([0.001, 0.01, 0.05]))
                with contextlib.suppress(TimeoutError):
                    connection.recv(own.choice([1, 100, 5000]))
                if own.random() < 0.5:  # reset instead of close
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(leave, [rng.randrange(1 << 30) for _ in range(150)]))
        require_service(server)
        server.require_nothing_left()


@pytest.mark.parametrize(
    "sent",
    [b"", b"P", b"POST /v1/completions HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: a"],
)
def test_a_head_that_does_not_arrive_closes_its_connection(sent: bytes) -> None:
    with running(text_engine(), ServerOptions(body_seconds=0.1, drain_seconds=SECONDS)) as server:
        slow = [connect(server) for _ in range(30)]
        for connection in slow:
            connection.sendall(sent)
        require_service(server)
        for connection in slow:
            assert not read_all(connection).startswith(b"HTTP/1.1 200")
            connection.close()
        server.require_nothing_left()


def test_a_slow_head_after_an_answer_closes_its_connection_too() -> None:
    with running(text_engine(), ServerOptions(body_seconds=0.1, drain_seconds=SECONDS)) as server:
        with connect(server) as connection:
            connection.sendall(request_of({"tokens": [5]}, "/detokenize").replace(b"Connection: close\r\n", b""))
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            connection.sendall(b"POST /v1/comp")
            assert b"HTTP/1.1 200" not in read_all(connection)
        require_service(server)


def test_an_endless_head_is_cut_off() -> None:
    with running(text_engine()) as server:
        with connect(server) as connection, pytest.raises(ConnectionError):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
            for number in range(100_000):
                connection.sendall(b"X-%d: %s\r\n" % (number, b"a" * 100))
        require_service(server)
