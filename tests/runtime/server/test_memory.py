"""A server keeps nothing of a request that has ended, of whatever kind it was and however it ended."""

import contextlib
import gc
import json
import math
import random
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ingot.runtime.server.options import ServerOptions
from tests.runtime.engines import chat_engine
from tests.runtime.server.servers import SECONDS, Running, running

_WARM_UP, _COUNTED = 150, 250  # Python's own event loop keeps up to some 100 timers that were cancelled
_BLOCKS = 4  # of memory, for each request
_STORED = 4
_OPTIONS = ServerOptions(stored_responses=_STORED, max_requests=2, drain_seconds=SECONDS)
_RESET = b"\1\0\0\0\0\0\0\0"  # struct linger: closing sends a reset


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(chat_engine(tmp_path_factory.mktemp("chat")), _OPTIONS) as started:
        model = started.model()
        for token in range(model.tokenizer.vocab_size):  # texts of tokens are kept, as many as there are
            model.token_text(token)
        yield started


class Client:
    """Sends one request after the other, each on a connection of its own."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self._rng = random.Random(0)

    def completion(self) -> None:
        prompt = [self._rng.randrange(1, 250) for _ in range(300)]
        self._answer("/v1/completions", {"prompt": prompt, "max_tokens": 2, "logprobs": 1})

    def stream(self) -> None:
        body = {"prompt": f"import {self._rng.random()}", "max_tokens": 3, "n": 2, "stream": True}
        assert b"[DONE]" in self._answer("/v1/completions", body)

    def chat(self) -> None:
        messages = [{"role": "user", "content": f"number {self._rng.random()}"}]
        self._answer("/v1/chat/completions", {"messages": messages, "max_tokens": 2, "stream": True})

    def response(self) -> None:
        self._answer("/v1/responses", {"input": f"read {self._rng.random()}", "max_output_tokens": 2})

    def cancelled_response(self) -> None:
        body = {"input": "import", "max_output_tokens": 400, "stream": True, "ignore_eos": True}
        with self._sent("/v1/responses", body) as connection:
            begun = b""
            while b"response.created" not in begun or b'"output":' not in begun:
                begun += connection.recv(4096)
            answer_id = begun.partition(b'"id": "')[2].partition(b'"')[0].decode()
            self._answer(f"/v1/responses/{answer_id}/cancel", {}, statuses=(200, 400, 404))
            while connection.recv(65536):
                pass

    def client_that_leaves(self) -> None:
        body = {"prompt": [self._rng.randrange(1, 250)] * 20, "max_tokens": 400, "stream": True, "ignore_eos": True}
        with self._sent("/v1/completions", body) as connection:
            if self._rng.random() < 0.7:
                connection.recv(100)
            if self._rng.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def refused(self) -> None:
        model = self._server.model()
        model.gate.num_open += 2  # as many as are allowed
        try:
            body = {"prompt": [self._rng.randrange(250) for _ in range(20)], "max_tokens": 1}
            self._answer("/v1/completions", body, statuses=(429,))
        finally:
            model.gate.num_open -= 2

    def wrong(self) -> None:
        name = f"field {self._rng.random()}"
        self._answer("/v1/chat/completions", {"messages": [], name: 1}, statuses=(400,))
        self._answer(f"/v1/{self._rng.random()}", {}, statuses=(404,))

    def tokenize(self) -> None:
        self._answer("/tokenize", {"prompt": f"import {self._rng.random()}"})

    @contextlib.contextmanager
    def _sent(self, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
        text = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(text)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self._server.port), timeout=SECONDS) as connection:
            connection.sendall(head.encode() + text)
            yield connection

    def _answer(self, path: str, body: dict[str, Any], statuses: tuple[int, ...] = (200,)) -> bytes:
        with self._sent(path, body) as connection:
            found = b"".join(iter(lambda: connection.recv(65536), b""))
        assert int(found[9:12]) in statuses, found
        return found


def counted(server: Running) -> tuple[int, Counter[type]]:
    """Memory blocks of Python's own allocator, and objects by type, once nothing is open and no place is kept."""
    server.require_nothing_left()
    server.model().gate._appointments.held(math.inf)  # as if the times of all had passed
    gc.collect()
    return sys.getallocatedblocks(), Counter(map(type, gc.get_objects()))


@pytest.mark.parametrize(
    "send",
    [
        Client.completion,
        Client.stream,
        Client.chat,
        Client.response,
        Client.cancelled_response,
        Client.client_that_leaves,
        Client.refused,
        Client.wrong,
        Client.tokenize,
    ],
)
def test_nothing_is_kept_of_a_request(server: Running, send: Callable[[Client], None]) -> None:
    client = Client(server)
    for _ in range(_WARM_UP):
        send(client)
    blocks, objects = counted(server)
    for _ in range(_COUNTED):
        send(client)
    blocks_after, objects_after = counted(server)
    assert {kind: number for kind, number in (objects_after - objects).items() if number >= _COUNTED / 2} == {}
    assert blocks_after - blocks < _BLOCKS * _COUNTED
