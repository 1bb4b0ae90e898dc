"""Bodies of Anthropic's Messages API, and the conversation in the form of chat templates that they become.

Source: https://docs.anthropic.com/en/api/messages
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, Tag
from pydantic.types import Discriminator

from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.constraints.constraint import Constraint
from ingot.runtime.server.api.request_schemas import LACKING_SAMPLING, NOTHING, Sampling
from ingot.runtime.server.api.tools import Function, NamedFunction, NamedTool, Tool, ToolChoice, chosen_tools
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.models.chat import Chat
from ingot.runtime.text.messages import Message

_LACKING_OBJECTS = ("container", "context_management", "fallbacks", "mcp_servers", "user_profile_id", "workspace_id")


class _Part(BaseModel):
    """A part of a body. `cache_control` is accepted and not used: prefixes are always cached."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    cache_control: dict[str, Any] | None = None


class TextBlock(_Part):
    """A text. `citations` of answers are accepted and not used."""

    type: Literal["text"] = "text"
    text: str
    citations: list[Any] | None = None


class ThinkingBlock(_Part):
    """What the model thought before an answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Part):
    """Thoughts of another server, which cannot be read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_Part):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None


class ToolResultBlock(_Part):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


def _kind(block: Any) -> str:
    return str(block.get("type") if isinstance(block, dict) else getattr(block, "type", None))


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(_kind),
]


class MessageParam(_Part):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class CustomTool(_Part):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None


class ToolChoiceParam(_Part):
    """Whether the answer must call a tool: `any` of them, or the one that is named."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(_Part):
    """Whether the model may think first, by the variable `enable_thinking` of its chat template."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class CountRequest(Sampling):
    """POST /v1/messages/count_tokens; what it shares with POST /v1/messages."""

    LACKING: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **LACKING_SAMPLING,
        "echo": NOTHING,
        **dict.fromkeys(_LACKING_OBJECTS, (*NOTHING, {})),
    }
    HINTS: ClassVar[Mapping[str, Callable[[Any], bool]]] = {
        **dict.fromkeys(("context_management", "diagnostics", "output_config"), lambda value: isinstance(value, dict)),
        "inference_geo": lambda value: isinstance(value, str),
        "speed": lambda value: value == "standard",
    }
    PROMPT_FIELD: ClassVar[str] = "messages"
    CONSTRAINT_FIELDS: ClassVar[tuple[str, ...]] = ("tools",)
    FIELDS: ClassVar[Mapping[str, str]] = {"stop": "stop_sequences", "variables": "thinking"}

    messages: list[MessageParam] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[CustomTool] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    cache_control: dict[str, Any] | None = None

    @property
    def chat(self) -> Chat:
        """The conversation. ApiError for tools that cannot be used, and for results of unknown calls."""
        tools = [
            Tool(
                type="function",
                function=Function(name=each.name, description=each.description, parameters=each.input_schema),
            )
            for each in self.tools or ()
        ]
        is_single = self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use is True
        chosen = chosen_tools(tools, self._tool_choice, False if is_single else None)
        messages = [message for turn in self.messages for message in _messages_of(turn)]
        _require_calls(messages)
        if system := _joined(self.system or ()):
            messages = [{"role": "system", "content": system}, *messages]
        return Chat(messages, *chosen, self._variables(messages[-1]))

    @property
    def _tool_choice(self) -> ToolChoice | None:
        match self.tool_choice:
            case None:
                return None
            case ToolChoiceParam(type="tool", name=str(name)):
                return NamedTool(type="function", function=NamedFunction(name=name))
            case ToolChoiceParam(type="tool"):
                raise ApiError(400, "tool_choice has the type tool and no name; add it", param="tool_choice")
            case ToolChoiceParam(type="any"):
                return "required"
            case ToolChoiceParam(type="none"):
                return "none"
            case _:
                return "auto"

    def _variables(self, last: Message) -> dict[str, Any]:
        """Variables of the chat template: the answer continues a last message that is the assistant's."""
        found: dict[str, Any] = {}
        if self.thinking:
            found["enable_thinking"] = self.thinking.type != "disabled"
        if last["role"] == "assistant" and "tool_calls" not in last:
            found["continue_final_message"] = True
        return found

    @property
    def constraint(self) -> tuple[Constraint | None, str | None]:
        return None, None

    def most_tokens(self, context_tokens: int) -> int:
        return context_tokens

    def num_logprobs(self) -> int | None:
        return None


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # type: ignore[assignment]  # Anthropic's values

    def most_tokens(self, context_tokens: int) -> int:
        return self.max_tokens

    def sampling_params(self, context_tokens: int) -> SamplingParams:
        if self.stop_sequences and self.stop:
            raise ApiError(400, "stop and stop_sequences are given; leave one out", param="stop")
        own = self.model_copy(update={"stop": self.stop_sequences}) if self.stop_sequences else self
        return super(MessagesRequest, own).sampling_params(context_tokens)


def _messages_of(turn: MessageParam) -> Iterator[dict[str, Any]]:
    """A turn as messages of a chat: results of tools are messages of their own, before the text that follows them."""
    blocks = [TextBlock(text=turn.content)] if isinstance(turn.content, str) else turn.content
    _require_role(turn.role, blocks)
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _joined(block.content or "")}
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    thoughts = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    if turn.role == "assistant":
        content = "".join(block.text for block in texts)
        reasoning = {"reasoning_content": thoughts} if thoughts else {}
        yield {"role": "assistant", "content": content or None, **reasoning, **({"tool_calls": calls} if calls else {})}
    elif texts or not any(isinstance(block, ToolResultBlock) for block in blocks):
        yield {"role": turn.role, "content": _joined(texts)}


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"type": "function", "id": block.id, "function": {"name": block.name, "arguments": arguments}}


def _joined(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _require_role(role: str, blocks: Sequence[Any]) -> None:
    """Raise ApiError for blocks of another role."""
    for block in blocks:
        allowed = {"text": role, "tool_result": "user"}.get(block.type, "assistant")
        if role != allowed:
            message = f"messages has a block {block.type} of the role {role}; only {allowed} has such blocks"
            raise ApiError(400, message, param="messages", code="invalid_value")


def _require_calls(messages: Sequence[Message]) -> None:
    """Raise ApiError for the result of a call that is not in a message before it."""
    known = set[str]()
    for message in messages:
        known |= {call["id"] for call in message.get("tool_calls", ())}  # type: ignore[attr-defined]
        if message["role"] == "tool" and message["tool_call_id"] not in known:
            raise ApiError(
                400,
                f"messages has a tool_result of {message['tool_call_id']!r}, and no tool_use before it has that id",
                param="messages",
                code="invalid_value",
            )
