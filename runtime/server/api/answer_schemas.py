"""The server's answers as types, from which its OpenAPI document has their schemas; tests compare both."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config

# typing has one of its own, which pydantic refuses before Python 3.12
from typing_extensions import TypedDict


@with_config(ConfigDict(extra="forbid"))
class _Answer(TypedDict):
    pass


class ErrorFacts(_Answer):
    """What is wrong: `param` is the field to blame, `code` a word for programs."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(_Answer):
    """An error."""

    error: ErrorFacts


class CachedTokens(_Answer):
    """Prompt tokens that the prefix cache had."""

    cached_tokens: int


class UsageFacts(_Answer):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CachedByTier(_Answer):
    """Prompt tokens that each tier of the prefix cache had."""

    device: int
    host: int
    disk: int


class RequestMetrics(_Answer):
    """With include_metrics: times of the first choice, and the time until the last one's end; tokens of all."""

    queue_seconds: float | None
    ttft_seconds: float | None
    tpot_seconds: float | None
    e2e_seconds: float
    preemptions: int
    cached_tokens: CachedByTier
    drafted_tokens: int
    accepted_tokens: int


FinishReason = Literal["stop", "length", "tool_calls", "timeout"]


class CompletionLogprobs(_Answer):
    """Log-probabilities of the tokens of a completion; None of the first one of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class CompletionChoice(_Answer):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class CompletionAnswer(_Answer):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageFacts
    metrics: NotRequired[Annotated[RequestMetrics | None, Field(default=None)]]


class CalledFunction(_Answer):
    """A function and its arguments, as JSON text that the model wrote."""

    name: str
    arguments: str


class CallOfTool(_Answer):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(_Answer):
    """The message of the assistant."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[Annotated[str, Field(default="")]]
    tool_calls: NotRequired[Annotated[list[CallOfTool], Field(default=[])]]


class LikelyToken(_Answer):
    """A token with its log-probability."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChosenToken(LikelyToken):
    """A token of the message, and others that could have been there."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(_Answer):
    """Log-probabilities of the tokens of a message."""

    content: list[ChosenToken]
    refusal: None


class ChatChoice(_Answer):
    """One message."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChatAnswer(_Answer):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageFacts
    metrics: NotRequired[Annotated[RequestMetrics | None, Field(default=None)]]


class ResponseError(_Answer):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(_Answer):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens", "timeout"]


class MessageUsage(_Answer):
    """Tokens of a message; those of its prompt that the prefix cache had count apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(_Answer):
    """A message of /v1/messages; `content` has blocks of thinking, texts and tool_use."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    metrics: NotRequired[Annotated[RequestMetrics | None, Field(default=None)]]


class MessageErrorFacts(_Answer):
    """What is wrong."""

    type: str
    message: str


class MessageErrorAnswer(_Answer):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: MessageErrorFacts


class InputTokens(_Answer):
    """The tokens of a conversation."""

    input_tokens: int


class ResponseAnswer(_Answer):
    """A response of /v1/responses; `output` has items of reasoning, messages and function calls."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    metrics: NotRequired[Annotated[RequestMetrics | None, Field(default=None)]]
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, None]
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class InputItems(_Answer):
    """A page of the items of a response's input."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(_Answer):
    """That a response was forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ModelReload(_Answer):
    """The last replacement of a model's artifact. Times are seconds since 1970; null: not reached."""

    model: str
    state: Literal["idle", "loading", "checking", "probation", "kept", "refused", "given_up"]
    reason: str | None
    started: float | None
    swapped: float | None
    ended: float | None


class ReloadAnswer(_Answer):
    """Whether models are being loaded and checked, and the last replacement of each."""

    status: Literal["reloading", "done"]
    models: list[ModelReload]


class AdapterAnswer(_Answer):
    """An adapter that was loaded or unloaded; `digest` is that of its contents."""

    status: Literal["loaded", "unloaded"]
    lora_name: str
    parent: str
    rank: int
    digest: str


class ModelAnswer(_Answer):
    """A model, whose `root` is its name, and its aliases. Or an adapter: `parent` is the model, `root` a folder."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["ingot"]
    root: str
    parent: str | None
    aliases: list[str]
    max_model_len: int


class ModelList(_Answer):
    """All models and adapters."""

    object: Literal["list"]
    data: list[ModelAnswer]


class TokensAnswer(_Answer):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[
        Annotated[list[str], Field(default=[], description="With return_token_strs: the text of each token.")]
    ]


class TextAnswer(_Answer):
    """The text of tokens."""

    prompt: str


class TokenizerAnswer(_Answer):
    """A model's own tokens by their texts, and its chat template."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    max_model_len: int


class VersionAnswer(_Answer):
    """The version of Ingot."""

    version: str


class StateAnswer(_Answer):
    """Whether the server is well, and what is wrong otherwise."""

    status: str
    problems: list[str]
