"""Calls of the clients that send requests themselves: SDKs, and tools on the command line of their libraries."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from expected import (
    CITY,
    EMBEDDINGS_TEXT,
    LIMITED_TEXT,
    LONG_TOKENS,
    MESSAGES,
    PROMPT,
    RESPONSE_FORMAT,
    TOKENS,
    TOO_LONG,
    TOO_LONG_TEXT,
    TOOL,
    UNKNOWN,
    UNKNOWN_TEXT,
    Calls,
    Server,
    cancelled,
    check_city,
    check_usage,
    limited,
    refused,
    require,
)


def _chats(server: Server, create: Callable[..., Any]) -> Calls:
    """Calls of `create`, which completes a chat by the SDK of OpenAI, and takes what differs from PROMPT's."""

    def tools() -> None:
        answer = create(tools=[TOOL], tool_choice="required")
        check_city(answer.choices[0].message.tool_calls[0].function.arguments)

    def leave() -> None:
        with create(stream=True, max_tokens=LONG_TOKENS) as pieces:
            next(iter(pieces))

    return {
        "chat": lambda: require(create().choices[0].message.content),
        "stream": lambda: require(
            "".join(piece.choices[0].delta.content or "" for piece in create(stream=True) if piece.choices)
        ),
        "tools": tools,
        "structured": lambda: check_city(create(response_format=RESPONSE_FORMAT).choices[0].message.content),
        "too long": lambda: refused(
            lambda: create(messages=[{"role": "user", "content": TOO_LONG}]), TOO_LONG_TEXT, "BadRequestError"
        ),
        "cancel": lambda: cancelled(server, leave),
    }


def openai(server: Server) -> Calls:
    """The SDK itself."""
    from openai import OpenAI

    client = OpenAI(base_url=server.base, api_key=server.key, max_retries=0)
    slow = OpenAI(base_url=server.base, api_key=server.limited_key, max_retries=0)
    given: dict[str, Any] = {"model": server.model, "messages": MESSAGES, "max_tokens": TOKENS}

    def create(**more: Any) -> Any:
        return client.chat.completions.create(**{**given, **more})

    def usage() -> None:
        found = create().usage
        check_usage(found.prompt_tokens, found.completion_tokens, found.total_tokens)
        *_, last = create(stream=True, stream_options={"include_usage": True})
        check_usage(last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens)

    return {
        **_chats(server, create),
        "usage": usage,
        "unknown model": lambda: refused(lambda: create(model=UNKNOWN), UNKNOWN_TEXT, "NotFoundError"),
        "rate limit": lambda: limited(lambda: slow.chat.completions.create(**given), "RateLimitError"),
        "embeddings": lambda: refused(
            lambda: client.embeddings.create(model=server.model, input="a"), EMBEDDINGS_TEXT, "NotFoundError"
        ),
        "responses": lambda: require(
            client.responses.create(model=server.model, input=PROMPT, max_output_tokens=TOKENS).output_text
        ),
        "completions": lambda: require(
            client.completions.create(model=server.model, prompt=PROMPT, max_tokens=TOKENS).choices[0].text
        ),
    }


def anthropic(server: Server) -> Calls:
    """The SDK of Anthropic, with the server's /v1/messages."""
    from anthropic import Anthropic

    client = Anthropic(base_url=server.url, api_key=server.key, max_retries=0)
    slow = Anthropic(base_url=server.url, api_key=server.limited_key, max_retries=0)
    given: dict[str, Any] = {"model": server.model, "messages": MESSAGES, "max_tokens": TOKENS}
    given["extra_body"] = {"temperature": 0}  # the newest SDKs take no temperature
    tool = {"name": "add_city", "description": "Add a city.", "input_schema": CITY}

    def stream() -> None:
        with client.messages.stream(**given) as pieces:
            require("".join(pieces.text_stream))

    def tools() -> None:
        answer = client.messages.create(**given, tools=[tool], tool_choice={"type": "any"})
        check_city(next(block.input for block in answer.content if block.type == "tool_use"))

    def usage() -> None:
        found = client.messages.create(**given).usage
        check_usage(found.input_tokens, found.output_tokens)
        with client.messages.stream(**given) as pieces:
            found = pieces.get_final_message().usage
        check_usage(found.input_tokens, found.output_tokens)

    def leave() -> None:
        with client.messages.stream(**{**given, "max_tokens": LONG_TOKENS}) as pieces:
            next(iter(pieces))

    return {
        "chat": lambda: require(client.messages.create(**given).content[0].text),
        "stream": stream,
        "tools": tools,
        "usage": usage,
        "unknown model": lambda: refused(
            lambda: client.messages.create(**{**given, "model": UNKNOWN}), UNKNOWN_TEXT, "NotFoundError"
        ),
        "too long": lambda: refused(
            lambda: client.messages.create(**{**given, "messages": [{"role": "user", "content": TOO_LONG}]}),
            TOO_LONG_TEXT,
            "BadRequestError",
        ),
        "rate limit": lambda: limited(lambda: slow.messages.create(**given), "RateLimitError"),
        "cancel": lambda: cancelled(server, leave),
        "count_tokens": lambda: require(
            client.messages.count_tokens(model=server.model, messages=MESSAGES).input_tokens
        ),
    }


