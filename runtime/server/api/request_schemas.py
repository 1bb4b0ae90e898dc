"""Bodies of requests: OpenAI's fields, those of vLLM that the engine has too, and Ingot's own.

A field that the engine lacks is refused by its name, unless its value changes nothing (`bodies.parse`). Ranges are
checked by `SamplingParams` and `RequestOptions`.
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from ingot.errors import shown
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.constraints.constraint import Constraint
from ingot.runtime.server.api.bodies import Body
from ingot.runtime.server.api.structured_outputs import ResponseFormat, StructuredOutputs, constraint_of
from ingot.runtime.server.api.tools import Tool, ToolChoice, chosen_tools
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.http.rate_limits import Holder
from ingot.runtime.server.models.chat import Chat

_TOKEN_ID = re.compile("-?[0-9]{1,18}")  # of the form; SamplingParams checks the range
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, of /v1/completions
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "stop_token_ids", "ignore_eos", "n", "best_of"),
    *("min_tokens", "allowed_token_ids", "skip_special_tokens"),
)
_OPTIONS = ("cache_salt", "prefix_cache", "priority", "speculate")
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
NOTHING: tuple[object, ...] = (None, False, "", [])  # an empty object may switch a feature on, with its defaults
LACKING_SAMPLING: Mapping[str, tuple[object, ...]] = {
    "bad_words": NOTHING,
    "include_stop_str_in_output": NOTHING,
    "length_penalty": (None, 1, 1.0),
    "prompt_logprobs": NOTHING,
    "return_token_ids": NOTHING,
    "return_tokens_as_token_ids": NOTHING,
    "spaces_between_special_tokens": (None, True),
    "truncate_prompt_tokens": NOTHING,
    "use_beam_search": NOTHING,
}
"""Fields of vLLM that no endpoint that generates has."""


AnyChatMessage = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "description": "A message for the chat template, which may read further fields.",
            "properties": {
                "role": {"type": "string"},
                "content": {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array", "items": _TEXT_PART}]},
            },
            "required": ["role"],
        }
    ),
]
"""A message; `plain_messages` checks it."""


class StreamOptions(BaseModel):
    """Numbers of tokens in a stream: at its end, and with `continuous_usage_stats`, which is vLLM's, in each event."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool | None = None


class Sampling(Body):
    """What all requests that generate have in common. Fields that are None have the default of OpenAI's API."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    prefix_cache: bool | None = None
    priority: int | None = None
    speculate: bool | None = None
    timeout_seconds: float | None = None
    include_metrics: bool | None = None
    # Accepted and not used: they change no token.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None

    CONSTRAINT_FIELDS: ClassVar[tuple[str, ...]]  # that a constraint may come from, the likeliest first

    @abstractmethod
    def most_tokens(self, context_tokens: int) -> int:
        """Most tokens of the output."""

    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report for each token; None: no log-probabilities."""

    def sampling_params(self, context_tokens: int) -> SamplingParams:
        """The parameters. RequestError for a value that is out of range."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name, None)) is not None}
        if given.get("top_k") == -1:
            given["top_k"] = 0  # vLLM's spelling of all tokens
        if given.get("seed") == -1:
            del given["seed"]  # and of a random one
        elif -(1 << 63) <= given.get("seed", 0) < 0:
            given["seed"] += 1 << 64  # OpenAI's have a sign
        return SamplingParams(
            **{"temperature": 1.0, **given},
            max_tokens=self.most_tokens(context_tokens),
            logprobs=self.num_logprobs(),
            logit_bias=_biases(self.logit_bias or {}),
            constraint=self.constraint[0],
        )

    @property
    @abstractmethod
    def constraint(self) -> tuple[Constraint | None, str | None]:
        """What the text must be, and the field that says so."""

    def options(self, holder: Holder, most_seconds: float | None, *, shares_cache: bool = False) -> RequestOptions:
        """How the engine serves it. RequestError for a value that is out of range.

        The holder of a key finds cached prompts of its own alone, unless holders share the cache.
        """
        given = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        given |= {"priority": holder.priority(self.priority or 0), "group": holder.group}
        own = RequestOptions(**given, timeout_seconds=self.timeout_seconds)  # checks its values
        if not shares_cache:
            own = replace(own, cache_salt=holder.cache_salt(own.cache_salt))
        if most_seconds is None or (self.timeout_seconds is not None and self.timeout_seconds <= most_seconds):
            return own
        return replace(own, timeout_seconds=most_seconds)


class Generation(Sampling):
    """What completions and chats have in common."""

    CONSTRAINT_FIELDS = ("structured_outputs", "response_format", "tools")

    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_tokens(self) -> bool:
        """Whether each event of such a stream has the numbers of tokens so far."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def constraint(self) -> tuple[Constraint | None, str | None]:
        return constraint_of(self.response_format, self.structured_outputs)

    def sampling_params(self, context_tokens: int) -> SamplingParams:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options requires stream to be true", param="stream_options")
        return super().sampling_params(context_tokens)


