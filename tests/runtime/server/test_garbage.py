"""Requests leave nothing that waits for a collection: it is rare in a server, and memory would grow for hours."""

import gc

import httpx2
import pytest

from tests.runtime.engines import text_engine
from tests.runtime.server.servers import running

BODY = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}


@pytest.mark.parametrize(
    "body",
    [BODY, {**BODY, "stream": True}, {**BODY, "x": 1}, {**BODY, "prompt": 5}, {**BODY, "model": "other"}],
    ids=["whole", "stream", "unknown field", "wrong type", "no such model"],
)
def test_a_request_leaves_no_cycles(body: dict[str, object]) -> None:
    with running(text_engine()) as server, httpx2.Client() as client:

        def leaves(requests: int) -> int:
            """Objects that a collection finds after so many requests."""
            gc.collect()
            gc.disable()
            try:
                for _ in range(requests):
                    client.post(f"{server.url}/v1/completions", json=body)
                server.until(lambda: server.service.num_open == 0)
                return gc.collect()
            finally:
                gc.enable()

        leaves(4)
        assert leaves(44) - leaves(4) < 40, "less than an object for each request"
