"""Public routers in front of servers: the benchmark in small. `make routers` installs them."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import httpx2
import pytest
from benchmarks.serve.fuzz import logged_server
from benchmarks.serve.routers import ROUTERS, expected_of, measure, router
from benchmarks.serve.soak import with_chat_template

from ingot.runtime.server.http.api_error import ApiError
from tests.conftest import BuildArtifact
from tests.data_paths import ROOT
from tests.runtime.engines import HELLO, chat_engine
from tests.runtime.server.servers import SECONDS, Running, running

ENVIRONMENT = ROOT / ".venv-routers"
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]
GREEDY = {"model": "fake", "temperature": 0}
CHAT = {**GREEDY, "messages": HELLO, "max_tokens": 40}

pytestmark = pytest.mark.skipif(
    not (ENVIRONMENT / "installed").is_file(), reason="public routers are not installed: make routers"
)


def test_a_router_passes_every_request_and_every_answer(build_unmeasured: BuildArtifact, two_layers: Path) -> None:
    artifact = build_unmeasured("int8-cpu", two_layers, "name=demo").path
    with (
        with_chat_template(artifact) as served,
        TemporaryFile("w+") as first,
        TemporaryFile("w+") as second,
        logged_server(served, first) as (url, _),
        logged_server(served, second) as (other, _),
    ):
        expected = asyncio.run(expected_of(url))
        for command in ROUTERS.values():
            with TemporaryFile("w+") as log, router(ENVIRONMENT, command, (url, other), log) as routed:
                found = asyncio.run(measure(routed, expected, 60))
            assert found["right"] == 60, found["faults"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(chat_engine(tmp_path_factory.mktemp("chat"))) as started:
        yield started


@pytest.fixture(scope="module", params=ROUTERS)
def routed(server: Running, request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a router that does not try again by itself."""
    command = (*ROUTERS[request.param], "--disable-retries")
    with TemporaryFile("w+") as log, router(ENVIRONMENT, command, (server.url,), log) as url:
        yield url


def test_calls_and_responses_pass_a_router(server: Running, routed: str) -> None:
    call = {**CHAT, "tools": TOOLS, "tool_choice": "required"}
    found = [httpx2.post(f"{url}/v1/chat/completions", json=call, timeout=SECONDS) for url in (server.url, routed)]
    choices = [answer.json()["choices"][0] for answer in found]
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls_of(choices[1])] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in calls_of(choices[0])
    ]
    assert choices[0]["finish_reason"] == choices[1]["finish_reason"]
    asked = {**GREEDY, "input": "Hello", "max_output_tokens": 8}
    outputs = [httpx2.post(f"{url}/v1/responses", json=asked, timeout=SECONDS).json() for url in (server.url, routed)]
    assert outputs[0]["output"][0]["content"] == outputs[1]["output"][0]["content"]


def calls_of(choice: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = choice["message"]["tool_calls"]
    return found


def test_errors_pass_a_router_with_their_status_and_headers(
    server: Running, routed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {**GREEDY, "prompt": "a", "logit_bias": {"x": 1}}
    refused = httpx2.post(f"{routed}/v1/completions", json=wrong, timeout=SECONDS)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logit_bias")

    def refuse(*args: object) -> None:
        raise ApiError(429, "too much work", code="overloaded", retry_after_seconds=7.0)

    monkeypatch.setattr(server.service.models, "require_place", refuse)
    full = httpx2.post(f"{routed}/v1/completions", json={**GREEDY, "prompt": "a", "stream": True}, timeout=SECONDS)
    assert (full.status_code, full.json()["error"]["code"]) == (429, "overloaded")
    assert (full.headers["retry-after"], full.headers["retry-after-ms"]) == ("7", "7000")


def test_a_client_that_leaves_a_router_ends_its_request(server: Running, routed: str) -> None:
    aborted = server.model().engine.metrics().finished_by_reason.get("abort", 0)
    long = {**GREEDY, "prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 8}
    with httpx2.stream("POST", f"{routed}/v1/completions", json=long, timeout=SECONDS) as answer:
        assert json.loads(next(answer.iter_lines()).removeprefix("data: "))["object"] == "text_completion"
    server.until(lambda: server.model().engine.metrics().finished_by_reason.get("abort", 0) > aborted)
    server.require_nothing_left()