class CompletionRequest(Generation):
    """POST /v1/completions."""

    LACKING: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **LACKING_SAMPLING,
        "add_special_tokens": (None, True),
        "suffix": NOTHING,
    }
    PROMPT_FIELD = "prompt"
    FIELDS: ClassVar[Mapping[str, str]] = {"prompt_logprobs": "logprobs"}

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, texts or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError(400, "prompt is an empty list; give at least one", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def scores_only(self) -> bool:
        """Whether the prompt alone is asked for, with its log-probabilities, and nothing is to follow it."""
        return bool(self.echo) and self.max_tokens == 0

    def most_tokens(self, context_tokens: int) -> int:
        if self.scores_only:
            return 1  # which is not shown
        return _DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def sampling_params(self, context_tokens: int) -> SamplingParams:
        if self.scores_only and self.min_tokens:
            message = f"min_tokens is {self.min_tokens}; it must be at most max_tokens, which is 0: leave it out"
            raise ApiError(400, message, param="min_tokens", code="invalid_value")
        params = super().sampling_params(context_tokens)
        if not self.echo or self.logprobs is None:
            return params
        if self.stream:
            message = "a stream has no log-probabilities of its prompt: leave out echo, logprobs or stream"
            raise ApiError(400, message, param="echo")
        return replace(params, prompt_logprobs=self.logprobs)

    def num_logprobs(self) -> int | None:
        return self.logprobs


class Conversation(Body):
    """Fields of chats and of `/tokenize`: a conversation, and variables of the chat template.

    `add_generation_prompt` and `continue_final_message` are vLLM's: whether the template begins the answer, and whether
    it ends in the last message, which the model is to continue.
    """

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None

    PROMPT_FIELD: ClassVar[str] = "messages"
    FIELDS: ClassVar[Mapping[str, str]] = {"variables": "chat_template_kwargs"}
    VARIABLES: ClassVar[tuple[str, ...]] = ("add_generation_prompt", "continue_final_message")

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of the chat template; a field comes before one of `chat_template_kwargs`."""
        given = {name: value for name in self.VARIABLES if (value := getattr(self, name)) is not None}
        return {**(self.chat_template_kwargs or {}), **given}


class ChatRequest(Conversation, Generation):
    """POST /v1/chat/completions."""

    LACKING: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **LACKING_SAMPLING,
        "add_special_tokens": (None, False),
        "echo": NOTHING,
        "audio": NOTHING,
        "modalities": (*NOTHING, ["text"]),
        "moderation": NOTHING,
        "prediction": NOTHING,
        "prompt_cache_retention": NOTHING,
        "verbosity": (*NOTHING, "medium"),
        "web_search_options": NOTHING,
    }
    HINTS: ClassVar[Mapping[str, Callable[[Any], bool]]] = {
        "verbosity": lambda value: value in ("low", "high"),
        "web_search_options": lambda value: value == {},
    }
    FIELDS: ClassVar[Mapping[str, str]] = {**Conversation.FIELDS, "logprobs": "top_logprobs"}
    VARIABLES = (*Conversation.VARIABLES, "reasoning_effort")

    messages: list[AnyChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    store: bool | None = None  # accepted and not used: chats are not kept
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def chat(self) -> Chat:
        """The conversation. ApiError for tools that cannot be used."""
        chosen = chosen_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        return Chat(self.messages, *chosen, self.variables)

    def field_of(self, parameter: str) -> str:
        if parameter == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return super().field_of(parameter)

    def most_tokens(self, context_tokens: int) -> int:
        given = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return context_tokens if given is None else given

    def num_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs requires logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Conversation):
    """POST /tokenize: a text or a conversation, with the tools that it has."""

    prompt: str | None = None
    messages: list[AnyChatMessage] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None

    @property
    def chat(self) -> Chat:
        """The conversation; without messages it is empty. ApiError for tools that cannot be used."""
        return Chat(self.messages or (), chosen_tools(self.tools, None).tools, variables=self.variables)


class DetokenizeRequest(Body):
    """POST /detokenize."""

    tokens: list[int]


class LoadAdapterRequest(Body):
    """POST /v1/load_lora_adapter: vLLM's fields. `model`: the one that it changes, where several are served."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadAdapterRequest(Body):
    """POST /v1/unload_lora_adapter."""

    LACKING: ClassVar[Mapping[str, tuple[object, ...]]] = {"lora_int_id": NOTHING}

    lora_name: str


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    for key in given:
        if not _TOKEN_ID.fullmatch(key):
            message = f"logit_bias has the key {shown(key)}; keys are token ids"
            raise ApiError(400, message, param="logit_bias", code="invalid_value")
    return {int(token): bias for token, bias in given.items()}
