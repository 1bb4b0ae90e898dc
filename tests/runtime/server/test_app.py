"""The endpoints that generate nothing, and paths that do not exist."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from ingot.runtime import Engine
from ingot.runtime.server.api.bodies import parse
from ingot.runtime.server.api.request_schemas import DetokenizeRequest
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.text.tokenizer import Tokenizer
from tests.each_case import each_case
from tests.runtime.engines import HELLO, chat_engine, demo_tokenizer
from tests.runtime.server.servers import SECONDS, Running, running
from tests.simulators.fake_executor import FakeExecutor


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(chat_engine(tmp_path_factory.mktemp("chat"))) as started:
        yield started


def post(server: Running, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(server.url + path, json=body)


def test_texts_and_conversations_become_tokens_and_back(server: Running) -> None:
    tokens = demo_tokenizer().encode("def read — 日")
    answer = post(server, "/tokenize", prompt="def read — 日", return_token_strs=True).json()
    assert answer["tokens"] == tokens
    assert (answer["count"], answer["max_model_len"]) == (len(tokens), 512)
    assert len(answer["token_strs"]) == len(tokens)
    assert answer["token_strs"][:2] == ["def", " read"]
    assert post(server, "/detokenize", tokens=tokens).json() == {"prompt": "def read — 日"}
    chat = post(server, "/tokenize", messages=HELLO, model="fake").json()
    assert chat["tokens"] == demo_tokenizer().encode("user: Hello", add_special_tokens=False)


def test_the_tokenizer_is_described_for_those_that_encode_by_it(server: Running) -> None:
    found = httpx2.get(f"{server.url}/tokenizer_info").json()
    assert "messages" in found["chat_template"]
    assert found["max_model_len"] == 512
    assert httpx2.get(f"{server.url}/tokenizer_info?model=fake").json() == found
    refusal = httpx2.get(f"{server.url}/tokenizer_info?model=other")
    assert refusal.status_code == 404
    assert "The model `other` does not exist; models: fake" in refusal.text
    tokenizer = demo_tokenizer()
    with running(Engine(FakeExecutor(vocab_size=tokenizer.vocab_size), tokenizer)) as without_template:
        found = httpx2.get(f"{without_template.url}/tokenizer_info").json()
        end = post(without_template, "/tokenize", prompt=found["eos_token"], add_special_tokens=False).json()
    assert (found["pad_token"], found["chat_template"]) == (None, None)
    assert end["tokens"] == [tokenizer.eos_token_id]


def test_a_chat_is_counted_with_its_tools_and_variables(server: Running) -> None:
    """As the endpoint of chats encodes it."""

    def text(**body: Any) -> str:
        return demo_tokenizer().decode(post(server, "/tokenize", messages=turns, **body).json()["tokens"])

    turns: list[dict[str, str]] = [*HELLO, {"role": "assistant", "content": "Well,"}]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert text() == "user: Helloassistant: Well, >"
    assert text(add_generation_prompt=False) == "user: Helloassistant: Well,"
    assert text(continue_final_message=True) == "user: Helloassistant: Well,"
    assert text(tools=tools) == "weather user: Helloassistant: Well, >"
    body = {"messages": turns, "max_tokens": 1, "tools": tools, "tool_choice": "required"}
    counted = post(server, "/tokenize", messages=turns, tools=tools).json()["count"]
    assert post(server, "/v1/chat/completions", **body).json()["usage"]["prompt_tokens"] == counted


def test_texts_are_encoded_in_the_threads_of_prompts(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread that encodes keeps words of its own, so these threads are few."""
    threads = set[str]()
    encode = Tokenizer.encode

    def noted(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        threads.add(threading.current_thread().name)
        return encode(tokenizer, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    for number in range(6):
        assert post(server, "/tokenize", prompt=f"x{number}").json()["count"] > 0
    assert threads
    assert {name.rpartition("_")[0] for name in threads} == {"ingot-encode"}


@each_case(
    ("path", "body", "status", "message"),
    [
        ("/tokenize", {}, 400, "give prompt or messages, one of them"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, 400, "give prompt or messages"),
        ("/tokenize", {"prompt": "x" * 100_000}, 400, "This model's maximum context length is 512 tokens"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "The model `other` does not exist; models: fake"),
        ("/tokenize", {"text": "x"}, 400, "unknown field 'text'"),
        ("/detokenize", {"tokens": [1, 99999]}, 400, "tokens has 99999; the model's token ids go from 0 to"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens has -1"),
        ("/tokenize", {"messages": HELLO, "continue_final_message": True}, 400, "must be the assistant's"),
        (
            "/tokenize",
            {"messages": HELLO, "tools": [{"type": "x"}]},
            400,
            "tools[0].type is 'x'; it must be",
        ),
        ("/tokenize", {"messages": HELLO, "chat_template_kwargs": {"tools": 1}}, 400, "chat template have 'tools'"),
        ("/detokenize", {}, 400, "tokens is missing"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    server: Running, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    answer = post(server, path, **body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


def test_a_key_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(ApiError, match="the body has a key with half a surrogate pair") as refused:
        parse(DetokenizeRequest, b'{"tokens": [1], "\\ud800": 1}')
    assert refused.value.status == 400


def test_unknown_paths_and_methods_have_errors_of_the_api(server: Running) -> None:
    missing = httpx2.get(f"{server.url}/v1/elsewhere")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    wrong = httpx2.get(f"{server.url}/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["x-request-id"]
    assert wrong.json()["error"]["message"] == "GET /v1/completions: method not allowed. It takes POST."
    lacking = httpx2.post(f"{server.url}/v1/embeddings").json()["error"]["message"]
    assert lacking.startswith("POST /v1/embeddings: not found. Ingot generates text alone; serve a model of another")
    near = httpx2.post(f"{server.url}/v1/chatcompletions").json()["error"]["message"]
    assert near == "POST /v1/chatcompletions: not found. Did you mean '/v1/chat/completions' or '/v1/completions'?"
    assert httpx2.get(f"{server.url}/v1/models/none").status_code == 404


def test_the_version_is_answered(server: Running) -> None:
    assert httpx2.get(f"{server.url}/version").json() == {"version": "1.2.3"}


GREEDY = {"max_tokens": 2, "temperature": 0}
READ_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", **GREEDY},
    "/v1/chat/completions": {"messages": HELLO, **GREEDY},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


@each_case(("path", "body"), READ_BODIES.items())
def test_every_answer_names_the_fields_that_were_left_out(server: Running, path: str, body: dict[str, Any]) -> None:
    assert "x-ingot-ignored-fields" not in post(server, path, **body).headers
    answer = post(server, path, **body, no_stop_trim=False, mine=None)
    assert (answer.status_code, answer.headers["x-ingot-ignored-fields"]) == (200, "no_stop_trim, mine")
    refused = post(server, path, **body, no_stop_trim=False, mine=5)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "mine")
    if "/v1/" in path:
        failed = post(server, path, **body, no_stop_trim=False, top_p=5)
        assert (failed.status_code, failed.headers["x-ingot-ignored-fields"]) == (400, "no_stop_trim")


def test_a_lenient_server_leaves_out_every_unknown_field_and_counts_them(tmp_path: Path) -> None:
    with running(chat_engine(tmp_path), ServerOptions(lenient=True, drain_seconds=SECONDS)) as server:
        for path, body in READ_BODIES.items():
            answer = post(server, path, **body, mine=5, return_hidden_states=True)
            assert answer.status_code == 200
            assert {*answer.headers["x-ingot-ignored-fields"].split(", ")} == {"mine", "return_hidden_states"}
        assert post(server, "/v1/completions", prompt="a", suffix="b").status_code == 400
        metrics = httpx2.get(f"{server.url}/metrics").text
    for field in ("other", "return_hidden_states"):
        assert f'ingot_ignored_fields_total{{field="{field}"}} {len(READ_BODIES):.1f}' in metrics
