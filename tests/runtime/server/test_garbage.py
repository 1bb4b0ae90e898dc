"""Requests leave nothing that waits for a collection: it is rare in a server, and memory would grow for hours."""

import gc
from pathlib import Path

import httpx2
import pytest

from ingot.runtime import Engine
from tests.runtime.engines import chat_engine, text_engine
from tests.runtime.server.servers import running

BODY = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
RESPONSE = {"input": "a b", "max_output_tokens": 4, "store": False}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", BODY),
        ("completions", {**BODY, "stream": True}),
        ("completions", {**BODY, "x": 1}),
        ("completions", {**BODY, "prompt": 5}),
        ("completions", {**BODY, "model": "other"}),
        ("completions", {**BODY, "structured_outputs": {"regex": "("}}),
        ("completions", {**BODY, "structured_outputs": {"regex": "a+"}}),
        ("completions", {**BODY, "timeout": 1e-6}),
        ("responses", RESPONSE),
        ("responses", {**RESPONSE, "stream": True}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a b"}], "tools": [{}]}),
        ("chat/completions", {"messages": [{"role": "no such role", "content": "a b"}], "max_tokens": 4}),
    ],
)
def test_a_request_leaves_no_cycles(path: str, body: dict[str, object], tmp_path: Path) -> None:
    check_no_cycles(chat_engine(tmp_path), path, body)


def test_a_prompt_that_cannot_be_encoded_leaves_no_cycles() -> None:
    check_no_cycles(text_engine(), "responses", RESPONSE)  # it has no chat template


def check_no_cycles(engine: Engine, path: str, body: dict[str, object]) -> None:
    with running(engine) as server, httpx2.Client() as client:

        def leaves(requests: int) -> int:
            """Objects that a collection finds after so many requests."""
            gc.collect()
            gc.disable()
            try:
                for _ in range(requests):
                    client.post(f"{server.url}/v1/{path}", json=body)
                server.until(lambda: server.service.num_open == 0)
                return gc.collect()
            finally:
                gc.enable()

        leaves(4)
        assert leaves(44) - leaves(4) < 40, "less than an object for each request"
