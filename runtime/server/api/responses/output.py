"""The output items of a response, and the events that say how they grow.

An item is reasoning, a message or a call; it ends when the model goes on to another. Whole answers are made by the same
steps as streams, so both have the same items.
"""

import uuid
from collections.abc import Callable
from typing import Any, Literal

from ingot.runtime.replies.call_stream import ToolCall
from ingot.runtime.server.models.chat import ReplyReader

Json = dict[str, Any]
Emit = Callable[..., None]
"""Takes the type of an event, without "response.", and its fields."""

_TEXTS = {  # type of the item -> prefix of its id, type of its part, what its events are about
    "reasoning": ("rs", "reasoning_text", "reasoning_text"),
    "message": ("msg", "output_text", "output_text"),
}
_JOIN = "\n"  # what the reader puts between two regions of a kind, which are items of their own here


class OutputItems:
    """Grows with the text of one choice. `reader` reads a reply; None: the text is a message."""

    def __init__(self, reader: ReplyReader | None, emit: Emit) -> None:
        self.items: list[Json] = []
        self._reader = reader
        self._emit = emit
        self._is_open = False

    def feed(self, text: str, *, is_last: bool) -> None:
        """Add a piece of text."""
        if self._reader is None:
            self._add_text("message", text)
            return
        for part in self._reader.parts(text, is_last=is_last):
            self._add_text("reasoning", part.reasoning)
            self._add_text("message", part.content)
            for call in part.calls:
                self._add_call(call)

    def end(self, status: Literal["completed", "incomplete"]) -> None:
        """End the output. One without any text is an empty message, so that the conversation has the model's turn."""
        if not self.items:
            self._open_text("message")
        self.close(status)

    def close(self, status: Literal["completed", "incomplete"]) -> None:
        """End the open item."""
        if not self._is_open:
            return
        self._is_open = False
        item, place = self.items[-1], self._place()
        item["status"] = status
        if item["type"] == "function_call":
            self._emit("function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"])
        else:
            (part,) = item["content"]
            name = _TEXTS[item["type"]][2]
            logprobs: Json = {"logprobs": []} if name == "output_text" else {}
            self._emit(f"{name}.done", **place, content_index=0, text=part["text"], **logprobs)
            self._emit("content_part.done", **place, content_index=0, part=part)
        self._emit("output_item.done", output_index=place["output_index"], item=item)

    def _add_text(self, kind: str, text: str) -> None:
        if not text:
            return
        if not self._is_open or self.items[-1]["type"] != kind:
            if any(item["type"] == kind for item in self.items):
                text = text.removeprefix(_JOIN)
            self._open_text(kind)
        self.items[-1]["content"][0]["text"] += text
        logprobs: Json = {"logprobs": []} if kind == "message" else {}
        self._emit(f"{_TEXTS[kind][2]}.delta", **self._place(), content_index=0, delta=text, **logprobs)

    def _open_text(self, kind: str) -> None:
        prefix, part_type, _ = _TEXTS[kind]
        part: Json = {"type": part_type, "text": ""}
        part |= {"annotations": [], "logprobs": []} if kind == "message" else {}
        head: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
        self._open({"id": _new_id(prefix), "type": kind, **head, "content": []})
        self.items[-1]["content"].append(part)
        self._emit("content_part.added", **self._place(), content_index=0, part=part)

    def _add_call(self, call: ToolCall) -> None:
        if call.name:
            assert self._reader is not None
            item = {"id": _new_id("fc"), "type": "function_call", "call_id": self._reader.call_id(), "name": call.name}
            self._open({**item, "arguments": ""})
        if call.arguments:
            self.items[-1]["arguments"] += call.arguments
            self._emit("function_call_arguments.delta", **self._place(), delta=call.arguments)

    def _open(self, item: Json) -> None:
        self.close("completed")
        self.items.append({**item, "status": "in_progress"})
        self._is_open = True
        self._emit("output_item.added", output_index=len(self.items) - 1, item=self.items[-1])

    def _place(self) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
