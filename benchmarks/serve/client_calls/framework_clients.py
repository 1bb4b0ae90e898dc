"""Calls of the frameworks for agents and programs, each of which has a client library below it."""

import asyncio
from collections.abc import Callable
from typing import Any

from expected import (
    CITY,
    EMBEDDINGS_TEXT,
    LONG_TOKENS,
    MESSAGES,
    PROMPT,
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
    city_model,
    limited,
    refused,
    require,
)


def langchain(server: Server) -> Calls:
    """langchain-openai."""
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    def model(name: str = server.model, key: str = server.key, **more: Any) -> Any:
        return ChatOpenAI(
            model=name, base_url=server.base, api_key=key, max_retries=0, **{"max_tokens": TOKENS, **more}
        )

    def tools() -> None:
        check_city(model().bind_tools([TOOL], tool_choice="required").invoke(PROMPT).tool_calls[0]["args"])

    def usage() -> None:
        found = model().invoke(PROMPT).usage_metadata
        check_usage(found["input_tokens"], found["output_tokens"], found["total_tokens"])
        *_, last = (piece for piece in model(stream_usage=True).stream(PROMPT) if piece.usage_metadata)
        check_usage(last.usage_metadata["input_tokens"], last.usage_metadata["output_tokens"])

    def leave() -> None:
        pieces = model(max_tokens=LONG_TOKENS).stream(PROMPT)
        next(pieces)
        pieces.close()

    embeddings = OpenAIEmbeddings(
        model=server.model, base_url=server.base, api_key=server.key, check_embedding_ctx_length=False, max_retries=0
    )
    city = city_model()
    return {
        "chat": lambda: require(model().invoke(PROMPT).content),
        "stream": lambda: require("".join(str(piece.content) for piece in model().stream(PROMPT))),
        "tools": tools,
        "structured": lambda: check_city(model().with_structured_output(city, method="json_schema").invoke(PROMPT)),
        "usage": usage,
        "unknown model": lambda: refused(lambda: model(UNKNOWN).invoke(PROMPT), UNKNOWN_TEXT),
        "too long": lambda: refused(lambda: model().invoke(TOO_LONG), TOO_LONG_TEXT, "ContextOverflowError"),
        "rate limit": lambda: limited(lambda: model(key=server.limited_key).invoke(PROMPT), "RateLimitError"),
        "embeddings": lambda: refused(lambda: embeddings.embed_query("a"), EMBEDDINGS_TEXT),
        "cancel": lambda: cancelled(server, leave),
        "responses": lambda: require(model(use_responses_api=True).invoke(PROMPT).content),
    }


def langchain_anthropic(server: Server) -> Calls:
    """langchain-anthropic, with the server's /v1/messages."""
    from langchain_anthropic import ChatAnthropic

    def model(name: str = server.model, key: str = server.key, max_tokens: int = TOKENS) -> Any:
        return ChatAnthropic(model=name, base_url=server.url, api_key=key, max_retries=0, max_tokens=max_tokens)

    def usage() -> None:
        found = model().invoke(PROMPT).usage_metadata
        check_usage(found["input_tokens"], found["output_tokens"], found["total_tokens"])

    def leave() -> None:
        pieces = model(max_tokens=LONG_TOKENS).stream(PROMPT)
        next(pieces)
        next(pieces)
        pieces.close()

    city = city_model()
    return {
        "chat": lambda: require(model().invoke(PROMPT).content),
        "stream": lambda: require("".join(str(piece.content) for piece in model().stream(PROMPT))),
        "tools": lambda: check_city(model().bind_tools([TOOL], tool_choice="any").invoke(PROMPT).tool_calls[0]["args"]),
        "structured": lambda: check_city(model().with_structured_output(city).invoke(PROMPT)),
        "usage": usage,
        "unknown model": lambda: refused(lambda: model(UNKNOWN).invoke(PROMPT), UNKNOWN_TEXT),
        "too long": lambda: refused(lambda: model().invoke(TOO_LONG), TOO_LONG_TEXT),
        "rate limit": lambda: limited(lambda: model(key=server.limited_key).invoke(PROMPT), "RateLimitError"),
        "cancel": lambda: cancelled(server, leave),
    }


def llama_index(server: Server) -> Calls:
    """llama-index-llms-openai-like, and its embeddings."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import FunctionTool
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.llms.openai_like import OpenAILike

    def model(name: str = server.model, key: str = server.key, *, is_chat: bool = True, **more: Any) -> Any:
        return OpenAILike(
            model=name, api_base=server.base, api_key=key, is_chat_model=is_chat, max_retries=0,
            is_function_calling_model=True, **{"max_tokens": TOKENS, **more},
        )  # fmt: skip

    messages = [ChatMessage(role="user", content=PROMPT)]
    city = city_model()

    def tools() -> None:
        tool = FunctionTool.from_defaults(fn=lambda name, size: name, name="add_city", fn_schema=city)
        answer = model().chat_with_tools([tool], user_msg=PROMPT, tool_required=True)
        check_city(model().get_tool_calls_from_response(answer)[0].tool_kwargs)

    def structured() -> None:
        limits = model(should_use_structured_outputs=True)
        check_city(limits.structured_predict(city, PromptTemplate("{text}"), text=PROMPT))

    def usage() -> None:
        found = model().chat(messages).raw.usage
        check_usage(found.prompt_tokens, found.completion_tokens, found.total_tokens)

    def leave() -> None:
        pieces = model(max_tokens=LONG_TOKENS).stream_chat(messages)
        next(pieces)
        pieces.close()

    embedding = OpenAILikeEmbedding(model_name=server.model, api_base=server.base, api_key=server.key, max_retries=0)
    return {
        "chat": lambda: require(model().chat(messages).message.content),
        "stream": lambda: require("".join(piece.delta or "" for piece in model().stream_chat(messages))),
        "tools": tools,
        "structured": structured,
        "usage": usage,
        "unknown model": lambda: refused(lambda: model(UNKNOWN).chat(messages), UNKNOWN_TEXT),
        "too long": lambda: refused(lambda: model().chat([ChatMessage(role="user", content=TOO_LONG)]), TOO_LONG_TEXT),
        "rate limit": lambda: limited(lambda: model(key=server.limited_key).chat(messages), "RateLimitError"),
        "embeddings": lambda: refused(lambda: embedding.get_text_embedding("a"), EMBEDDINGS_TEXT),
        "cancel": lambda: cancelled(server, leave),
        "completions": lambda: require(model(is_chat=False).complete(PROMPT).text),
    }


def instructor(server: Server) -> Calls:
    """Modes TOOLS, JSON_SCHEMA, RESPONSES_TOOLS and ANTHROPIC_TOOLS."""
    import instructor as package
    from anthropic import Anthropic
    from openai import OpenAI

    city = city_model()

    def ask(mode: str, limit: str = "max_tokens", **more: Any) -> Any:
        client = package.from_openai(
            OpenAI(base_url=server.base, api_key=more.pop("key", server.key), max_retries=0),
            mode=getattr(package.Mode, mode),
        )
        given = {"model": server.model, "messages": MESSAGES, "response_model": city, "max_retries": 0, limit: TOKENS}
        return client.chat.completions.create(**{**given, **more})

    def messages() -> None:
        client = package.from_anthropic(
            Anthropic(base_url=server.url, api_key=server.key, max_retries=0), mode=package.Mode.ANTHROPIC_TOOLS
        )
        check_city(
            client.messages.create(
                model=server.model, messages=MESSAGES, response_model=city, max_retries=0, max_tokens=TOKENS
            )
        )

    def stream() -> None:
        client = package.from_openai(OpenAI(base_url=server.base, api_key=server.key), mode=package.Mode.TOOLS)
        *_, last = client.chat.completions.create_partial(
            model=server.model, messages=MESSAGES, response_model=city, max_retries=0, max_tokens=TOKENS
        )
        check_city(last)

    def usage() -> None:
        client = package.from_openai(OpenAI(base_url=server.base, api_key=server.key), mode=package.Mode.TOOLS)
        _, answer = client.chat.completions.create_with_completion(
            model=server.model, messages=MESSAGES, response_model=city, max_retries=0, max_tokens=TOKENS
        )
        check_usage(answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)

    return {
        "stream": stream,
        "tools": lambda: check_city(ask("TOOLS")),
        "structured": lambda: check_city(ask("JSON_SCHEMA")),
        "usage": usage,
        "unknown model": lambda: refused(lambda: ask("TOOLS", model=UNKNOWN), UNKNOWN_TEXT),
        "too long": lambda: refused(
            lambda: ask("TOOLS", messages=[{"role": "user", "content": TOO_LONG}]), TOO_LONG_TEXT
        ),
        "rate limit": lambda: limited(lambda: ask("TOOLS", key=server.limited_key)),
        "responses": lambda: check_city(ask("RESPONSES_TOOLS", "max_output_tokens")),
        "anthropic": messages,
    }


def pydantic_ai(server: Server) -> Calls:
    """An agent with text, with an output by a tool and by a schema, and one by Anthropic's form."""
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    city = city_model()

    def provider(key: str = server.key) -> Any:
        return OpenAIProvider(openai_client=AsyncOpenAI(base_url=server.base, api_key=key, max_retries=0))

    def agent(name: str = server.model, key: str = server.key, tokens: int = TOKENS, **more: Any) -> Any:
        model = OpenAIChatModel(name, provider=provider(key))
        return Agent(model, retries=0, model_settings={"max_tokens": tokens}, **more)

    async def stream(tokens: int = TOKENS, *, leaves: bool = False) -> str:
        text = ""
        async with agent(tokens=tokens).run_stream(PROMPT) as result:
            async for piece in result.stream_text(delta=True, debounce_by=None):
                text += piece
                if leaves:
                    break
        return text

    def usage() -> None:
        found = agent().run_sync(PROMPT).usage
        found = found() if callable(found) else found
        check_usage(found.input_tokens, found.output_tokens, found.total_tokens)

    def messages() -> None:
        client = AsyncAnthropic(base_url=server.url, api_key=server.key, max_retries=0)
        model = AnthropicModel(server.model, provider=AnthropicProvider(anthropic_client=client))
        require(Agent(model, model_settings={"max_tokens": TOKENS}).run_sync(PROMPT).output)

    def responses() -> None:
        model = OpenAIResponsesModel(server.model, provider=provider())
        require(Agent(model, model_settings={"max_tokens": TOKENS}).run_sync(PROMPT).output)

    return {
        "chat": lambda: require(agent().run_sync(PROMPT).output),
        "stream": lambda: require(asyncio.run(stream())),
        "tools": lambda: check_city(agent(output_type=city).run_sync(PROMPT).output),
        "structured": lambda: check_city(agent(output_type=NativeOutput(city)).run_sync(PROMPT).output),
        "usage": usage,
        "unknown model": lambda: refused(lambda: agent(UNKNOWN).run_sync(PROMPT), UNKNOWN_TEXT, "ModelHTTPError"),
        "too long": lambda: refused(lambda: agent().run_sync(TOO_LONG), TOO_LONG_TEXT, "ModelHTTPError"),
        "rate limit": lambda: limited(lambda: agent(key=server.limited_key).run_sync(PROMPT), "ModelHTTPError"),
        "cancel": lambda: cancelled(server, lambda: asyncio.run(stream(LONG_TOKENS, leaves=True))),
        "responses": responses,
        "anthropic": messages,
    }


