"""The body of POST /v1/responses."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from ingot.runtime.constraints.constraint import Constraint
from ingot.runtime.server.api.request_schemas import LACKING_SAMPLING, NOTHING, Sampling
from ingot.runtime.server.api.responses.items import Item, MessageItem, messages_of, with_instructions
from ingot.runtime.server.api.tools import (
    AllowedTools,
    AllowedToolsChoice,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
    chosen_tools,
)
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.models.chat import Chat
from ingot.runtime.text.messages import Message

# Parts of answers that have tools of OpenAI's own, images, or reasoning that is encrypted.
_OF_OTHERS = (
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results"),
    *("message.input_image.image_url", "reasoning.encrypted_content"),
    *("web_search_call.action.sources", "web_search_call.results"),
)
_Key = Annotated[str, StringConstraints(max_length=64)]
_Value = Annotated[str, StringConstraints(max_length=512)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


class TextFormat(_Part):
    """What the text must be. `strict` changes nothing: a schema is always followed."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(_Part):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class FunctionTool(_Part):
    """A function that the model may call. `strict` changes nothing: required calls always follow the schema."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunctionTool(_Part):
    """The function that the reply must call."""

    type: Literal["function"]
    name: str

    @property
    def as_tool(self) -> NamedTool:
        """The same in the form of chats."""
        return NamedTool(type="function", function=NamedFunction(name=self.name))


class AllowedFunctionTools(_Part):
    """The functions that the reply may call, or with the mode required must call one of."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunctionTool] = Field(min_length=1)


class ResponseRequest(Sampling):
    """POST /v1/responses."""

    LACKING: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **LACKING_SAMPLING,
        "echo": NOTHING,
        "access_programs": NOTHING,
        "background": NOTHING,
        "background_options": (*NOTHING, {}),
        "context_management": NOTHING,
        "conversation": NOTHING,
        "image": NOTHING,
        "include": NOTHING,
        "max_tool_calls": NOTHING,
        "moderation": NOTHING,
        "prompt": NOTHING,
        "prompt_cache_options": (*NOTHING, {}),
        "prompt_cache_retention": NOTHING,
        "reasoning": (*NOTHING, {}, {"effort": None}, {"summary": None}, {"effort": None, "summary": None}),
        "stream_options": (*NOTHING, {}, {"include_obfuscation": False}),
        "top_logprobs": (*NOTHING, 0),
        "truncation": (*NOTHING, "disabled"),
    }
    HINTS: ClassVar[Mapping[str, Callable[[Any], bool]]] = {
        "include": lambda value: isinstance(value, list) and bool(value) and all(each in _OF_OTHERS for each in value),
        "truncation": lambda value: value == "auto",
    }
    PROMPT_FIELD = "input"
    CONSTRAINT_FIELDS: ClassVar[tuple[str, ...]] = ("text", "tools")
    FIELDS: ClassVar[Mapping[str, str]] = {"max_tokens": "max_output_tokens", "variables": "chat_template_kwargs"}

    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | AllowedFunctionTools | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Annotated[dict[_Key, _Value], Field(max_length=16)] | None = None

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        return [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def conversation(self, before: Sequence[Message]) -> list[Message]:
        """The messages so far with those of the input. ApiError for an empty input."""
        if not self.items:
            raise ApiError(400, "input is an empty list; give at least one item", param="input")
        return messages_of(self.items, before)

    def chat(self, conversation: Sequence[Message]) -> Chat:
        """What is to be answered. ApiError for tools that cannot be used."""
        tools = [
            Tool(type="function", function=Function(**each.model_dump(exclude={"type"}))) for each in self.tools or ()
        ]
        chosen = chosen_tools(tools, self._tool_choice, self.parallel_tool_calls)
        messages = with_instructions(conversation, self.instructions)
        return Chat(messages, *chosen, self.chat_template_kwargs)

    @property
    def _tool_choice(self) -> ToolChoice | None:
        match self.tool_choice:
            case NamedFunctionTool() as named:
                return named.as_tool
            case AllowedFunctionTools() as allowed:
                several = AllowedTools(mode=allowed.mode, tools=[each.as_tool for each in allowed.tools])
                return AllowedToolsChoice(type="allowed_tools", allowed_tools=several)
            case choice:
                return choice

    @property
    def constraint(self) -> tuple[Constraint | None, str | None]:
        found = self.text.format if self.text else None
        if found is None or found.type == "text":
            return None, None
        if found.type == "json_object":
            return Constraint.json_object(), "text"
        if found.schema_ is None:
            raise ApiError(400, "text.format has no schema", param="text")
        return Constraint.json_schema(found.schema_), "text"

    def most_tokens(self, context_tokens: int) -> int:
        return context_tokens if self.max_output_tokens is None else self.max_output_tokens

    def num_logprobs(self) -> int | None:
        return None
