"""Items of a conversation in the form of the Responses API, and the messages for the chat template that they become.

Output items of a response may be sent back as they are: their ids and states are read and not used.
"""

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter

from ingot.errors import shown
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.text.messages import Message

_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_Status = Literal["in_progress", "completed", "incomplete"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class InputText(_Part):
    """A text that the user or a tool wrote."""

    type: Literal["input_text"]
    text: str


class OutputText(_Part):
    """A text that the model wrote."""

    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]] | None = None
    logprobs: list[dict[str, Any]] | None = None


class ReasoningText(_Part):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(_Part):
    """What one side says. The role developer is system to chat templates."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Annotated[InputText | OutputText, Field(discriminator="type")]]
    id: str | None = None
    status: _Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class CallItem(_Part):
    """A call of a function that the model asked for; `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    arguments: str
    caller: None = None
    namespace: None = None
    id: str | None = None
    status: _Status | None = None


class CallOutputItem(_Part):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: str | list[InputText]
    id: str | None = None
    status: _Status | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return self.output if isinstance(self.output, str) else "\n".join(part.text for part in self.output)


class ReasoningItem(_Part):
    """What the model thought before what follows; a template may show it again."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: Annotated[list[dict[str, Any]], Field(max_length=0)] = []
    encrypted_content: None = None
    id: str | None = None
    status: _Status | None = None


def _kind(item: Any) -> str:
    """The type of an item; one without is a message."""
    found = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return str(found)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def messages_of(items: Sequence[Item], before: Sequence[Message] = ()) -> list[Message]:
    """A conversation with these items after it. ApiError for the output of a call that it does not have."""
    found: list[dict[str, Any]] = [dict(message) for message in before]
    thought = ""
    for item in items:
        match item:
            case ReasoningItem():
                thought = "\n".join(part.text for part in item.content or ())
                continue
            case MessageItem(role="assistant"):
                found.append(_said(item.text, thought))
            case MessageItem():
                found.append({"role": "user" if item.role == "user" else "system", "content": item.text})
            case CallItem():
                _add_call(found, item, thought)
            case CallOutputItem():
                _require_call(found, item)
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": item.text})
        thought = ""
    return list(found)


def messages_of_output(output: Sequence[dict[str, Any]], before: Sequence[Message]) -> list[Message]:
    """A conversation with the output items of a response after it."""
    return messages_of(_ITEMS.validate_python(list(output)), before)


def as_input_items(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Items as they are listed: each with an id and a state, texts as parts."""
    return [_listed(item) for item in items]


def _listed(item: Item) -> dict[str, Any]:
    found = item.model_dump(exclude_none=True)
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        part = {"type": kind, "text": item.content}
        found["content"] = [{**part, "annotations": []} if kind == "output_text" else part]
    return {"id": f"{_ID_PREFIXES[item.type]}_{uuid.uuid4().hex}", "status": "completed", **found}


def with_instructions(messages: Sequence[Message], instructions: str | None) -> list[Message]:
    """The conversation with the instructions, and the system's messages that it begins with, as one message."""
    first = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    texts = [*([instructions] if instructions else []), *(str(message["content"]) for message in messages[:first])]
    return [*([{"role": "system", "content": "\n\n".join(texts)}] if texts else []), *messages[first:]]


def _said(text: str | None, thought: str) -> dict[str, Any]:
    reasoning = {"reasoning_content": thought} if thought else {}
    return {"role": "assistant", "content": text, **reasoning}


def _add_call(messages: list[dict[str, Any]], item: CallItem, thought: str) -> None:
    """Add a call to the message of the assistant that it belongs to."""
    if thought or not messages or messages[-1]["role"] != "assistant":
        messages.append(_said(None, thought))
    call = {"type": "function", "id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
    messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", []), call]}


def _require_call(messages: Sequence[Message], item: CallOutputItem) -> None:
    calls = [call for message in messages for call in message.get("tool_calls", [])]  # type: ignore[attr-defined]
    if not any(call["id"] == item.call_id for call in calls):
        raise ApiError(
            400,
            f"input has the output of the call {shown(item.call_id)}, and no function_call before it has that call_id",
            param="input",
            code="invalid_value",
        )
