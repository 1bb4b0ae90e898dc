"""A message: the object that is answered as a whole, or that Anthropic's events build up.

message_start, (content_block_start, content_block_delta ..., content_block_stop) ..., message_delta, message_stop
"""

import json
import uuid
from collections.abc import Sequence
from typing import Any

from ingot.runtime.asking.outputs import Completion, SampledToken
from ingot.runtime.server.api.answers import Answer, Json, Usage, metrics_of
from ingot.runtime.server.api.messages.schemas import MessagesRequest
from ingot.runtime.server.api.responses.output import OutputItems
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.models.served_models import ServedModel

_DELTAS = {  # event of `OutputItems` -> type of the delta, and the key of its text
    "output_text.delta": ("text_delta", "text"),
    "reasoning_text.delta": ("thinking_delta", "thinking"),
    "function_call_arguments.delta": ("input_json_delta", "partial_json"),
}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class BlocksAnswer(Answer):
    """One message."""

    def __init__(self, request: MessagesRequest, model: ServedModel) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._has_metrics = bool(request.include_metrics)
        self._events = _BlockEvents()
        self._output: OutputItems | None = None
        self._counted = Usage(0, None, 0)
        self._head: Json = {"id": self.id, "type": "message", "role": "assistant", "model": request.model or model.name}

    def count(self, prompt_tokens: int, new_tokens: int) -> None:
        self._counted = Usage(prompt_tokens, None, self._counted.completion_tokens + new_tokens)

    def whole(self, results: Sequence[Completion]) -> bytes:
        (result,) = results
        self._output = OutputItems(self.plan.reader(), lambda name, /, **fields: None)
        self._output.feed(result.choices[0].text, is_last=True)
        self._output.close("completed")
        content = [_block(item) for item in self._output.items]
        metrics = {"metrics": metrics_of(results)} if self._has_metrics else {}
        usage = _usage(Usage.of(results))
        return json.dumps({**self._head, "content": content, **self._stop(results), "usage": usage, **metrics}).encode()

    def event(self, index: int, text: str, tokens: Sequence[SampledToken], done: Completion | None) -> bytes:
        if self._output is None:
            self._output = OutputItems(self.plan.reader(), self._events.add)
            empty: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
            usage = _usage(Usage(self._counted.prompt_tokens, None, 0))
            self._events.send("message_start", message={**self._head, **empty, "usage": usage})
        self._output.feed(text, is_last=done is not None)
        return self._events.take()

    def end(self, results: Sequence[Completion]) -> bytes:
        assert self._output is not None
        self._output.close("completed")
        metrics = {"metrics": metrics_of(results)} if self._has_metrics else {}
        usage = _usage(Usage.of(results))
        self._events.send("message_delta", delta=self._stop(results), usage=usage, **metrics)
        self._events.send("message_stop")
        return self._events.take()

    def failure(self, error: ApiError) -> bytes:
        self._events.send("error", **error_json(error))
        return self._events.take()

    def _stop(self, results: Sequence[Completion]) -> Json:
        """Why it ended, in Anthropic's words."""
        (done,) = results[0].choices
        assert self._output is not None
        if done.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(done.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": done.stop_reason}
        has_calls = any(item["type"] == "function_call" for item in self._output.items)
        return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}


class _BlockEvents:
    """The events of one stream: those of items become those of blocks."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []

    def add(self, name: str, /, **fields: Any) -> None:
        """Take an event of `OutputItems`."""
        place = {"index": fields["output_index"]}
        if name == "output_item.added":
            self.send("content_block_start", **place, content_block=_block(fields["item"]))
        elif name == "output_item.done":
            self.send("content_block_stop", **place)
        elif name in _DELTAS:
            kind, key = _DELTAS[name]
            self.send("content_block_delta", **place, delta={"type": kind, key: fields["delta"]})

    def send(self, name: str, /, **fields: Any) -> None:
        content = {"type": name, **fields}
        self._lines.append(f"event: {name}\ndata: {json.dumps(content)}\n\n".encode())

    def take(self) -> bytes:
        """The events that were added after the previous call."""
        data = b"".join(self._lines)
        self._lines.clear()
        return data


def error_json(error: ApiError) -> Json:
    """An error in Anthropic's form."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _block(item: Json) -> Json:
    """The block of an item; one that has just begun is empty."""
    if item["type"] == "function_call":
        return {"type": "tool_use", "id": item["call_id"], "name": item["name"], "input": _input(item["arguments"])}
    text = "".join(part["text"] for part in item["content"])
    if item["type"] == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _input(arguments: str) -> Json:
    """The arguments of a call; those of one that was cut short are empty."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _usage(usage: Usage) -> Json:
    cached = usage.cached_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }
