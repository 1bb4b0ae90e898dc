"""What the endpoints that generate differ in: how a body is read, and the form of the answer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ingot.runtime.server.api.answers import Answer, AnswerForm, ChatForm, ChoicesAnswer, CompletionForm
from ingot.runtime.server.api.bodies import parse
from ingot.runtime.server.api.request_schemas import ChatRequest, CompletionRequest, Generation, Sampling
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.http.rate_limits import Holder
from ingot.runtime.server.models.chat import Chat
from ingot.runtime.server.models.served_models import ServedModel
from ingot.runtime.text.messages import Message


@dataclass(frozen=True)
class Asked:
    """A request, and what is to be continued: a conversation, or prompts, texts or token ids.

    conversation   of a response: all messages but its instructions
    """

    request: Sampling
    prompt: Chat | Sequence[str | list[int]]
    conversation: Sequence[Message] = ()


class Api(ABC):
    """An endpoint that generates. `operation` is its name in records and traces; `is_lenient`: see `bodies.parse`."""

    operation: Literal["chat", "text_completion"]
    schema: type[Sampling]

    def __init__(self, *, is_lenient: bool = False) -> None:
        self._is_lenient = is_lenient

    @abstractmethod
    def read(self, body: bytes, holder: Holder) -> Asked:
        """The request in a body. ApiError for one that cannot be served."""

    @abstractmethod
    def answer(self, asked: Asked, model: ServedModel, holder: Holder) -> Answer:
        """An answer of which nothing is written yet."""

    def error(self, error: ApiError) -> Mapping[str, object]:
        """The body of an answer that is an error."""
        return error.as_json()


class CompletionApi(Api):
    """POST /v1/completions."""

    operation = "text_completion"
    schema = CompletionRequest

    def read(self, body: bytes, holder: Holder) -> Asked:
        request = parse(CompletionRequest, body, is_lenient=self._is_lenient)
        return Asked(request, request.prompts)

    def answer(self, asked: Asked, model: ServedModel, holder: Holder) -> Answer:
        return _choices(CompletionForm(), asked, model)


class ChatApi(Api):
    """POST /v1/chat/completions."""

    operation = "chat"
    schema = ChatRequest

    def read(self, body: bytes, holder: Holder) -> Asked:
        request = parse(ChatRequest, body, is_lenient=self._is_lenient)
        return Asked(request, request.chat)

    def answer(self, asked: Asked, model: ServedModel, holder: Holder) -> Answer:
        return _choices(ChatForm(), asked, model)


def _choices(form: AnswerForm, asked: Asked, model: ServedModel) -> ChoicesAnswer:
    request = asked.request
    assert isinstance(request, Generation)
    name = request.model or model.name
    return ChoicesAnswer(
        form,
        model,
        name,
        has_usage=request.includes_usage,
        counts_tokens=request.counts_tokens,
        has_metrics=bool(request.include_metrics),
        stop_token_ids=request.stop_token_ids or (),
    )
