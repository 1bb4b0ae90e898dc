"""A response: the object that is answered as a whole, or that typed events build up."""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from ingot.runtime.asking.outputs import Completion, SampledToken
from ingot.runtime.server.api.answers import Answer, Json, Usage, metrics_of
from ingot.runtime.server.api.responses.items import as_input_items, messages_of_output
from ingot.runtime.server.api.responses.output import OutputItems
from ingot.runtime.server.api.responses.schemas import ResponseRequest
from ingot.runtime.server.api.responses.store import ResponseStore
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.models.served_models import ServedModel
from ingot.runtime.text.messages import Message

CANCELLED = "cancelled"
_REASONS = {"length": "max_output_tokens"}  # of responses that are incomplete; others have the engine's name


class ItemsAnswer(Answer):
    """One response. With a store it is kept there from the first event of its stream on, or when it is whole.

    conversation   up to the input, without instructions
    """

    def __init__(
        self,
        request: ResponseRequest,
        conversation: Sequence[Message],
        model: ServedModel,
        group: str,
        store: ResponseStore | None,
    ) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._conversation = conversation
        self._model = model
        self._group = group
        self._store = store
        self._body = {**_echo(request), "id": self.id, "model": request.model or model.name, "store": bool(store)}
        self._input_items = as_input_items(request.items) if store else ()
        self._has_metrics = bool(request.include_metrics)
        self._output: OutputItems | None = None
        self._events = _Events()
        self._is_ended = False
        self._counted: Usage | None = None  # what a stream was given so far

    def count(self, prompt_tokens: int, new_tokens: int) -> None:
        before = self._counted.completion_tokens if self._counted else 0
        self._counted = Usage(prompt_tokens, None, before + new_tokens)

    def whole(self, results: Sequence[Completion]) -> bytes:
        (result,) = results
        self._output = OutputItems(self.plan.reader(), lambda name, /, **fields: None)
        self._output.feed(result.choices[0].text, is_last=True)
        self._finish(results)
        if self._store:
            self._keep(self._store)
        return json.dumps(self._body).encode()

    def event(self, index: int, text: str, tokens: Sequence[SampledToken], done: Completion | None) -> bytes:
        if self._output is None:
            self._output = OutputItems(self.plan.reader(), self._events.add)
            self._body["output"] = self._output.items
            self._events.add("created", response=self._body)
            self._events.add("in_progress", response=self._body)
            if self._store:
                self._keep(self._store)
        self._output.feed(text, is_last=done is not None)
        return self._events.take()

    def end(self, results: Sequence[Completion]) -> bytes:
        self._finish(results)
        self._events.add(self._body["status"], response=self._body)
        self._update()
        return self._events.take()

    def failure(self, error: ApiError) -> bytes:
        self._close_early()
        self._is_ended = True
        self._body["status"] = CANCELLED if error.code == CANCELLED else "failed"
        code = error.code if error.status < 500 else "server_error"
        self._body["error"] = {"code": code, "message": str(error)}
        self._events.add("failed", response=self._body)
        self._update()
        return self._events.take()

    def ends_early(self) -> None:
        if not self._is_ended:
            self._close_early()
            self._body["status"] = CANCELLED
            self._update()

    def _close_early(self) -> None:
        """Close the output of a response that will get no more."""
        if self._output and not self._is_ended:
            self._output.close("incomplete")
            if self._counted:
                self._body["usage"] = self._usage(self._counted, self._output.items)

    def _finish(self, results: Sequence[Completion]) -> None:
        """Close the output, and say how it ended."""
        (done,) = results[0].choices
        is_complete = done.finish_reason == "stop"
        assert self._output is not None
        self._output.end("completed" if is_complete else "incomplete")
        self._is_ended = True
        reason = None if is_complete else {"reason": _REASONS.get(done.finish_reason, done.finish_reason)}
        self._body |= {
            "status": "completed" if is_complete else "incomplete",
            "completed_at": int(time.time()) if is_complete else None,
            "incomplete_details": reason,
            "output": self._output.items,
            "usage": self._usage(Usage.of(results), self._output.items),
            **({"metrics": metrics_of(results)} if self._has_metrics else {}),
        }

    def _usage(self, usage: Usage, items: Sequence[Json]) -> Json:
        thoughts = [part["text"] for item in items if item["type"] == "reasoning" for part in item["content"]]
        num_thought = sum(len(self._model.tokenizer.encode(text, add_special_tokens=False)) for text in thoughts)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": min(num_thought, usage.completion_tokens)},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _keep(self, store: ResponseStore) -> None:
        conversation = self._conversation
        if self._is_ended:
            conversation = messages_of_output(self._body["output"], conversation)
        store.put(self._group, self._body, conversation, self._input_items)

    def _update(self) -> None:
        """Keep the end of a response that is kept: a client may have deleted it meanwhile."""
        if self._store and self._store.has(self._group, self.id):
            self._keep(self._store)


class _Events:
    """The events of one stream. It knows neither the answer nor its output, which use it: they leave no cycle."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._count = 0

    def add(self, name: str, /, **fields: Any) -> None:
        content = {"type": f"response.{name}", "sequence_number": self._count, **fields}
        self._count += 1
        self._lines.append(f"event: response.{name}\ndata: {json.dumps(content)}\n\n".encode())

    def take(self) -> bytes:
        """The events that were added after the previous call."""
        data = b"".join(self._lines)
        self._lines.clear()
        return data


def _echo(request: ResponseRequest) -> Json:
    """The response before anything is generated: what was asked for, defaults filled in."""
    text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {}
    tools = [each.model_dump() for each in request.tools or ()]
    choice = request.tool_choice
    return {
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "tools": tools,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }
