"""OpenAI's own client against the server: the engine's answers, streams equal to whole answers, errors by class."""

import asyncio
import codecs
import json
import random
import re
import socket
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from ingot.runtime.asking.outputs import Completion, RequestOutput
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.requests.engine_request import EngineRequest
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.text.tokenizer import Tokenizer
from tests.each_case import each_case
from tests.runtime.engines import HELLO, chat_engine, demo_tokenizer, text_engine
from tests.runtime.server.servers import Running, running
from tests.simulators.fake_executor import FakeExecutor

PROMPT = "def read_file(path):"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    """An engine in the test's thread, that says what the server should."""
    with text_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(text_engine()) as started:
        yield started
        started.require_nothing_left()


@pytest.fixture(scope="module")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(chat_engine(tmp_path_factory.mktemp("chat"))) as started:
        yield started
        started.require_nothing_left()


def joined_stream(client: openai.OpenAI, **request: Any) -> list[dict[str, Any]]:
    """What a stream of completions says of each choice: text, reason, log-probabilities."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    stream = client.completions.create(**request, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        assert usage is None, "the usage is the last"
        usage = chunk.usage
        for choice in chunk.choices:
            found = choices.setdefault(choice.index, {"text": "", "finish_reason": None, "logprobs": None})
            assert found["finish_reason"] is None, "nothing follows the reason"
            found["text"] += choice.text
            found["finish_reason"] = choice.finish_reason
            if choice.logprobs:
                found["logprobs"] = found["logprobs"] or {}
                for name, values in choice.logprobs.model_dump().items():
                    found["logprobs"].setdefault(name, []).extend(values)
    assert usage is not None
    return [choices[index] for index in sorted(choices)] + [usage.model_dump()]


def whole(client: openai.OpenAI, **request: Any) -> list[dict[str, Any]]:
    """The same of an answer that is not streamed."""
    answer = client.completions.create(**request)
    facts = [
        {
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            "logprobs": choice.logprobs.model_dump() if choice.logprobs else None,
        }
        for choice in answer.choices
    ]
    assert answer.usage is not None
    return [*facts, answer.usage.model_dump()]


def random_request(rng: random.Random) -> dict[str, Any]:
    prompts: list[Any] = [PROMPT, [3, 4, 5], ["import os", "x = "], [[7], [8, 9], [10, 11, 12]], "naïve — 日本語"]
    extra = {
        "top_k": rng.choice([0, 5, -1]),
        "min_p": rng.choice([0.0, 0.01]),
        "repetition_penalty": rng.choice([1.0, 1.2]),
        "ignore_eos": rng.random() < 0.3,
        "stop_token_ids": rng.choice([[], [rng.randrange(4096)]]),
    }
    request = {
        "prompt": rng.choice(prompts),
        "max_tokens": rng.choice([1, 2, 30]),
        "temperature": rng.choice([0.0, 0.7, 1.3]),
        "top_p": rng.choice([1.0, 0.8]),
        "seed": rng.randrange(1000),
        "n": rng.choice([1, 1, 3]),
        "stop": rng.choice([None, "e", ["in", "ab"]]),
        "presence_penalty": rng.choice([0.0, 0.5]),
        "frequency_penalty": rng.choice([0.0, 0.3]),
        "logit_bias": rng.choice([{}, {"65": -100, "300": 5}]),
        "logprobs": rng.choice([None, 0, 2]),
    }
    if rng.random() < 0.2:
        request["best_of"] = request["n"] + 1
    return {**{name: value for name, value in request.items() if value is not None}, "extra_body": extra}


def test_a_stream_says_what_the_whole_answer_says(server: Running) -> None:
    rng = random.Random(5)
    with server.client() as client:
        for _ in range(30):
            request = {"model": "fake", **random_request(rng)}
            streamed, answered = joined_stream(client, **request), whole(client, **request)
            for usage in (streamed[-1], answered[-1]):
                del usage["prompt_tokens_details"]  # the second finds the prompt's blocks
            assert streamed == answered, request


def test_events_count_tokens_where_the_client_asks_for_it(server: Running, chat_server: Running) -> None:
    counts: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "extra_body": {"ignore_eos": True},
    }
    with server.client() as client, chat_server.client() as chat_client:
        prompts = [[5] * 20, [6] * 9]
        completion = list(client.completions.create(model="fake", prompt=prompts, max_tokens=30, n=2, **counts))
        messages: Any = HELLO
        chat = list(chat_client.chat.completions.create(model="fake", messages=messages, max_tokens=30, **counts))
    streams: list[tuple[list[Any], int | None, int]] = [(completion, 29, 120), (chat, None, 30)]
    for chunks, num_prompt, num_tokens in streams:
        usages = [chunk.usage for chunk in chunks]
        numbers = [usage.completion_tokens for usage in usages if usage]
        assert len(numbers) == len(chunks) > 1
        assert numbers == sorted(numbers)
        assert numbers[0] > 0
        assert numbers[-2:] == [num_tokens] * 2
        assert {usage.prompt_tokens for usage in usages if usage} == {num_prompt or usages[-1].prompt_tokens}


def test_an_answer_is_that_of_the_engine(server: Running, plain: Engine) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=4, n=2, logprobs=1, stop=["q"], logit_bias={70: 3})
    expected = plain.generate(PROMPT, params)
    with server.client() as client:
        answer = client.completions.create(
            model="fake", prompt=PROMPT, max_tokens=20, temperature=0.9, seed=4, n=2, logprobs=1, stop="q",
            logit_bias={"70": 3},
        )  # fmt: skip
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert [choice.text for choice in answer.choices] == [choice.text for choice in expected.choices]
    assert [choice.finish_reason for choice in answer.choices] == [one.finish_reason for one in expected.choices]
    for choice, one in zip(answer.choices, expected.choices, strict=True):
        assert one.logprobs
        assert choice.logprobs
        assert choice.logprobs.token_logprobs == [token.logprob for token in one.logprobs]
        assert choice.logprobs.text_offset == offsets(server, [token.token_id for token in one.logprobs])
    assert answer.usage
    assert answer.usage.prompt_tokens == expected.prompt_tokens
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in expected.choices)


def offsets(server: Running, token_ids: Sequence[int]) -> list[int]:
    """Where each token's text begins: at its first byte's character, which another token may end."""
    model = server.service.models.find("fake")
    data = [model.token_text(token_id).data for token_id in token_ids]
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in data]
    return [len(decoder.decode(b"".join(data[:number]))) for number, decoder in enumerate(decoders)]


def test_an_empty_prompt_is_refused_in_words_with_echo_and_without(server: Running) -> None:
    bodies: list[dict[str, Any]] = [{"prompt": ""}, {"prompt": ["a", ""], "logprobs": 1}, {"prompt": [[]]}]
    for body in bodies:
        for num_tokens, echo in ((1, True), (1, False), (0, True)):
            asked = {**body, "max_tokens": num_tokens, "echo": echo}
            answer = httpx2.post(f"{server.url}/v1/completions", json=asked)
            assert answer.status_code == 400, answer.text
            assert "the prompt has no tokens" in answer.json()["error"]["message"]


def test_the_reason_of_a_stop_is_what_the_request_asked_for(server: Running) -> None:
    end = 0  # the model's own end token
    cases: list[tuple[dict[str, Any], tuple[str, int | None]]] = [
        ({"allowed_token_ids": [end]}, ("stop", None)),
        ({"allowed_token_ids": [7], "stop_token_ids": [7]}, ("stop", 7)),
        ({"allowed_token_ids": [end], "echo": True, "max_tokens": 0}, ("length", None)),
        ({"allowed_token_ids": [7], "max_tokens": 2}, ("length", None)),
    ]
    for fields, expected in cases:
        for stream in (False, True):
            body = {"prompt": "x", "stream": stream, **fields}
            text = httpx2.post(f"{server.url}/v1/completions", json=body).text
            answer = json.loads(text.split("\n\n")[-3].removeprefix("data: ") if stream else text)
            (choice,) = answer["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == expected


def test_tokens_of_one_character_have_its_offset_and_names_of_their_own(server: Running) -> None:
    text = 'x = "\U0001f600\u00e9"'
    body = {"prompt": text, "echo": True, "max_tokens": 0, "logprobs": 3}
    (choice,) = httpx2.post(f"{server.url}/v1/completions", json=body).json()["choices"]
    found = choice["logprobs"]
    assert choice["text"] == text
    ids = demo_tokenizer().encode(text)
    assert found["text_offset"] == offsets(server, ids)
    assert max(found["text_offset"]) < len(text)
    emoji = [token for token in found["tokens"] if token.startswith("bytes:")]
    assert "".join(emoji) == "bytes:\\xf0bytes:\\x9fbytes:\\x98bytes:\\x80" + "bytes:\\xc3bytes:\\xa9"
    for token, logprob, top in list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True))[
        1:
    ]:
        assert top[token] == logprob
        assert len(top) in (3, 4)
        assert list(top.values())[:3] == sorted(top.values(), reverse=True)[:3]


def test_defaults_are_those_of_openai(server: Running) -> None:
    with server.client() as client:
        options = {"ignore_eos": True}  # which one token in 4,096 is
        answers = [client.completions.create(model="fake", prompt=PROMPT, extra_body=options) for _ in range(3)]
    assert [answer.usage.completion_tokens for answer in answers if answer.usage] == [16, 16, 16]
    assert len({answer.choices[0].text for answer in answers}) > 1, "the temperature is 1"


def test_a_chat_is_rendered_by_the_template_and_streams_as_it_answers(chat_server: Running, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=12, logprobs=2)
    with chat_engine(tmp_path) as plain:
        expected: Completion = plain.generate_chat(HELLO, params, variables={"mood": "merry"})
    request: dict[str, Any] = {
        "model": "fake", "messages": HELLO, "temperature": 0, "max_completion_tokens": 12, "logprobs": True,
        "top_logprobs": 2, "extra_body": {"chat_template_kwargs": {"mood": "merry"}},
    }  # fmt: skip
    with chat_server.client() as client:
        answer = client.chat.completions.create(**request)
        chunks = list(client.chat.completions.create(**request, stream=True))
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == expected.text
    assert choice.finish_reason == expected.finish_reason == "length"
    assert choice.logprobs
    assert expected.logprobs
    entries = choice.logprobs.content or []
    assert [entry.logprob for entry in entries] == [token.logprob for token in expected.logprobs]
    assert [[each.logprob for each in entry.top_logprobs] for entry in entries] == [
        [each.logprob for each in token.top] for token in expected.logprobs
    ]
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode(errors="replace") == expected.text
    deltas = [each for chunk in chunks for each in chunk.choices]
    assert [delta.delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert "".join(delta.delta.content or "" for delta in deltas) == expected.text
    assert [delta.finish_reason for delta in deltas] == [*[None] * (len(deltas) - 1), "length"]
    streamed = [each for delta in deltas if delta.logprobs for each in delta.logprobs.content or []]
    assert streamed == entries


def test_64_async_streams_get_what_each_gets_alone(server: Running, plain: Engine) -> None:
    async def stream(client: openai.AsyncOpenAI, number: int) -> str:
        chunks = await client.completions.create(
            model="fake", prompt=[number, 1, 2], max_tokens=24, temperature=0.8, seed=number, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def all_streams() -> list[str]:
        async with server.async_client() as client:
            return await asyncio.gather(*(stream(client, number) for number in range(64)))

    expected = [
        plain.generate([number, 1, 2], SamplingParams(max_tokens=24, temperature=0.8, seed=number)).text
        for number in range(64)
    ]
    assert asyncio.run(all_streams()) == expected


def test_a_cache_salt_separates_prompts_and_usage_counts_what_was_cached(server: Running) -> None:
    prompt = list(range(100, 180))
    with server.client() as client:

        def cached(**extra: Any) -> int | None:
            answer = client.completions.create(model="fake", prompt=prompt, max_tokens=1, extra_body=extra)
            assert answer.usage
            assert answer.usage.prompt_tokens_details
            return answer.usage.prompt_tokens_details.cached_tokens

        assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="a", priority=-3)] == [0, 79, 0, 79]
        assert cached(prefix_cache=False) == 0


def test_several_models_are_chosen_by_name_and_alias() -> None:
    engines = {"one": text_engine(), "two": text_engine(context_tokens=96)}
    with running(engines, aliases={"gpt": "two"}) as server, server.client() as client:
        assert [model.id for model in client.models.list()] == ["one", "two"]
        found = client.models.retrieve("gpt").model_dump()
        assert (found["id"], found["aliases"], found["max_model_len"]) == ("two", ["gpt"], 96)
        lengths = {}
        for name in ("one", "two", "gpt"):
            extra = {"ignore_eos": True}
            answer = client.completions.create(model=name, prompt=[1] * 6, max_tokens=120, extra_body=extra)
            assert answer.model == name
            assert answer.usage
            lengths[name] = answer.usage.total_tokens
        assert lengths == {"one": 126, "two": 96, "gpt": 96}
        with pytest.raises(openai.NotFoundError, match="The model `thre` does not exist"):
            client.completions.create(model="thre", prompt="x")
        with pytest.raises(openai.BadRequestError, match="model is missing; models: one, two, gpt"):
            client.post("/completions", body={"prompt": "x"}, cast_to=object)


REFUSALS: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"temperature": -1}, 400, "temperature", "temperature is -1.0; it must be a finite number"),
    ({"top_p": 2.5}, 400, "top_p", "above 0 and at most 1"),
    ({"n": 1000}, 400, "n", "from 1 to 128"),
    ({"best_of": 1, "n": 2}, 400, "best_of", "at least n"),
    ({"logit_bias": {"5000": 1}}, 400, "logit_bias", "token ids go from 0 to"),
    ({"logit_bias": {"a": 1}}, 400, "logit_bias", "has the key 'a'; keys are token ids"),
    ({"priority": 2**40}, 400, "priority", "must be a whole number from"),
    ({"timeout_seconds": 0}, 400, "timeout_seconds", "above 0"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "requires stream"),
    ({"stream_options": {"usage": True}}, 400, "stream_options", "stream_options has the unknown field 'usage'"),
    ({"stream": True, "stop": [""]}, 400, "stop", "at least one character"),
    ({"prompt": [-1] * 20}, 400, "prompt", "prompt has -1; the model's token ids go from 0 to"),
    ({"prompt": [[1]] * 2049}, 400, "prompt", "the request has 2049 prompts; it may have 2048"),
    ({"prompt": [[1], [2**70] * 20]}, 400, "prompt", "the model's token ids go from 0 to"),
    ({"suffix": "x"}, 400, "suffix", "suffix is not supported: leave it out"),
    ({"echo": True, "logprobs": 1, "stream": True}, 400, "echo", "leave out echo, logprobs or stream"),
    ({"echo": True, "logprobs": 1000}, 400, "logprobs", "logprobs is 1000"),
    ({"bad_words": ["x"]}, 400, "bad_words", "bad_words is not supported"),
    ({"min_tokens": 20, "max_tokens": 10}, 400, "min_tokens", "min_tokens is 20; it must be at most max_tokens"),
    ({"allowed_token_ids": []}, 400, "allowed_token_ids", "at least one token id"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, 400, "stream_options", "is true; it must"),
    ({"temprature": 1}, 400, "temprature", "unknown field 'temprature'. Did you mean 'temperature'"),
    ({"max_tokens": "5"}, 400, "max_tokens", "max_tokens is '5'; it must be an integer"),
    ({"max_tokens": 0}, 400, "max_tokens", "max_tokens is 0; .* at least 1: leave it out for the default"),
    ({"prompt": {"text": "x"}}, 400, "prompt", "prompt is {\"text\": \"x\"}; it must be a string or a list"),
    ({"prompt": [1, "x"]}, 400, "prompt", r"prompt\[1\] is 'x'; it must be an integer or a list"),
    ({"echo": True, "max_tokens": 0, "min_tokens": 3}, 400, "min_tokens", "at most max_tokens, which is 0"),
    ({"prompt": []}, 400, "prompt", "empty list"),
    ({"prompt": [99999]}, 400, "prompt", "prompt has 99999; the model"),
    ({"prompt": [1] * 600}, 400, "prompt", "This model's maximum context length is 512 tokens, prompt and output"),
    ({"prompt": "x " * 4_000_000}, 413, None, "max_body_bytes is 4000000"),
    ({"stream": True, "prompt": "a" * 3_000_000}, 400, "prompt", "This model's maximum context length is 512"),
]  # fmt: skip


@pytest.fixture(scope="module")
def limited() -> Iterator[Running]:
    with running(text_engine(), ServerOptions(max_body_bytes=4_000_000)) as started:
        yield started
        started.require_nothing_left()


@each_case(("given", "status", "param", "message"), REFUSALS)
def test_a_bad_request_is_refused_by_its_field(
    limited: Running, given: dict[str, Any], status: int, param: str | None, message: str
) -> None:
    with limited.client() as client, pytest.raises(openai.APIStatusError, match=message) as caught:
        client.post("/completions", body={"model": "fake", "prompt": PROMPT, **given}, cast_to=object)
    assert (caught.value.status_code, caught.value.param) == (status, param)
    assert caught.value.type == "invalid_request_error"


def test_an_echoed_prompt_has_the_log_probabilities_of_generation(server: Running) -> None:
    tokenizer = demo_tokenizer()
    options: dict[str, Any] = {"model": "fake", "temperature": 0, "logprobs": 2, "extra_body": {"ignore_eos": True}}
    with server.client() as client:
        plain = client.completions.create(prompt=PROMPT, max_tokens=6, **options).choices[0]
        assert plain.logprobs
        tokens = [*tokenizer.encode(PROMPT), *tokenizer.encode(plain.text, add_special_tokens=False)]
        for prompt in (PROMPT + plain.text, tokens):
            answer = client.completions.create(prompt=prompt, max_tokens=2, echo=True, n=2, **options)
            scored = client.completions.create(prompt=prompt, max_tokens=0, echo=True, **options)
            assert answer.usage
            assert scored.usage
            assert (answer.usage.completion_tokens, scored.usage.completion_tokens) == (4, 0)
            assert scored.choices[0].text == tokenizer.decode(tokens, skip_special_tokens=False)
            both = [each.logprobs for each in answer.choices]
            assert both[0] == both[1]
            found, alone = both[0], scored.choices[0].logprobs
            assert found
            assert alone
            assert answer.choices[0].text.startswith(scored.choices[0].text)
            num_prompt = answer.usage.prompt_tokens
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                of_answer = getattr(found, name)
                assert len(of_answer) == num_prompt + 2
                assert of_answer[:num_prompt] == getattr(alone, name)
            assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
            assert max(found.token_logprobs[1:]) <= 0


def test_an_echo_without_log_probabilities_is_streamed_and_keeps_its_prefix_hits(server: Running) -> None:
    options: dict[str, Any] = {"model": "fake", "prompt": [PROMPT * 9, "import"], "max_tokens": 4, "temperature": 0}
    with server.client() as client:
        plain = client.completions.create(**options)
        whole = client.completions.create(**options, echo=True)
        assert [each.text for each in whole.choices] == [
            prompt + each.text for prompt, each in zip(options["prompt"], plain.choices, strict=True)
        ]
        texts = {0: "", 1: ""}
        for chunk in client.completions.create(**options, echo=True, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert [*texts.values()] == [each.text for each in whole.choices]
        usage = client.completions.create(**options, echo=True).usage
        assert usage
        assert usage.prompt_tokens_details
        assert usage.prompt_tokens_details.cached_tokens


def test_a_streamed_echo_alone_counts_no_tokens(server: Running) -> None:
    counts: Any = {"include_usage": True, "continuous_usage_stats": True}
    request: Any = {"model": "fake", "prompt": PROMPT, "max_tokens": 0, "stream_options": counts}
    with server.client() as client:
        chunks = [*client.completions.create(**request, extra_body={"echo": True}, stream=True)]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == PROMPT
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert len(usages) == len(chunks)
    assert {usage.completion_tokens for usage in usages} == {0}
    assert usages[-1].prompt_tokens > 0


def test_what_a_chat_lacks_is_refused_by_name_unless_it_changes_nothing(chat_server: Running) -> None:
    neutral: dict[str, Any] = {"tools": [], "response_format": {"type": "text"}, "tool_choice": "none"}
    neutral |= {"parallel_tool_calls": True, "store": True, "verbosity": "medium", "service_tier": "flex"}
    refused = {"functions": [{"name": "f"}], "guided_json": {}, "top_logprobs": 2, "verbosity": "terse", "echo": True}
    refused |= {"bad_words": ["x"], "include_stop_str_in_output": True, "service_tier": "best"}
    body = {"messages": HELLO, "max_tokens": 2}
    with chat_server.client() as client:
        client.post("/chat/completions", body={**body, **neutral}, cast_to=object)
        for name, value in refused.items():
            with pytest.raises(openai.BadRequestError, match=name) as caught:
                client.post("/chat/completions", body={**body, name: value}, cast_to=object)
            assert caught.value.param == name
        with pytest.raises(openai.BadRequestError, match="role") as caught:
            client.post("/chat/completions", body={**body, "messages": [{"content": "x"}]}, cast_to=object)
        assert caught.value.param == "messages"


def test_vllms_limits_of_tokens_reach_the_sampler(server: Running) -> None:
    token = demo_tokenizer().encode("def", add_special_tokens=False)[0]
    special, number = next(iter(demo_tokenizer().special_tokens.items()))
    with server.client() as client:

        def text(**extra: Any) -> str:
            body: dict[str, Any] = {"model": "fake", "prompt": PROMPT, "max_tokens": 3}
            return str(client.completions.create(**body, extra_body=extra).choices[0].text)

        assert text(allowed_token_ids=[token]) == "defdefdef"
        assert text(allowed_token_ids=[token], stop_token_ids=[token]) == ""
        assert text(allowed_token_ids=[number], ignore_eos=True) == ""
        assert text(allowed_token_ids=[number], ignore_eos=True, skip_special_tokens=False) == 3 * special
        least = client.completions.create(
            model="fake", prompt=PROMPT, max_tokens=9, extra_body={"min_tokens": 7, "stop_token_ids": [*range(1, 1000)]}
        )
        assert least.usage
        assert least.usage.completion_tokens >= 7


METRICS = {
    *("queue_seconds", "ttft_seconds", "tpot_seconds", "e2e_seconds"),
    *("preemptions", "cached_tokens", "drafted_tokens", "accepted_tokens"),
}


def test_metrics_are_added_on_demand(server: Running) -> None:
    body: dict[str, Any] = {"model": "fake", "prompt": [PROMPT, PROMPT], "max_tokens": 3, "n": 2}
    with server.client() as client:
        assert "metrics" not in client.completions.create(**body).model_dump()
        whole = client.completions.create(**body, extra_body={"include_metrics": True}).model_dump()
        assert {*whole["metrics"]} == METRICS
        assert 0 <= whole["metrics"]["ttft_seconds"] <= whole["metrics"]["e2e_seconds"]
        assert whole["metrics"]["cached_tokens"]["device"] == whole["usage"]["prompt_tokens_details"]["cached_tokens"]
        chunks = [*client.completions.create(**body, stream=True, extra_body={"include_metrics": True})]
        assert {*chunks[-1].model_dump()["metrics"]} == METRICS
        assert chunks[-1].usage
        assert not any("metrics" in chunk.model_dump() for chunk in chunks[:-1])


def test_a_stream_without_obfuscation_is_asked_for_by_name(server: Running) -> None:
    options: Any = {"include_usage": True, "include_obfuscation": False}
    with server.client() as client:
        chunks = client.completions.create(
            model="fake", prompt=PROMPT, max_tokens=2, stream=True, stream_options=options
        )
        assert [*chunks][-1].usage


def test_a_developer_is_the_system_unless_the_template_has_that_role(tmp_path: Path) -> None:
    turns = [{"role": "developer", "content": "Be kind."}, *HELLO]

    def prompt(engine: Engine) -> str:
        with running(engine) as started:
            answer = httpx2.post(f"{started.url}/tokenize", json={"messages": turns}).json()
        return demo_tokenizer().decode(answer["tokens"])

    assert prompt(chat_engine(tmp_path)) == "system: Be kind.user: Hello"
    knowing = "{# developer #}" + (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").write_text(knowing)
    tokenizer = Tokenizer.load(tmp_path)
    assert prompt(Engine(FakeExecutor(vocab_size=tokenizer.vocab_size), tokenizer)) == "developer: Be kind.user: Hello"


def test_a_request_that_takes_too_long_ends_with_its_output_so_far(server: Running) -> None:
    with server.client() as client:
        extra = {"timeout_seconds": 1e-6, "ignore_eos": True}
        answer = client.completions.create(model="fake", prompt=PROMPT, max_tokens=400, extra_body=extra)
        stream = client.completions.create(model="fake", prompt=PROMPT, max_tokens=400, extra_body=extra, stream=True)
        assert [str(chunk.choices[0].finish_reason) for chunk in stream] == ["timeout"]
    assert str(answer.choices[0].finish_reason) == "timeout"


def test_the_servers_time_limit_holds_for_requests_with_a_longer_one() -> None:
    with running(text_engine(), ServerOptions(request_seconds=1e-6)) as server, server.client() as client:
        extra = {"timeout_seconds": 1000, "ignore_eos": True}
        answer = client.completions.create(model="fake", prompt=PROMPT, max_tokens=400, extra_body=extra)
    assert str(answer.choices[0].finish_reason) == "timeout"


def test_the_clients_id_of_a_request_is_sent_back(server: Running) -> None:
    with server.client() as client:
        raw = client.completions.with_raw_response
        given = raw.create(model="fake", prompt="x", max_tokens=1, extra_headers={"X-Request-Id": "abc"})
        made = raw.create(model="fake", prompt="x", max_tokens=1)
    assert given.headers["x-request-id"] == "abc"
    assert made.headers["x-request-id"] == made.parse().id


@each_case("path", ["completions", "chat/completions", "responses"])
def test_a_refused_request_has_an_id_too(server: Running, path: str) -> None:
    for body in (b"{", b'{"max_tokens": 0, "prompt": "x"}', b'{"prompt": "x", "model": "other"}'):
        given = httpx2.post(f"{server.url}/v1/{path}", content=body, headers={"X-Request-Id": "abc"})
        made = httpx2.post(f"{server.url}/v1/{path}", content=body, headers={"X-Request-Id": "a" * 200})
        assert (given.status_code, given.headers["x-request-id"]) == (made.status_code, "abc")
        assert given.status_code in (400, 404)
        assert re.fullmatch(r"req-[0-9a-f]{32}", made.headers["x-request-id"])


@each_case(
    ("given", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 100}, "top_logprobs"),
    ],
)
def test_a_chat_that_is_refused_names_the_clients_field(
    chat_server: Running, given: dict[str, Any], field: str
) -> None:
    refused = httpx2.post(f"{chat_server.url}/v1/chat/completions", json={"messages": HELLO, **given})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, field)
    assert error["message"].startswith(f"{field} is {[*given.values()][-1]}; it must be a whole number")


def test_clients_that_leave_at_any_moment_free_their_blocks() -> None:
    rng = random.Random(7)
    with running(text_engine(num_blocks=200)) as server:
        for number in range(60):
            body = (
                f'{{"prompt": "{PROMPT}", "max_tokens": 450, "ignore_eos": true, "n": {rng.choice([1, 3])},'
                f' "stream": {rng.choice(["true", "false"])}}}'
            ).encode()
            head = HEAD % len(body)
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall((head + body)[: rng.choice([10, len(head), len(head) + 20, 10**6])])
                if number % 3 == 0:
                    connection.settimeout(0.02)
                    with suppress(TimeoutError):
                        connection.recv(rng.choice([1, 100, 5000]))
        server.require_nothing_left()
        assert server.model().engine.is_healthy
        metrics = server.model().engine.metrics()
        assert metrics.finished_by_reason["abort"] > 10
        with server.client() as client:
            assert client.completions.create(model="fake", prompt=PROMPT, max_tokens=3).choices[0].text


def test_a_client_that_accepts_nothing_is_given_up() -> None:
    options = ServerOptions(send_seconds=0.05, drain_seconds=0.1)
    body = b'{"prompt": [5], "max_tokens": 450, "ignore_eos": true, "logprobs": 64, "n": 4, "stream": true}'
    with running(text_engine(), options, send_buffer_bytes=4096) as server:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(HEAD % len(body) + body)
            assert connection.recv(12) == b"HTTP/1.1 200"
            server.until(lambda: server.service.num_slow_clients)
            server.require_nothing_left()
        with server.client() as client:
            assert client.completions.create(model="fake", prompt=PROMPT, max_tokens=3).choices[0].text


def test_a_request_with_many_prompts_does_not_fill_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(text_engine(), ServerOptions(max_requests=8)) as server, server.client() as client:
        engine, opened, most = server.model().engine, 0, 0
        whole_stream = engine.stream_request

        async def counted(*arguments: Any, **options: Any) -> AsyncGenerator[list[RequestOutput], None]:
            nonlocal opened, most
            opened += 1
            most = max(most, opened)
            try:
                async for outputs in whole_stream(*arguments, **options):
                    yield outputs
            finally:
                opened -= 1

        prompts = [[number + 3, 5, 8] for number in range(20)]
        alone = [whole(client, model="fake", prompt=[prompt], max_tokens=6, temperature=0)[0] for prompt in prompts]
        monkeypatch.setattr(engine, "stream_request", counted)
        together = whole(client, model="fake", prompt=prompts, max_tokens=6, temperature=0)[:-1]
        assert [choice["text"] for choice in together] == [choice["text"] for choice in alone]
        assert most == 4  # half of the places
        server.until(lambda: server.model().gate.num_open == 0)


def test_the_options_of_a_request_reach_the_engine(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RequestOptions] = []
    engine = server.model().engine
    whole_stream = engine.stream_request

    def spy(request: EngineRequest, **delivery: Any) -> Any:
        seen.append(request.options)
        return whole_stream(request, **delivery)

    monkeypatch.setattr(engine, "stream_request", spy)
    extra = {"cache_salt": "s", "priority": -2, "prefix_cache": False, "speculate": False, "timeout_seconds": 50}
    with server.client() as client:
        client.completions.create(model="fake", prompt="x", max_tokens=1, user="me", extra_body=extra)
    assert seen == [
        RequestOptions(cache_salt="s", priority=-2, prefix_cache=False, speculate=False, timeout_seconds=50)
    ]
