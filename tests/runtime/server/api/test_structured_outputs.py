"""Structured outputs and tools by OpenAI's client: valid answers, calls in streams, refusals by field."""

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
from ingot.runtime.replies import FORMATS, ReplyParser
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.text.tokenizer import Tokenizer
from tests.data_paths import DEMO_MODEL
from tests.each_case import each_case
from tests.runtime.engines import text_engine
from tests.runtime.server.servers import SECONDS, Running, running
from tests.simulators.fake_executor import FakeExecutor

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}<|im_start|>assistant\n"
    "{% if thinks %}<think>\n{% endif %}{# <tool_call> </think> #}"
)
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}


def engine_of(folder: Path) -> Engine:
    """An engine whose model has no opinion, with a chat template that writes calls as Hermes does."""
    (folder / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer = Tokenizer.load(folder)
    return Engine(FakeExecutor(vocab_size=tokenizer.vocab_size, eos_token_ids=(0,), num_blocks=256), tokenizer)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    options = ServerOptions(stream_seconds=0, drain_seconds=SECONDS)  # each token in an event of its own
    with running(engine_of(tmp_path_factory.mktemp("chat")), options) as started:
        yield started
        started.require_nothing_left()


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made


def ask(client: openai.OpenAI, **request: Any) -> Any:
    body = {"model": "fake", "messages": HELLO, "max_tokens": 300, "seed": 3, **request}
    return client.chat.completions.create(**body)


@each_case("seed", range(4))
def test_an_answer_is_valid_by_its_schema(client: openai.OpenAI, seed: int) -> None:
    answer = ask(client, response_format=FORMAT, seed=seed, n=2, extra_body={"logit_bias": {"222": -100}})
    for choice in answer.choices:
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_completions_take_constraints_in_vllms_form(client: openai.OpenAI) -> None:
    def text(**constraint: Any) -> str:
        extra = {"structured_outputs": constraint}
        return (
            client.completions.create(model="fake", prompt="x", max_tokens=60, seed=1, extra_body=extra).choices[0].text
        )

    assert text(choice=["red", "green"]) in ("red", "green")
    assert text(regex=r"[ab]{3}") in {a + b + c for a in "ab" for b in "ab" for c in "ab"}
    assert text(grammar='start: "x" "y"') == "xy"
    assert text(json={"const": 5}).strip() == "5"


def test_a_required_call_names_a_tool_and_has_its_arguments(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = ask(client, tools=TOOLS, tool_choice=choice, seed=5, parallel_tool_calls=False)
        message = answer.choices[0].message
        if answer.choices[0].finish_reason == "length":
            continue
        assert answer.choices[0].finish_reason == "tool_calls"
        assert message.content is None
        (call,) = message.tool_calls
        assert call.id.startswith("call_")
        schema = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}[call.function.name]
        jsonschema.validate(json.loads(call.function.arguments), schema)
        if choice != "required":
            assert call.function.name == "weather"


def test_allowed_tools_are_the_ones_that_a_reply_may_call(client: openai.OpenAI) -> None:
    def choice(mode: str, *names: str) -> Any:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    called = []
    for seed in range(4):
        body = {"tools": TOOLS, "tool_choice": choice("required", "weather"), "temperature": 0.7}
        required = ask(client, **body, seed=seed, parallel_tool_calls=False).choices[0]
        called += [call.function.name for call in required.message.tool_calls or []]
    assert {*called} == {"weather"}
    counted: dict[str, Any] = {"tools": TOOLS, "max_tokens": 1}
    counts = [ask(client, **counted, tool_choice=each).usage.prompt_tokens for each in (choice("auto", "now"), "auto")]
    assert counts[0] < counts[1], "the chat template writes the allowed tools alone"
    with pytest.raises(openai.BadRequestError, match="unknown tool 'nwo'"):
        ask(client, tools=TOOLS, tool_choice=choice("auto", "nwo"))


@each_case("seed", range(3))
def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, seed: int) -> None:
    request = {"tools": TOOLS, "tool_choice": "required", "seed": seed, "temperature": 0.7}
    whole = ask(client, **request).choices[0]
    content, reasoning, reason = "", "", None
    calls: list[Any] = []
    for chunk in ask(client, **request, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for piece in delta.tool_calls or []:
            if piece.id:
                assert piece.index == len(calls)
                calls.append(piece.function)
            else:
                assert piece.index == len(calls) - 1
                calls[-1].arguments += piece.function.arguments
        reason = chunk.choices[0].finish_reason or reason
    assert (content or None) == (whole.message.content or None)
    assert reasoning == (getattr(whole.message, "reasoning_content", None) or "")
    said = [(call.name, call.arguments) for call in calls]
    assert said == [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []]
    assert reason == whole.finish_reason


@each_case("seed", range(3))
def test_openais_accumulator_reads_the_calls_of_a_stream(client: openai.OpenAI, seed: int) -> None:
    request: dict[str, Any] = {"model": "fake", "messages": HELLO, "max_tokens": 300, "temperature": 0.7, "seed": seed}
    request |= {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False}
    whole = client.chat.completions.create(**request).choices[0].message.tool_calls
    assert whole
    with client.chat.completions.stream(**request) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        try:
            final = stream.get_final_completion().choices[0].message.tool_calls
        except openai.LengthFinishReasonError:
            return
    assert final
    assert [call.function.arguments for call in final] == [call.function.arguments for call in whole]
    assert "".join(piece.arguments_delta for piece in pieces) == final[0].function.arguments
    assert len(pieces) > 1


def test_reasoning_comes_before_a_constrained_answer(client: openai.OpenAI) -> None:
    """The prompt opens it, so the output has its end, and then the answer."""
    extra = {"chat_template_kwargs": {"thinks": True}, "structured_outputs": {"choice": ["yes", "no"]}}
    answer = ask(client, max_tokens=400, extra_body=extra, seed=2).choices[0]
    assert answer.message.reasoning_content
    assert answer.message.content in ("yes", "no", "")


def test_without_a_required_call_the_reply_is_free(client: openai.OpenAI) -> None:
    answer = ask(client, tools=TOOLS, max_tokens=8).choices[0]
    assert answer.message.content
    assert answer.message.tool_calls is None
    assert "weather" not in ask(client, tools=TOOLS, tool_choice="none", max_tokens=4).choices[0].message.content


LIST: Any = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 4, "maxItems": 4}


