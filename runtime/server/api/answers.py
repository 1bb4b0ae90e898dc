"""Answers in the forms of OpenAI's API: whole, and as the chunks of a stream.

Each endpoint has an `AnswerForm`. It has no state: what was sent so far of a choice is in `ChoiceProgress`, and how the
reply of a chat is read in the answer's `plan`. What all endpoints' answers have in common is `Answer`.
"""

import codecs
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from ingot.runtime.asking.outputs import Completion, SampledToken, TokenLogprob
from ingot.runtime.server.api.answer_schemas import ChatLogprobs, CompletionLogprobs, LikelyToken
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.http.response_writer import sse
from ingot.runtime.server.models.chat import ReplyPlan, ReplyReader
from ingot.runtime.server.models.served_models import ServedModel, TokenText
from ingot.runtime.server.watch.request_log import numbers_of

Json = dict[str, Any]
Logprobs = CompletionLogprobs | ChatLogprobs
_DONE = b"data: [DONE]\n\n"
_Decoder = codecs.getincrementaldecoder("utf-8")
_ANY_TEXT = "\0the text\0"  # no model has a name like it


@dataclass
class ChoiceProgress:
    """How far the answer for one choice has been sent: whether it has begun, and the length of its reported tokens.

    `decoder` counts them, because a character may take several tokens.

    `reader` reads a chat's reply; None where its text is the content. `around_text` is what an event has before its
    text and after it, where events differ in nothing else.
    """

    has_begun: bool = False
    num_chars: int = 0
    decoder: codecs.IncrementalDecoder = field(
        default_factory=partial(codecs.getincrementaldecoder("utf-8"), "replace")
    )
    reader: ReplyReader | None = None
    around_text: tuple[bytes, bytes] | None = None

    @property
    def finish_reason(self) -> str | None:
        """The reason in place of that an output ended by itself; None: that one."""
        return "tool_calls" if self.reader and self.reader.ends_with_calls else None


class AnswerForm(Protocol):
    """How choices are written."""

    whole: str
    chunk: str
    id_prefix: str

    def choice(self, text: str, logprobs: Logprobs | None, progress: ChoiceProgress) -> Json:
        """The fields of a whole choice, besides its index and reason."""
        ...

    def delta(self, text: str, logprobs: Logprobs | None, progress: ChoiceProgress, *, is_last: bool) -> Json | None:
        """The fields of a choice in a chunk, besides its index and reason; None where there is nothing to show."""
        ...

    def logprobs(self, model: ServedModel, tokens: Sequence[SampledToken], progress: ChoiceProgress) -> Logprobs:
        """Log-probabilities of tokens."""
        ...


class CompletionForm:
    """/v1/completions."""

    whole = chunk = "text_completion"
    id_prefix = "cmpl"

    def choice(self, text: str, logprobs: Logprobs | None, progress: ChoiceProgress) -> Json:
        return {"text": text, "logprobs": logprobs}

    def delta(self, text: str, logprobs: Logprobs | None, progress: ChoiceProgress, *, is_last: bool) -> Json | None:
        return self.choice(text, logprobs, progress) if text or logprobs or is_last else None

    def logprobs(
        self, model: ServedModel, tokens: Sequence[SampledToken], progress: ChoiceProgress
    ) -> CompletionLogprobs:
        offsets = []
        for token in tokens:
            offsets.append(progress.num_chars)
            progress.num_chars += len(progress.decoder.decode(model.token_text(token.token_id).data))
        return {
            "tokens": [_key(model.token_text(token.token_id)) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [_top(model, token) for token in tokens],
            "text_offset": offsets,
        }


def _top(model: ServedModel, token: SampledToken) -> dict[str, float | None] | None:
    """The most likely tokens and the sampled one, as OpenAI has it; None for the first token of a prompt."""
    if token.logprob is None:
        return None
    found: dict[str, float | None] = {}
    for each in (*token.top, TokenLogprob(token.token_id, token.logprob)):
        found.setdefault(_key(model.token_text(each.token_id)), _finite(each.logprob))
    return found


def _key(token: TokenText) -> str:
    """The text of a token; as OpenAI writes it, the bytes of one that is not text by itself."""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data) if "\ufffd" in token.text else token.text