def openai_agents(server: Server) -> Calls:
    """Agents with text, with a tool that must be called, and with an output type, by both of OpenAI's forms."""
    from agents import (
        Agent,
        FunctionTool,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    found: list[str] = []

    async def add_city(_: object, arguments: str) -> str:
        found.append(arguments)
        return "added"

    tool = FunctionTool(name="add_city", description="Add a city.", params_json_schema=CITY, on_invoke_tool=add_city)

    def agent(
        name: str = server.model,
        key: str = server.key,
        tokens: int = TOKENS,
        form: Any = OpenAIChatCompletionsModel,
        choice: str | None = None,
        **more: Any,
    ) -> Any:
        client = AsyncOpenAI(base_url=server.base, api_key=key, max_retries=0)
        settings = ModelSettings(
            max_tokens=tokens, tool_choice=choice, include_usage=True, parallel_tool_calls=False if choice else None
        )
        return Agent(name="agent", model=form(model=name, openai_client=client), model_settings=settings, **more)

    def tools(form: Any = OpenAIChatCompletionsModel) -> None:
        found.clear()
        asked = agent(form=form, tools=[tool], choice="required", tool_use_behavior="stop_on_first_tool")
        Runner.run_sync(asked, PROMPT)
        check_city(found[0])

    async def stream(tokens: int = TOKENS, *, leaves: bool = False) -> int:
        result, count = Runner.run_streamed(agent(tokens=tokens), PROMPT), 0
        async for event in result.stream_events():
            count += event.type == "raw_response_event"
            if leaves and count > 4:
                result.cancel()
                break
        return count

    def usage() -> None:
        counted = Runner.run_sync(agent(), PROMPT).context_wrapper.usage
        check_usage(counted.input_tokens, counted.output_tokens, counted.total_tokens)

    city = city_model()
    return {
        "chat": lambda: require(Runner.run_sync(agent(), PROMPT).final_output),
        "stream": lambda: require(asyncio.run(stream())),
        "tools": tools,
        "structured": lambda: check_city(Runner.run_sync(agent(output_type=city), PROMPT).final_output),
        "usage": usage,
        "unknown model": lambda: refused(lambda: Runner.run_sync(agent(UNKNOWN), PROMPT), UNKNOWN_TEXT),
        "too long": lambda: refused(lambda: Runner.run_sync(agent(), TOO_LONG), TOO_LONG_TEXT),
        "rate limit": lambda: limited(lambda: Runner.run_sync(agent(key=server.limited_key), PROMPT), "RateLimitError"),
        "cancel": lambda: cancelled(server, lambda: asyncio.run(stream(LONG_TOKENS, leaves=True))),
        "responses": lambda: check_city(
            Runner.run_sync(agent(form=OpenAIResponsesModel, output_type=city), PROMPT).final_output
        ),
        "responses, tools": lambda: tools(OpenAIResponsesModel),
    }


def dspy(server: Server) -> Calls:
    """A call of the LM, and signatures by a constrained answer."""
    import dspy as package

    answer = {
        "type": "object",
        "properties": {"answer": {"type": "string", "enum": ["yes", "no"]}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": answer}}

    def model(name: str = server.model, key: str = server.key, **more: Any) -> Any:
        given = {"max_tokens": TOKENS, "cache": False, "num_retries": 0, **more}
        return package.LM(f"openai/{name}", api_base=server.base, api_key=key, **given)

    def signature() -> object:
        with package.context(lm=model(response_format=form), adapter=package.JSONAdapter()):
            return require(package.Predict("question -> answer")(question=PROMPT).answer)

    def usage() -> None:
        lm = model()
        lm(PROMPT)
        found = lm.history[-1]["usage"]
        check_usage(found["prompt_tokens"], found["completion_tokens"], found["total_tokens"])

    embedder = package.Embedder(f"openai/{server.model}", api_base=server.base, api_key=server.key, max_retries=0)
    return {
        "chat": lambda: require(model()(PROMPT)),
        "structured": signature,
        "usage": usage,
        "unknown model": lambda: refused(lambda: model(UNKNOWN)(PROMPT), UNKNOWN_TEXT),
        "too long": lambda: refused(lambda: model()(TOO_LONG), TOO_LONG_TEXT, "ContextWindowExceededError"),
        "rate limit": lambda: limited(lambda: model(key=server.limited_key)(PROMPT)),
        "embeddings": lambda: refused(lambda: embedder(["a"], caching=False), EMBEDDINGS_TEXT),
    }


def haystack(server: Server) -> Calls:
    """OpenAIChatGenerator and OpenAITextEmbedder."""
    from haystack.components.embedders import OpenAITextEmbedder
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool
    from haystack.utils import Secret

    messages = [ChatMessage.from_user(PROMPT)]

    def ask(name: str = server.model, key: str = server.key, **more: Any) -> Any:
        settings = {"max_tokens": TOKENS, **more.pop("generation_kwargs", {})}
        asked = more.pop("messages", messages)
        generator = OpenAIChatGenerator(
            model=name, api_base_url=server.base, api_key=Secret.from_token(key), max_retries=0,
            generation_kwargs=settings, **more,
        )  # fmt: skip
        return generator.run(asked)["replies"][0]

    def tools() -> None:
        tool = Tool(name="add_city", description="Add a city.", parameters=CITY, function=lambda **_: "")
        answer = ask(tools=[tool], generation_kwargs={"tool_choice": "required"})
        check_city(answer.tool_calls[0].arguments)

    def stream() -> None:
        pieces: list[str] = []
        ask(streaming_callback=lambda piece: pieces.append(piece.content))
        require("".join(pieces))

    def usage() -> None:
        found = ask().meta["usage"]
        check_usage(found["prompt_tokens"], found["completion_tokens"], found["total_tokens"])

    def leave() -> None:
        def stop(_: object) -> None:
            raise KeyError("enough")

        try:
            ask(streaming_callback=stop, generation_kwargs={"max_tokens": LONG_TOKENS})
        except KeyError:
            return

    embedder = OpenAITextEmbedder(
        model=server.model, api_base_url=server.base, api_key=Secret.from_token(server.key), max_retries=0
    )
    city = city_model()
    return {
        "chat": lambda: require(ask().text),
        "stream": stream,
        "tools": tools,
        "structured": lambda: check_city(ask(generation_kwargs={"response_format": city}).text),
        "usage": usage,
        "unknown model": lambda: refused(lambda: ask(UNKNOWN), UNKNOWN_TEXT),
        "too long": lambda: refused(lambda: ask(messages=[ChatMessage.from_user(TOO_LONG)]), TOO_LONG_TEXT),
        "rate limit": lambda: limited(lambda: ask(key=server.limited_key), "RateLimitError"),
        "embeddings": lambda: refused(lambda: embedder.run("a"), EMBEDDINGS_TEXT),
        "cancel": lambda: cancelled(server, leave),
    }


def smolagents(server: Server) -> Calls:
    """OpenAIModel, as agents call it."""
    from smolagents import OpenAIModel, Tool
    from smolagents.models import ChatMessage, MessageRole

    def model(name: str = server.model, key: str = server.key, **more: Any) -> Any:
        given = {"max_tokens": TOKENS, **more}
        return OpenAIModel(
            model_id=name, api_base=server.base, api_key=key, client_kwargs={"max_retries": 0}, retry=False, **given
        )

    def messages(text: str = PROMPT) -> list[Any]:
        return [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": text}])]

    class AddCity(Tool):  # type: ignore[misc]
        name = "add_city"
        description = "Add a city."
        inputs = {"large": {"type": "boolean", "description": "Is it large?"}}  # noqa: RUF012 (read of the class)
        output_type = "string"

        def forward(self, large: bool) -> str:
            return str(large)

    def tools() -> None:
        # The package's schema allows further fields, in which a small model writes until its tokens end.
        answer = model().generate(messages(), tools_to_call_from=[AddCity()])
        called = answer.tool_calls[0].function
        assert called.name == "add_city", called
        assert '"large"' in str(called.arguments).replace("'", '"'), called

    def structured() -> None:
        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
        check_city(model().generate(messages(), response_format=form).content)

    def usage() -> None:
        found = model().generate(messages()).token_usage
        check_usage(found.input_tokens, found.output_tokens, found.total_tokens)

    def leave() -> None:
        pieces = model(max_tokens=LONG_TOKENS).generate_stream(messages())
        next(pieces)
        pieces.close()

    return {
        "chat": lambda: require(model().generate(messages()).content),
        "stream": lambda: require("".join(piece.content or "" for piece in model().generate_stream(messages()))),
        "tools": tools,
        "structured": structured,
        "usage": usage,
        "unknown model": lambda: refused(lambda: model(UNKNOWN).generate(messages()), UNKNOWN_TEXT),
        "too long": lambda: refused(lambda: model().generate(messages(TOO_LONG)), TOO_LONG_TEXT),
        "rate limit": lambda: limited(lambda: model(key=server.limited_key).generate(messages()), "RateLimitError"),
        "cancel": lambda: cancelled(server, leave),
    }


def semantic_kernel(server: Server) -> Calls:
    """OpenAIChatCompletion, with a function that must be called."""
    from openai import AsyncOpenAI
    from semantic_kernel import Kernel
    from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
    from semantic_kernel.contents import ChatHistory
    from semantic_kernel.functions import kernel_function

    def service(name: str = server.model, key: str = server.key) -> Any:
        client = AsyncOpenAI(base_url=server.base, api_key=key, max_retries=0)
        return OpenAIChatCompletion(ai_model_id=name, async_client=client)

    def history(text: str = PROMPT) -> Any:
        found = ChatHistory()
        found.add_user_message(text)
        return found

    def settings(**more: Any) -> Any:
        return OpenAIChatPromptExecutionSettings(**{"max_tokens": TOKENS, **more})

    def ask(name: str = server.model, key: str = server.key, text: str = PROMPT, **more: Any) -> Any:
        return asyncio.run(service(name, key).get_chat_message_content(history(text), settings(**more)))

    async def stream(tokens: int = TOKENS, *, leaves: bool = False) -> str:
        text = ""
        pieces = service().get_streaming_chat_message_content(history(), settings(max_tokens=tokens))
        async for piece in pieces:
            text += str(piece)
            if leaves:
                break
        await pieces.aclose()
        return text

    def tools() -> None:
        class Cities:
            @kernel_function(name="add_city", description="Add a city.")  # type: ignore[untyped-decorator]
            def add(self, large: bool) -> str:
                return str(large)

        kernel = Kernel()
        kernel.add_plugin(Cities(), "cities")
        asked = settings(function_choice_behavior=FunctionChoiceBehavior.Required(auto_invoke=False))
        answer = asyncio.run(service().get_chat_message_content(history(), asked, kernel=kernel))
        call = next(item for item in answer.items if type(item).__name__ == "FunctionCallContent")
        # As with smolagents: the schema allows further fields.
        assert call.name.endswith("add_city"), call.name
        assert '"large"' in str(call.arguments), call.arguments

    def usage() -> None:
        found = ask().metadata["usage"]
        check_usage(found.prompt_tokens, found.completion_tokens)

    city = city_model()
    return {
        "chat": lambda: require(str(ask())),
        "stream": lambda: require(asyncio.run(stream())),
        "tools": tools,
        "structured": lambda: check_city(str(ask(response_format=city))),
        "usage": usage,
        "unknown model": lambda: refused(lambda: ask(UNKNOWN), UNKNOWN_TEXT),
        "too long": lambda: refused(lambda: ask(text=TOO_LONG), TOO_LONG_TEXT),
        "rate limit": lambda: limited(lambda: ask(key=server.limited_key), "RateLimitError"),
        "cancel": lambda: cancelled(server, lambda: asyncio.run(stream(LONG_TOKENS, leaves=True))),
    }


FRAMEWORK_CLIENTS: dict[str, tuple[str, Callable[[Server], Calls]]] = {
    "langchain": ("langchain-openai", langchain),
    "langchain-anthropic": ("langchain-anthropic", langchain_anthropic),
    "llama-index": ("llama-index-llms-openai-like", llama_index),
    "instructor": ("instructor", instructor),
    "pydantic-ai": ("pydantic-ai-slim", pydantic_ai),
    "openai-agents": ("openai-agents", openai_agents),
    "dspy": ("dspy", dspy),
    "haystack": ("haystack-ai", haystack),
    "smolagents": ("smolagents", smolagents),
    "semantic-kernel": ("semantic-kernel", semantic_kernel),
}