def test_the_servers_rule_for_white_space_holds_for_schemas_and_calls(client: openai.OpenAI, tmp_path: Path) -> None:
    """Random tokens fill the output with white space where any is allowed."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]

    def finishes(of: openai.OpenAI) -> list[str]:
        body: dict[str, Any] = {"model": "fake", "max_tokens": 60, "seed": 1}
        schema = {"structured_outputs": {"json": LIST}, "logit_bias": {str(token): 20 for token in blanks}}
        text = of.completions.create(prompt="x", **body, extra_body=schema).choices[0].finish_reason
        required = {"tool_choice": "required", "parallel_tool_calls": False, "logit_bias": schema["logit_bias"]}
        chat = of.chat.completions.create(messages=HELLO, tools=tools, **body, **required).choices[0].finish_reason  # type: ignore[call-overload]
        return [text, chat]

    engine = engine_of(tmp_path)
    assert engine.tokenizer
    blanks = engine.tokenizer.encode("\n", add_special_tokens=False)
    assert finishes(client) == ["stop", "tool_calls"]
    options = ServerOptions(json_whitespace="flexible", drain_seconds=SECONDS)
    with running(engine, options) as started, started.client() as flexible:
        assert finishes(flexible) == ["length", "length"]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"extra_body": {"guided_json": SCHEMA}}, "guided_json", 'use structured_outputs={"json": SCHEMA}'),
    ({"extra_body": {"guided_choice": ["a"]}}, "guided_choice", 'use structured_outputs={"choice": '),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format",
        "no json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        "response_format",
        'keywords that are not supported: "not"',
    ),
    ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs", "unclosed group"),
    ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["a"]}}}, "structured_outputs", "give one of them"),
    (
        {"response_format": FORMAT, "extra_body": {"structured_outputs": {"regex": "a"}}},
        "response_format",
        "leave one out",
    ),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "whether"}}}, "tool_choice", "weather"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "used once"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
            "tool_choice": "required",
        },
        "tools",
        "not supported",
    ),
]


@each_case(("given", "param", "message"), REFUSED)
def test_what_cannot_be_served_is_refused_by_its_field(
    client: openai.OpenAI, given: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **given)
    assert refused.value.param == param
    assert message in str(refused.value)


def test_a_required_call_comes_before_a_response_format(client: openai.OpenAI) -> None:
    request = {"tools": TOOLS[1:], "tool_choice": "required", "parallel_tool_calls": False, "reasoning_effort": "none"}
    choice = ask(client, **request, response_format=FORMAT)
    message = choice.choices[0].message
    assert [call.function.name for call in message.tool_calls or ()] == ["now"]


def test_tools_need_a_format_unless_a_call_is_required(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    assert engine.tokenizer is not None
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    plain = Engine(FakeExecutor(vocab_size=4096, eos_token_ids=(0,), num_blocks=256), Tokenizer.load(tmp_path))
    with running(plain) as started, started.client() as client:
        with pytest.raises(openai.BadRequestError, match="use tool_choice") as refused:
            ask(client, tools=TOOLS)
        assert refused.value.param == "tools"
        answer = ask(client, tools=TOOLS[1:], tool_choice="required", parallel_tool_calls=False).choices[0]
        if answer.finish_reason != "length":
            assert answer.message.tool_calls[0].function.name == "now"
    engine.close()


def test_a_checkpoints_own_template_is_used(tmp_path: Path) -> None:
    own = {
        **FORMATS["hermes"].template.source,
        "fields": {"content": {}, "reasoning_content": {"open": "{", "close": "}"}},
    }
    engine_of(tmp_path).close()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"response_template": own}))
    tokenizer = Tokenizer.load(tmp_path)
    engine = Engine(FakeExecutor(vocab_size=4096, eos_token_ids=(0,), num_blocks=256), tokenizer)
    with running(engine) as started, started.client() as client:
        extra = {"structured_outputs": {"grammar": 'start: "{thinking} so"'}}
        message = ask(client, extra_body=extra).choices[0].message
    assert (message.reasoning_content, message.content) == ("thinking", "so")
    assert not ReplyParser(FORMATS["hermes"].template).is_reasoning


def test_a_constraint_that_cannot_be_followed_further_is_the_requests_fault() -> None:
    with running(text_engine()) as started:
        answers = []
        for seed in range(6):
            body = {
                "prompt": "x",
                "max_tokens": 60,
                "seed": seed,
                "structured_outputs": {"regex": r"(\w{1,50}){1,57}x"},
            }
            answers.append(httpx2.post(f"{started.url}/v1/completions", json=body))
        assert {answer.status_code for answer in answers} <= {200, 400}
        errors = [answer.json()["error"] for answer in answers if answer.status_code == 400]
        assert {error["param"] for error in errors} == {"structured_outputs"}
        assert all("make it simpler" in error["message"] for error in errors)
        allowed = {"allowed_token_ids": [3], "structured_outputs": {"choice": ["yes"]}, "prompt": "x"}
        refused = httpx2.post(f"{started.url}/v1/completions", json=allowed)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "allowed_token_ids")