class ChatForm:
    """/v1/chat/completions."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def choice(self, text: str, logprobs: Logprobs | None, progress: ChoiceProgress) -> Json:
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if progress.reader:
            read = progress.reader.read(text, is_last=True)
            calls = [{name: value for name, value in call.items() if name != "index"} for call in read.calls]
            message["content"] = read.content or (None if calls else "")
            message |= {"reasoning_content": read.reasoning} if read.reasoning else {}
            message |= {"tool_calls": calls} if calls else {}
        return {"message": message, "logprobs": logprobs}

    def delta(self, text: str, logprobs: Logprobs | None, progress: ChoiceProgress, *, is_last: bool) -> Json | None:
        delta: Json = {} if progress.has_begun else {"role": "assistant"}
        if progress.reader is None:
            return {"delta": {**delta, "content": text}, "logprobs": logprobs} if text or logprobs or is_last else None
        read = progress.reader.read(text, is_last=is_last)
        if not (read or logprobs or is_last):
            return None
        delta |= {"content": read.content} if read.content else {}
        delta |= {"reasoning_content": read.reasoning} if read.reasoning else {}
        delta |= {"tool_calls": read.calls} if read.calls else {}
        return {"delta": delta, "logprobs": logprobs}

    def logprobs(self, model: ServedModel, tokens: Sequence[SampledToken], progress: ChoiceProgress) -> ChatLogprobs:
        return {
            "content": [
                {
                    **_chat_token(model, token.token_id, token.logprob),
                    "top_logprobs": [_chat_token(model, each.token_id, each.logprob) for each in token.top],
                }
                for token in tokens
            ],
            "refusal": None,
        }


def _chat_token(model: ServedModel, token_id: int, logprob: float | None) -> LikelyToken:
    text, data = model.token_text(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float | None) -> float | None:
    """A number that JSON has: OpenAI's for a token that the model forbids is -9999."""
    return None if logprob is None else max(logprob, -9999.0)


@dataclass(frozen=True)
class Usage:
    """Tokens of a request; None: not known yet.

    Each prompt counts once, whatever the number of its choices. Candidates of `best_of` count, returned or not.
    """

    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int

    @classmethod
    def of(cls, results: Sequence[Completion]) -> "Usage":
        """The tokens of the results of a request's prompts."""
        return cls(
            sum(result.prompt_tokens for result in results),
            sum(result.cached_tokens for result in results),
            sum(result.generated_tokens for result in results),
        )

    def as_json(self) -> Json:
        """In OpenAI's form."""
        cached = None if self.cached_tokens is None else {"cached_tokens": self.cached_tokens}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            **({"prompt_tokens_details": cached} if cached else {}),
        }


def metrics_of(results: Sequence[Completion]) -> Json:
    """The metrics that `include_metrics` adds to an answer: times, and where its tokens came from."""
    metrics = [choice.metrics for result in results for choice in result.choices]
    tiers = [result.cached_tokens_by_tier for result in results]
    return {
        **numbers_of(results),
        "cached_tokens": {name: sum(getattr(each, name) for each in tiers) for name in ("device", "host", "disk")},
        "drafted_tokens": sum(each.num_drafted_tokens for each in metrics),
        "accepted_tokens": sum(each.num_accepted_tokens for each in metrics),
    }


class Answer(ABC):
    """One answer to a request, whole or as the events of a stream. `plan` says how replies are read."""

    id: str
    plan: ReplyPlan = ReplyPlan()

    @abstractmethod
    def whole(self, results: Sequence[Completion]) -> bytes:
        """The body of an answer that is not streamed; the results are those of the prompts, in order."""

    def count(self, prompt_tokens: int, new_tokens: int) -> None:  # noqa: B027 (most answers count at their end)
        """Take note of the tokens of all prompts, and of new ones of the output whose events follow."""

    @abstractmethod
    def event(self, index: int, text: str, tokens: Sequence[SampledToken], done: Completion | None) -> bytes:
        """The events of a stream for what one choice got, or b"" where that is nothing to show.

        `tokens` are those to report with their log-probabilities, `done` is the choice's completion at its end.
        """

    @abstractmethod
    def end(self, results: Sequence[Completion]) -> bytes:
        """The last events of a stream that was served to its end."""

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        return sse(error.as_json())

    def ends_early(self) -> None:  # noqa: B027 (most answers are not kept)
        """Take note that there will be no answer, or not all of it."""


class Echo(NamedTuple):
    """A prompt that its choices begin with: its text, and its first token, which has no log-probability."""

    text: str
    first_token: int


