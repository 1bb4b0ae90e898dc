"""/v1/responses by OpenAI's client: whole answers, typed events, conversations by items and by id, refusals by name."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import openai
import pytest

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

from ingot.runtime.engine.engine import Engine
from ingot.runtime.server.api.responses.items import messages_of, messages_of_output, with_instructions
from ingot.runtime.server.api.responses.schemas import ResponseRequest
from ingot.runtime.server.http.access import ApiKeys
from ingot.runtime.server.http.rate_limits import Holder, KeyLimits
from ingot.runtime.server.options import ServerOptions
from tests.each_case import each_case
from tests.runtime.engines import chat_engine, chat_tokenizer
from tests.runtime.hosting.test_async_engine import GatedExecutor
from tests.runtime.server.api.test_structured_outputs import SCHEMA, engine_of
from tests.runtime.server.servers import SECONDS, Running, running

TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True},
    {"type": "function", "name": "now", "parameters": {"type": "object", "additionalProperties": False}},
]
FORMAT: Any = {"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA, "strict": True}}
AT_ONCE = {"stop_token_ids": [5], "allowed_token_ids": [5]}  # the reply ends before it has a text
THINKS = {"chat_template_kwargs": {"thinks": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(engine_of(tmp_path_factory.mktemp("chat"))) as started:
        yield started
        started.require_nothing_left()


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made


def gated_chat(folder: Path) -> tuple[Engine, GatedExecutor]:
    """An engine for conversations whose steps wait while its gate is closed."""
    tokenizer = chat_tokenizer(folder)
    executor = GatedExecutor(vocab_size=tokenizer.vocab_size, num_blocks=500)
    return Engine(executor, tokenizer), executor


def ask(client: openai.OpenAI, seed: int = 3, **request: Any) -> Any:
    extra = {"seed": seed, **request.pop("extra_body", {})}
    body = {"model": "fake", "input": "Hello", "max_output_tokens": 40, "extra_body": extra, **request}
    return client.responses.create(**body)


def said(response: Any) -> Any:
    """What a response says, without ids and times."""
    found = response.model_dump()
    for item in found["output"]:
        del item["id"]
        item.pop("call_id", None)
    dropped = ("id", "created_at", "completed_at", "usage")
    return {name: value for name, value in found.items() if name not in dropped}


def test_a_text_is_answered(client: openai.OpenAI) -> None:
    answer = ask(client, instructions="Be short.", metadata={"a": "b"}, temperature=0.5)
    assert answer.object == "response"
    assert answer.output_text
    assert (answer.output[0].type, answer.output[0].role) == ("message", "assistant")
    assert answer.status == "incomplete"
    assert answer.output[0].status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.metadata, answer.instructions, answer.temperature) == ({"a": "b"}, "Be short.", 0.5)
    assert answer.usage.output_tokens == 40
    assert answer.usage.total_tokens == answer.usage.input_tokens + 40


@each_case("seed", range(3))
@each_case(
    "request_fields",
    [
        {},
        {"extra_body": AT_ONCE},
        {"text": FORMAT, "max_output_tokens": 300},
        {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 400},
        {"extra_body": THINKS, "text": {"format": {"type": "json_object"}}, "max_output_tokens": 300},
    ],
)
def test_a_stream_builds_the_response_that_is_answered_whole(
    client: openai.OpenAI, seed: int, request_fields: dict[str, Any]
) -> None:
    whole = ask(client, seed, **request_fields)
    events = list(ask(client, seed, stream=True, **request_fields))
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    assert said(events[-1].response) == said(whole)
    items: list[Any] = []
    for event in events:
        match event.type:
            case "response.output_item.added":
                assert event.output_index == len(items)
                items.append({"text": "", "arguments": ""})
            case "response.output_text.delta" | "response.reasoning_text.delta":
                items[-1]["text"] += event.delta
            case "response.function_call_arguments.delta":
                items[-1]["arguments"] += event.delta
            case "response.output_item.done":
                item = event.item
                items[-1]["done"] = item
                if item.type == "function_call":
                    assert item.arguments == items[-1]["arguments"]
                else:
                    assert item.content[0].text == items[-1]["text"]
    assert [item["done"] for item in items] == events[-1].response.output


def test_a_reply_without_text_is_a_turn_of_the_conversation(client: openai.OpenAI) -> None:
    answer = ask(client, extra_body=AT_ONCE)
    ((part,),) = (item.content for item in answer.output)
    assert (answer.status, part.type, part.text) == ("completed", "output_text", "")
    after = ask(client, input="Two", previous_response_id=answer.id, max_output_tokens=5)
    assistant = {"role": "assistant", "content": ""}
    turns: list[Any] = [{"role": "user", "content": "Hello"}, assistant, {"role": "user", "content": "Two"}]
    assert after.usage.input_tokens == ask(client, input=turns, max_output_tokens=5).usage.input_tokens
    assert after.usage.input_tokens > ask(client, input=[turns[0], turns[2]], max_output_tokens=5).usage.input_tokens


def test_a_json_answer_is_valid_and_a_required_call_has_its_arguments(client: openai.OpenAI) -> None:
    answer = ask(client, text=FORMAT, max_output_tokens=400, extra_body={"logit_bias": {"222": -100}})
    if answer.status == "completed":
        jsonschema.validate(json.loads(answer.output_text), SCHEMA)
    choice: Any = {"type": "function", "name": "weather"}
    answer = ask(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_output_tokens=400)
    (call,) = answer.output
    assert (call.type, call.name) == ("function_call", "weather")
    if answer.status == "completed":
        jsonschema.validate(json.loads(call.arguments), SCHEMA)


def test_openais_streaming_helpers_follow_the_events(server: Running, client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "fake",
        "input": "Hello",
        "extra_body": {"seed": 5, "stop_token_ids": [*range(9)]},
    }
    request |= {"tools": TOOLS[1:], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 400}
    with client.responses.stream(**request) as stream:
        for event in stream:
            if event.type == "response.function_call_arguments.delta":
                assert event.snapshot.endswith(event.delta)
    whole = client.responses.create(**request)
    if whole.status == "completed":
        assert said(stream.get_final_response())["output"][0]["arguments"] == said(whole)["output"][0]["arguments"]

    async def stream_async() -> list[str]:
        async with server.async_client() as made, made.responses.stream(**request) as events:
            return [event.type async for event in events]

    assert asyncio.run(stream_async())[-1] == f"response.{whole.status}"


def test_a_conversation_goes_on_by_id_as_by_items(client: openai.OpenAI) -> None:
    first = ask(client, input="One", max_output_tokens=5)
    second = ask(client, input="Two", previous_response_id=first.id, max_output_tokens=5)
    said_before = [{"role": "user", "content": "One"}, *[item.model_dump() for item in first.output]]
    by_items = ask(client, input=[*said_before, {"role": "user", "content": "Two"}], max_output_tokens=5)
    assert second.output_text == by_items.output_text
    assert second.usage.input_tokens == by_items.usage.input_tokens
    assert second.previous_response_id == first.id
    third = ask(client, input="Three", previous_response_id=second.id, max_output_tokens=5)
    assert third.usage.input_tokens > second.usage.input_tokens


def test_kept_responses_are_read_and_deleted(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert client.responses.retrieve(answer.id) == answer
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError, match="is not kept"):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, previous_response_id=answer.id)
    assert refused.value.code == "previous_response_not_found"
    unkept = ask(client, store=False)
    assert not unkept.model_dump()["store"]
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(unkept.id)
    kept = ask(client)
    with pytest.raises(openai.BadRequestError, match="only one that is being streamed can be cancelled"):
        client.responses.cancel(kept.id)
    with pytest.raises(openai.BadRequestError, match="stream is not supported"):
        client.responses.retrieve(kept.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="include is not supported"):
        client.responses.retrieve(kept.id, include=["message.output_text.logprobs"])


def test_the_store_is_bounded_and_of_one_key(tmp_path: Path) -> None:
    keys = ApiKeys({key: Holder(key, KeyLimits()) for key in ("first-key", "other-key")})
    options = ServerOptions(stored_responses=2, drain_seconds=SECONDS)
    with running(chat_engine(tmp_path), options, keys=keys) as server:
        with server.client("first-key") as client, server.client("other-key") as other:
            made = [client.responses.create(model="fake", input="x", max_output_tokens=1) for _ in range(3)]
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(made[0].id)
            assert client.responses.retrieve(made[2].id).id == made[2].id
            with pytest.raises(openai.NotFoundError):
                other.responses.retrieve(made[2].id)


def test_a_server_that_keeps_nothing_says_so(tmp_path: Path) -> None:
    options = ServerOptions(stored_responses=0, drain_seconds=SECONDS)
    with running(chat_engine(tmp_path), options) as server, server.client() as client:
        answer = client.responses.create(model="fake", input="x", max_output_tokens=1)
        assert not answer.model_dump()["store"]
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="fake", input="x", store=True)
        assert refused.value.param == "store"
        with pytest.raises(openai.BadRequestError, match="the server keeps no responses"):
            client.responses.create(model="fake", input="x", previous_response_id=answer.id)


def test_a_stream_is_cancelled_by_id_and_keeps_what_it_had(tmp_path: Path) -> None:
    engine, executor = gated_chat(tmp_path)
    with running(engine) as server, server.client() as client:
        stream = client.responses.create(
            model="fake", input="x", max_output_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        events = iter(stream)
        first = next(events)
        assert first.type == "response.created"
        executor.gate.clear()
        assert client.responses.retrieve(first.response.id).status == "in_progress"
        assert client.responses.cancel(first.response.id).status == "cancelled"
        executor.gate.set()
        following = [*events]
        last = following[-1]
        assert last.type == "response.failed"
        assert last.response.status == "cancelled"
        assert [each.type for each in following[-4:-1]] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
        ]
        assert [item.model_dump()["status"] for item in last.response.output] == ["incomplete"]
        assert last.response.usage
        assert last.response.usage.output_tokens > 0
        kept = client.responses.retrieve(first.response.id)
        assert kept.status == "cancelled"
        assert [item.model_dump()["status"] for item in kept.output] == ["incomplete"]
        assert kept.usage == last.response.usage
        with pytest.raises(openai.BadRequestError, match="whose status is cancelled"):
            client.responses.create(model="fake", input="y", previous_response_id=kept.id)
        server.require_nothing_left()


def test_the_input_of_a_response_is_listed_in_pages(server: Running, client: openai.OpenAI) -> None:
    turns: list[Any] = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"id": "msg_mine", "role": "user", "content": [{"type": "input_text", "text": "Three"}]},
        CALL,
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
    ]
    name = ask(client, input=turns, max_output_tokens=1).id
    found = [*client.responses.input_items.list(name, order="asc")]
    assert [item.type for item in found] == ["message"] * 3 + ["function_call", "function_call_output"]
    texts = [item.content[0].text for item in found[:3]]
    assert texts == ["One", "Two", "Three"]
    assert found[2].id == "msg_mine"
    page = client.responses.input_items.list(name, limit=2)
    assert [item.id for item in page.data] == [item.id for item in found[:-3:-1]]
    assert page.has_more
    rest = client.responses.input_items.list(name, after=page.data[-1].id)
    assert [item.id for item in rest.data] == [item.id for item in found[2::-1]]
    url = f"{server.url}/v1/responses/{name}/input_items"
    for query in ("limit=0", "limit=x", "order=up", "after=msg_none", "include=x"):
        answer = httpx2.get(f"{url}?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])
    assert httpx2.get(url.replace(name, "resp_none")).status_code == 404


def test_metrics_are_added_on_demand(client: openai.OpenAI) -> None:
    whole = ask(client, extra_body={"include_metrics": True}).model_dump()
    assert whole["metrics"]["e2e_seconds"] >= whole["metrics"]["ttft_seconds"]
    last = [*ask(client, stream=True, extra_body={"include_metrics": True})][-1]
    assert {*last.response.model_dump()["metrics"]} == {*whole["metrics"]}


def test_allowed_tools_are_the_ones_that_a_response_may_call(client: openai.OpenAI) -> None:
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    body = {
        "tools": TOOLS,
        "tool_choice": choice,
        "max_output_tokens": 400,
        "temperature": 0.7,
        "parallel_tool_calls": False,
    }
    answers = [ask(client, seed, **body) for seed in range(4)]
    called = [item.name for answer in answers for item in answer.output if item.type == "function_call"]
    assert {*called} == {"weather"}
    assert answers[0].tool_choice.model_dump() == choice


CALL = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"background": True}, "background", "background is not supported"),
    ({"reasoning": {"effort": "high"}}, "reasoning", "reasoning is not supported"),
    ({"truncation": "always"}, "truncation", "truncation is not supported"),
    ({"conversation": "c"}, "conversation", "conversation is not supported"),
    ({"include": ["message.output_text.logprobs"]}, "include", "include is not supported"),
    ({"input": []}, "input", "empty list"),
    ({"input": [{"type": "function_call_output", "call_id": "c2", "output": "x"}]}, "input", "the call 'c2'"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0; it must be"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "has no schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text", '"not"'),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "whether"}}, "tool_choice", "weather"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "input_image"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
    ({"tools": [{"type": "web_search"}]}, "tools", "function"),
    ({"metadata": {"a": "b" * 513}}, "metadata", "512"),
    ({"max_tokens": 3}, "max_tokens", "unknown field"),
]


@each_case(("given", "param", "message"), REFUSED)
def test_what_cannot_be_served_is_refused_by_its_field(
    server: Running, given: dict[str, Any], param: str, message: str
) -> None:
    answer = httpx2.post(f"{server.url}/v1/responses", json={"input": "x", **given})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def items(*given: Any) -> Any:
    return ResponseRequest.model_validate({"input": list(given)}).input


def test_items_become_messages_of_the_chat_template() -> None:
    given = items(
        {"role": "developer", "content": "Rules."},
        {"role": "user", "content": [{"type": "input_text", "text": "Time"}, {"type": "input_text", "text": "?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}], "id": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        CALL,
        {**CALL, "call_id": "c2", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "one"}]},
    )  # fmt: skip
    calls = [{"type": "function", "id": name, "function": {"name": "now", "arguments": "{}"}} for name in ("c1", "c2")]
    found = messages_of(given)
    assert with_instructions(found, "Be kind.") == [
        {"role": "system", "content": "Be kind.\n\nRules."},
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "tool", "tool_call_id": "c2", "content": "one"},
    ]
    assert messages_of_output([CALL], found[:2])[-1]["content"] is None