def litellm(server: Server) -> Calls:
    """The SDK, and its bridge from Anthropic's form."""
    import litellm as package

    given: dict[str, Any] = {
        "model": f"openai/{server.model}", "api_base": server.base, "api_key": server.key, "max_tokens": TOKENS,
        "messages": MESSAGES, "num_retries": 0, "max_retries": 0,
    }  # fmt: skip

    def create(**more: Any) -> Any:
        return package.completion(**{**given, **more})

    def tools() -> None:
        answer = create(tools=[TOOL], tool_choice="required")
        check_city(answer.choices[0].message.tool_calls[0].function.arguments)

    def usage() -> None:
        found = create().usage
        check_usage(found.prompt_tokens, found.completion_tokens, found.total_tokens)

    def leave() -> None:
        async def begin() -> None:
            pieces = await package.acompletion(**{**given, "max_tokens": LONG_TOKENS}, stream=True)
            await anext(aiter(pieces))
            await pieces.aclose()

        asyncio.run(begin())

    return {
        "chat": lambda: require(create().choices[0].message.content),
        "stream": lambda: require("".join(piece.choices[0].delta.content or "" for piece in create(stream=True))),
        "tools": tools,
        "structured": lambda: check_city(create(response_format=RESPONSE_FORMAT).choices[0].message.content),
        "usage": usage,
        "unknown model": lambda: refused(lambda: create(model=f"openai/{UNKNOWN}"), UNKNOWN_TEXT, "NotFoundError"),
        "too long": lambda: refused(
            lambda: create(messages=[{"role": "user", "content": TOO_LONG}]),
            TOO_LONG_TEXT,
            "ContextWindowExceededError",
        ),
        "rate limit": lambda: limited(lambda: create(api_key=server.limited_key), "RateLimitError"),
        "embeddings": lambda: refused(
            lambda: package.embedding(
                model=given["model"], input=["a"], api_base=server.base, api_key=server.key, max_retries=0
            ),
            EMBEDDINGS_TEXT,
        ),
        "cancel": lambda: cancelled(server, leave),
        "anthropic": lambda: require(asyncio.run(package.anthropic.messages.acreate(**given))),
    }


