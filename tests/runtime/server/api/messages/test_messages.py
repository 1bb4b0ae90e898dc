"""Anthropic's Messages API on a server: whole answers, the order of events, errors; its own client reads them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from ingot.runtime.server.http.access import ApiKeys
from ingot.runtime.server.http.rate_limits import Holder, KeyLimits
from ingot.runtime.server.options import ServerOptions
from tests.runtime.engines import chat_engine
from tests.runtime.server.servers import SECONDS, Running, running

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    options = ServerOptions(stream_seconds=0, drain_seconds=SECONDS)
    with running(chat_engine(tmp_path_factory.mktemp("chat")), options) as started:
        yield started
        started.require_nothing_left()


def ask(server: Running, path: str = "", **fields: Any) -> httpx2.Response:
    body = {"model": "fake", "max_tokens": 12, "messages": HELLO, "temperature": 0, **fields}
    return httpx2.post(f"{server.url}/v1/messages{path}", json={k: v for k, v in body.items() if v is not None})


def events(answer: httpx2.Response) -> list[tuple[str, Any]]:
    blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def test_a_message_is_answered(server: Running) -> None:
    answer = ask(server).json()
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "fake")
    (block,) = answer["content"]
    assert block["type"] == "text"
    assert block["text"]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    usage = answer["usage"]
    assert usage["output_tokens"] == 12
    count = ask(server, "/count_tokens", max_tokens=None).json()["input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count


def test_the_events_of_a_stream_are_in_anthropics_order_and_say_the_same(server: Running) -> None:
    whole = ask(server).json()
    found = events(ask(server, stream=True))
    names = [name for name, _ in found]
    assert all(data["type"] == name for name, data in found)
    num_deltas = names.count("content_block_delta")
    assert num_deltas > 1
    first, last = ["message_start", "content_block_start"], ["content_block_stop", "message_delta", "message_stop"]
    assert names == [*first, *["content_block_delta"] * num_deltas, *last]
    assert found[0][1]["message"]["content"] == []
    assert found[1][1]["content_block"] == {"type": "text", "text": ""}
    text = "".join(data["delta"]["text"] for name, data in found if name == "content_block_delta")
    assert [{"type": "text", "text": text}] == whole["content"]
    assert found[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert found[-2][1]["usage"]["output_tokens"] == 12


def test_a_stop_sequence_is_named(server: Running) -> None:
    text = ask(server).json()["content"][0]["text"]
    answer = ask(server, stop_sequences=[text[4:6]]).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", text[4:6])
    assert answer["content"][0]["text"] == text[: text.index(text[4:6])]


def test_errors_are_in_anthropics_form(server: Running) -> None:
    for fields, status, kind in (
        ({"messages": []}, 400, "invalid_request_error"),
        ({"model": "other"}, 404, "not_found_error"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, 400, "invalid_request_error"),
    ):
        for path in ("", "/count_tokens"):
            answer = ask(server, path, **{"max_tokens": None if path else 5, **fields})
            assert (answer.status_code, answer.json()["type"]) == (status, "error")
            assert answer.json()["error"]["type"] == kind


def test_a_key_is_taken_from_the_header_of_anthropics_clients(tmp_path_factory: pytest.TempPathFactory) -> None:
    engine = chat_engine(tmp_path_factory.mktemp("chat"))
    with running(engine, keys=ApiKeys({"secret": Holder("group", KeyLimits())})) as started:
        url, body = f"{started.url}/v1/messages", {"max_tokens": 1, "messages": HELLO}
        assert httpx2.post(url, json=body, headers={"x-api-key": "secret"}).status_code == 200
        refused = httpx2.post(url, json=body, headers={"x-api-key": "wrong"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


def test_anthropics_client_reads_answers_streams_and_errors(server: Running) -> None:
    anthropic: Any = pytest.importorskip("anthropic", reason="the package of the client is not installed")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=SECONDS)
    request: dict[str, Any] = {"model": "fake", "max_tokens": 12, "messages": HELLO, "system": "Be brief."}
    request["extra_body"] = {"temperature": 0}
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
    counted = client.messages.count_tokens(
        **{name: value for name, value in request.items() if name not in ("max_tokens", "temperature")}
    )
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    with pytest.raises(anthropic.NotFoundError, match="The model `nothing` does not exist"):
        client.messages.create(**{**request, "model": "nothing"})
    with pytest.raises(anthropic.BadRequestError, match="This model's maximum context length is"):
        client.messages.create(**{**request, "messages": [{"role": "user", "content": "x" * 100_000}]})