class ChoicesAnswer(Answer):
    """The answer of completions and of chats: choices in the form of the endpoint.

    `has_usage`: a stream ends with the numbers of tokens; `counts_tokens`: its events have those so far;
    `has_metrics`: the answer has the request's metrics, a stream in its last event, with the numbers of tokens.
    `stop_token_ids` are the request's own: where another token ends a choice, its stop_reason is null, as vLLM's.
    `echoes` has the prompt of each choice where the answer repeats them; with `scores_only` it has nothing else.
    """

    echoes: Sequence[Echo] = ()
    scores_only = False

    def __init__(
        self,
        form: AnswerForm,
        model: ServedModel,
        name: str,
        *,
        has_usage: bool,
        counts_tokens: bool = False,
        has_metrics: bool = False,
        stop_token_ids: Collection[int] = (),
    ) -> None:
        self.id = f"{form.id_prefix}-{uuid.uuid4().hex}"
        self._form = form
        self._model = model
        self._has_usage = has_usage
        self._has_metrics = has_metrics
        self._stop_token_ids = stop_token_ids
        self._usage_so_far = Usage(0, None, 0) if counts_tokens else None
        self._streamed: dict[int, ChoiceProgress] = {}
        self._head: Json = {"id": self.id, "object": form.chunk, "created": int(time.time()), "model": name}

    def _progress(self) -> ChoiceProgress:
        return ChoiceProgress(reader=self.plan.reader())

    def whole(self, results: Sequence[Completion]) -> bytes:
        choices: list[Json] = []
        for result in results:
            for done in result.choices:
                progress = self._progress()
                text, tokens = self._with_prompt(len(choices), done)
                logprobs = tokens and self._form.logprobs(self._model, tokens, progress)
                content = self._form.choice(text, logprobs or None, progress)
                choices.append({"index": len(choices), **content, **self._end(done, progress)})
        head = {**self._head, "object": self._form.whole}
        return json.dumps({**head, "choices": choices, **self._numbers(results)}).encode()

    def _with_prompt(self, index: int, done: Completion) -> tuple[str, Sequence[SampledToken]]:
        """The text of a whole choice, and the tokens to report with their log-probabilities."""
        text, tokens = ("", ()) if self.scores_only else (done.text, done.logprobs or ())
        if not self.echoes:
            return text, tokens
        echo = self.echoes[index]
        if done.prompt_logprobs is None:
            return echo.text + text, tokens
        return echo.text + text, (SampledToken(echo.first_token), *done.prompt_logprobs, *tokens)

    def count(self, prompt_tokens: int, new_tokens: int) -> None:
        if self._usage_so_far:
            shown = 0 if self.scores_only else new_tokens
            self._usage_so_far = Usage(prompt_tokens, None, self._usage_so_far.completion_tokens + shown)

    def event(self, index: int, text: str, tokens: Sequence[SampledToken], done: Completion | None) -> bytes:
        if self.scores_only:
            text, tokens = "", ()
        progress = self._streamed.get(index)
        if progress is None:
            progress = self._streamed[index] = self._progress()
            text = self.echoes[index].text + text if self.echoes else text
        if progress.around_text and text and not tokens and done is None:
            return progress.around_text[0] + _json_text(text) + progress.around_text[1]
        logprobs = self._form.logprobs(self._model, tokens, progress) if tokens else None
        content = self._form.delta(text, logprobs, progress, is_last=done is not None)
        if content is None:
            return b""
        progress.has_begun = True
        end = {"finish_reason": None} if done is None else self._end(done, progress)
        if progress.reader is None and not tokens and done is None and self._usage_so_far is None:
            plain = self._form.delta(_ANY_TEXT, None, progress, is_last=False)
            before, after = self._chunk({"index": index, **(plain or {}), **end}).split(_json_text(_ANY_TEXT))
            progress.around_text = before, after
        return self._chunk({"index": index, **content, **end})

    def _chunk(self, choice: Json) -> bytes:
        so_far = self._usage_so_far and self._usage_so_far.as_json()
        usage: Json = {"usage": so_far} if self._has_usage else {}
        return sse({**self._head, "choices": [choice], **usage})

    def end(self, results: Sequence[Completion]) -> bytes:
        if not self._has_usage and not self._has_metrics:
            return _DONE
        return sse({**self._head, "choices": [], **self._numbers(results)}) + _DONE

    def _end(self, done: Completion, progress: ChoiceProgress) -> Json:
        if self.scores_only and done.finish_reason == "stop":  # by the token that is not shown
            return {"finish_reason": "length", "stop_reason": None}
        reason = (progress.finish_reason if done.finish_reason == "stop" else None) or done.finish_reason
        stop = done.stop_reason
        is_own = isinstance(stop, str) or stop in self._stop_token_ids
        return {"finish_reason": reason, "stop_reason": stop if is_own else None}

    def _numbers(self, results: Sequence[Completion]) -> Json:
        metrics = {"metrics": metrics_of(results)} if self._has_metrics else {}
        usage = Usage.of(results)
        usage = replace(usage, completion_tokens=0) if self.scores_only else usage
        return {"usage": usage.as_json(), **metrics}


def _json_text(text: str) -> bytes:
    return json.dumps(text).encode()