def litellm_proxy(server: Server) -> Calls:
    """The proxy before the server, with the SDKs of OpenAI and of Anthropic as its clients."""
    import socket
    import time
    from urllib.request import urlopen

    from openai import OpenAI

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    folder = TemporaryDirectory()
    settings = {"model": f"openai/{server.model}", "api_base": server.base, "api_key": server.key, "max_retries": 0}
    limits = {**settings, "api_key": server.limited_key}
    models = [{"model_name": name, "litellm_params": given} for name, given in (("all", settings), ("slow", limits))]
    config = Path(folder.name, "config.yaml")
    router = {"num_retries": 0, "disable_cooldowns": True}
    config.write_text(json.dumps({"model_list": models, "router_settings": router}), encoding="utf-8")
    tool = str(Path(sys.executable).parent / "litellm")
    command = [tool, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    key = f"sk-{secrets.token_hex(32)}"
    log = Path(folder.name, "log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "LITELLM_MASTER_KEY": key}
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 240
        while True:
            try:
                with urlopen(f"{url}/health/readiness"):
                    break
            except OSError:
                assert process.poll() is None, f"the proxy has ended: {log.read_text()[-300:]}"
                assert time.monotonic() < until, "the proxy does not start"
                time.sleep(0.5)
        client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    except BaseException:
        process.kill()
        raise
    given: dict[str, Any] = {"model": "all", "messages": MESSAGES, "max_tokens": TOKENS}

    def create(**more: Any) -> Any:
        return client.chat.completions.create(**{**given, **more})

    def usage() -> None:
        found = create().usage
        check_usage(found.prompt_tokens, found.completion_tokens, found.total_tokens)

    def messages() -> None:
        import httpx

        answer = httpx.post(f"{url}/v1/messages", json=given, headers={"x-api-key": key}, timeout=60)
        require(answer.json()["content"][0]["text"])

    def stop() -> None:
        process.terminate()
        process.wait(20)
        folder.cleanup()

    return {
        **_chats(server, create),
        "usage": usage,
        "rate limit": lambda: limited(lambda: create(model="slow"), "RateLimitError"),
        "anthropic": messages,
        "": stop,
    }


def llm(server: Server) -> Calls:
    """The package llm, with a model of OpenAI's form. After a 429 it waits as long as the server says: no such call."""
    import llm as package
    from llm.default_plugins.openai_models import Chat

    def model(name: str = server.model, key: str = server.key) -> Any:
        found = Chat("ingot", model_name=name, api_base=server.base, supports_schema=True, supports_tools=True)
        found.key = key
        return found

    def tools() -> None:
        # The package leaves the choice to the model, which may not call.
        tool = package.Tool(
            name="add_city", description="Add a city.", input_schema=CITY, implementation=lambda **_: ""
        )
        require(model().prompt(PROMPT, tools=[tool], max_tokens=TOKENS).text())

    def usage() -> None:
        answer = model().prompt(PROMPT, max_tokens=TOKENS, stream=False)
        answer.text()
        check_usage(answer.input_tokens, answer.output_tokens)

    def leave() -> None:
        pieces = iter(model().prompt(PROMPT, max_tokens=LONG_TOKENS))
        next(pieces)
        pieces.close()

    return {
        "chat": lambda: require(model().prompt(PROMPT, max_tokens=TOKENS, stream=False).text()),
        "stream": lambda: require("".join(model().prompt(PROMPT, max_tokens=TOKENS))),
        "tools": tools,
        "structured": lambda: check_city(model().prompt(PROMPT, schema=CITY, max_tokens=TOKENS, stream=False).text()),
        "usage": usage,
        "unknown model": lambda: refused(lambda: model(UNKNOWN).prompt(PROMPT).text(), UNKNOWN_TEXT),
        "too long": lambda: refused(lambda: model().prompt(TOO_LONG).text(), TOO_LONG_TEXT),
        "cancel": lambda: cancelled(server, leave),
    }


def aider(server: Server) -> Calls:
    """The model class that the tool sends with, and the tool itself, whose own prompt exceeds the demo's context."""
    from aider.models import Model

    def ask(
        name: str = server.model,
        key: str = server.key,
        functions: Any = None,
        messages: Any = MESSAGES,
        *,
        stream: bool = False,
    ) -> Any:
        model = Model(f"openai/{name}")
        model.extra_params = {"api_base": server.base, "api_key": key, "max_tokens": TOKENS, "max_retries": 0}
        return model.send_completion(messages, functions, stream)[1]

    def command_line() -> None:
        command = [sys.executable, "-m", "aider", "--model", f"openai/{UNKNOWN}", "--openai-api-base", server.base]
        command += ["--openai-api-key", server.key, "--no-git", "--no-check-update", "--no-show-model-warnings"]
        command += ["--yes-always", "--analytics-disable", "--map-tokens", "0", "--no-pretty", "--timeout", "20"]
        command += ["--no-show-release-notes", "--message", "hello"]
        with TemporaryDirectory() as folder:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=240, cwd=folder,
                env={**os.environ, "HOME": folder, "TERM": "dumb"},
            )  # fmt: skip
        said = " ".join((done.stdout + done.stderr).split())
        assert UNKNOWN_TEXT in said, said[-300:]

    def stream() -> None:
        require("".join(piece.choices[0].delta.content or "" for piece in ask(stream=True)))

    def tools() -> None:
        calls = ask(functions=[TOOL["function"]]).choices[0].message.tool_calls
        check_city(calls[0].function.arguments)

    def usage() -> None:
        found = ask().usage
        check_usage(found.prompt_tokens, found.completion_tokens, found.total_tokens)

    too_long = [{"role": "user", "content": TOO_LONG}]
    return {
        "chat": lambda: require(ask().choices[0].message.content),
        "stream": stream,
        "tools": tools,
        "usage": usage,
        "unknown model": lambda: refused(lambda: ask(UNKNOWN), UNKNOWN_TEXT, "NotFoundError"),
        "too long": lambda: refused(lambda: ask(messages=too_long), TOO_LONG_TEXT, "ContextWindowExceededError"),
        "rate limit": lambda: limited(lambda: ask(key=server.limited_key), "RateLimitError"),
        "command line": command_line,
    }


def lm_eval(server: Server) -> Calls:
    """Continuations and their log-likelihoods, as tasks ask for them, and chats."""
    os.environ["OPENAI_API_KEY"] = server.key
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    given: dict[str, Any] = {
        "tokenizer_backend": "remote", "auth_token": server.key, "num_concurrent": 1, "max_retries": 1,
    }  # fmt: skip
    api = LocalCompletionsAPI(model=server.model, base_url=f"{server.base}/completions", **given)
    chat = LocalChatCompletion(
        model=server.model, base_url=f"{server.base}/chat/completions", num_concurrent=1, max_retries=1
    )

    def instance(kind: str, *arguments: object) -> list[object]:
        return [Instance(request_type=kind, doc={}, arguments=arguments, idx=0)]

    def message() -> object:
        from lm_eval.models.api_models import JsonChatStr

        asked = JsonChatStr(json.dumps(MESSAGES))
        return require(chat.generate_until(instance("generate_until", asked, {"max_gen_toks": 8, "until": ["\n\n"]})))

    return {
        "chat": message,
        "completions": lambda: require(
            api.generate_until(instance("generate_until", "def f():", {"max_gen_toks": 8, "until": ["\n\n"]}))
        ),
        "loglikelihood": lambda: require(api.loglikelihood(instance("loglikelihood", "def f():", " return"))),
    }


def guidellm(server: Server) -> Calls:
    """A short benchmark, whose requests succeed."""

    def benchmark() -> None:
        tool = str(Path(sys.executable).parent / "guidellm")
        with TemporaryDirectory() as folder:
            command = [tool, "run", "--disable-console", "--profile", "kind=synchronous"]
            command += ["--backend", f"kind=openai_http,target={server.url},model={server.model},api_key={server.key}"]
            command += ["--constraint", "kind=max_requests,count=3"]
            command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
            command += ["--tokenizer", f"kind=hf_auto,model={os.environ['INGOT_TOKENIZER']}"]
            command += ["--output", f"kind=json,path={Path(folder, 'out.json')}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, cwd=folder)
            assert done.returncode == 0, (done.stderr or done.stdout).strip().splitlines()[-1]
            found = json.loads(Path(folder, "out.json").read_text("utf-8"))
        totals = found["benchmarks"][0]["metrics"]["request_totals"]
        assert totals["successful"] >= 1, totals
        assert not totals["errored"], totals

    return {"benchmark": benchmark}


def curl(server: Server) -> Calls:
    """The tool on the command line."""

    def post(path: str, body: object, key: str = server.key, *more: str) -> str:
        done = subprocess.run(
            ["curl", "-sS", "-N", *more, server.base + path, "-H", f"Authorization: Bearer {key}", "-d", "@-"],
            input=json.dumps(body), capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert not done.stderr or more, done.stderr
        return done.stdout

    given: dict[str, Any] = {"model": server.model, "messages": MESSAGES, "max_tokens": TOKENS}

    def chat(**more: Any) -> Any:
        return json.loads(post("/chat/completions", {**given, **more}))

    def says(answer: str, text: str) -> None:
        assert text in answer, answer

    def tools() -> None:
        answer = chat(tools=[TOOL], tool_choice="required")
        check_city(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])

    def rate_limit() -> None:
        answers = [post("/chat/completions", given, server.limited_key) for _ in range(2)]
        says(answers[1], LIMITED_TEXT.partition("|")[0])

    body = {**given, "stream": True, "max_tokens": LONG_TOKENS, "ignore_eos": True}
    return {
        "chat": lambda: require(chat()["choices"][0]["message"]["content"]),
        "stream": lambda: says(post("/chat/completions", {**given, "stream": True}), "data: [DONE]"),
        "tools": tools,
        "structured": lambda: check_city(chat(response_format=RESPONSE_FORMAT)["choices"][0]["message"]["content"]),
        "usage": lambda: check_usage(*map(chat()["usage"].get, ("prompt_tokens", "completion_tokens", "total_tokens"))),
        "unknown model": lambda: says(post("/chat/completions", {**given, "model": UNKNOWN}), UNKNOWN_TEXT),
        "too long": lambda: says(
            post("/chat/completions", {**given, "messages": [{"role": "user", "content": TOO_LONG}]}), TOO_LONG_TEXT
        ),
        "rate limit": rate_limit,
        "embeddings": lambda: says(post("/embeddings", {"model": server.model, "input": "a"}), EMBEDDINGS_TEXT),
        "cancel": lambda: cancelled(server, lambda: post("/chat/completions", body, server.key, "--max-time", "0.1")),
    }


SDK_CLIENTS: dict[str, tuple[str, Callable[[Server], Calls]]] = {
    "openai": ("openai", openai),
    "anthropic": ("anthropic", anthropic),
    "litellm": ("litellm", litellm),
    "litellm-proxy": ("litellm", litellm_proxy),
    "llm": ("llm", llm),
    "aider": ("aider-chat", aider),
    "lm-eval": ("lm-eval", lm_eval),
    "guidellm": ("guidellm", guidellm),
    "curl": ("", curl),
}
