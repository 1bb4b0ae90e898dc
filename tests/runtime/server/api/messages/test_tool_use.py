"""Tools of Anthropic's Messages API: calls are blocks, in streams too, and their results continue the conversation."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema
import pytest

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

from ingot.runtime.server.options import ServerOptions
from tests.runtime.server.api.messages.test_messages import events
from tests.runtime.server.api.test_structured_outputs import SCHEMA, engine_of
from tests.runtime.server.servers import SECONDS, Running, running

HELLO: dict[str, Any] = {"role": "user", "content": "Hello"}
TOOLS = [{"name": "weather", "input_schema": SCHEMA}]
ANY = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    options = ServerOptions(stream_seconds=0, drain_seconds=SECONDS)
    with running(engine_of(tmp_path_factory.mktemp("chat")), options) as started:
        yield started
        started.require_nothing_left()


def ask(server: Running, **fields: Any) -> httpx2.Response:
    body = {"model": "fake", "max_tokens": 300, "messages": [HELLO], "tools": TOOLS, "tool_choice": ANY, "seed": 5}
    answer = httpx2.post(f"{server.url}/v1/messages", json={**body, **fields}, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_required_call_is_a_block_whose_result_continues_the_conversation(server: Running) -> None:
    answer = ask(server).json()
    assert answer["stop_reason"] == "tool_use"
    use = answer["content"][-1]
    assert (use["type"], use["name"]) == ("tool_use", "weather")
    jsonschema.validate(use["input"], SCHEMA)
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "rain"}
    turns = [HELLO, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    again = ask(server, messages=turns, tool_choice={"type": "none"}, max_tokens=3).json()
    assert again["usage"]["output_tokens"] <= 3


def test_a_call_is_streamed_as_pieces_of_its_input(server: Running) -> None:
    whole = ask(server).json()["content"][-1]
    found = [data for _, data in events(ask(server, stream=True))]
    (start,) = (each for each in found if each.get("content_block", {}).get("type") == "tool_use")
    assert (start["content_block"]["name"], start["content_block"]["input"]) == ("weather", {})
    deltas = [each["delta"] for each in found if each["type"] == "content_block_delta"]
    pieces = "".join(each["partial_json"] for each in deltas if each["type"] == "input_json_delta")
    assert json.loads(pieces) == whole["input"]
    (end,) = (each for each in found if each["type"] == "message_delta")
    assert end["delta"]["stop_reason"] == "tool_use"
    indices = [each["index"] for each in found if each["type"] in ("content_block_start", "content_block_stop")]
    assert indices == sorted(indices), "blocks follow one another"
