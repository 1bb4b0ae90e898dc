"""A request in the engine: its sequence, sampler, text so far and timings, and the check where it ends.

Text that could be the beginning of a stop string is held back, and shown as soon as it cannot become one. The outcome
depends on the text alone, not on how tokens split it.
"""

from array import array
from collections.abc import Collection
from dataclasses import replace
from math import fsum
from typing import NamedTuple

import numpy as np

from ingot.artifact import ModelFacts
from ingot.errors import EngineError, IngotError, RequestError, RequestFailed
from ingot.runtime.adapters import Adapter
from ingot.runtime.asking.outputs import Completion, EarlyEnd, FinishReason, RequestMetrics, RequestOutput, SampledToken
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.constraints.compiler import Grammar
from ingot.runtime.constraints.matcher import Matcher
from ingot.runtime.forward_batch import FloatArray, Int64Array
from ingot.runtime.kv.keys import PrefixScope
from ingot.runtime.kv.transfers.restored_prefix import CachedTokens
from ingot.runtime.requests.engine_request import EngineRequest
from ingot.runtime.requests.sampler import NonFiniteLogits, Sampler, sampled_in_batch, sampled_on_device
from ingot.runtime.scheduling.sequence import Sequence
from ingot.runtime.text.detokenizer import Detokenizer
from ingot.runtime.text.tokenizer import Tokenizer

# Tokens of the prompt that the detokenizer gets as context; no character is spread over more.
_CONTEXT_TOKENS = 16


class StopUpdate(NamedTuple):
    """The outcome of one token: text to show, and whether and why the sequence has ended.

    `matched` is the stop string or the id of the end token that ended it; None otherwise.
    """

    text: str
    finish_reason: FinishReason | None = None
    matched: str | int | None = None


class StopChecker:
    """Decides after every token of one sequence whether it ends.

    End tokens (the model's, unless `ignore_eos`, and `stop_token_ids`) give no text. Without a detokenizer there is no
    text at all, and stop strings are refused with RequestError. They are not looked for in the text of the first
    `min_tokens` tokens.
    """

    def __init__(
        self, params: SamplingParams, eos_token_ids: Collection[int], detokenizer: Detokenizer | None = None
    ) -> None:
        if params.stop and detokenizer is None:
            raise RequestError(
                f"stop is {params.stop!r}, but there is no tokenizer to make text; use stop_token_ids instead",
                field="stop",
            )
        model_ends = () if params.ignore_eos else eos_token_ids
        self.end_tokens = frozenset(model_ends) | frozenset(params.stop_token_ids)
        self._max_tokens = params.max_tokens
        self._min_tokens = params.min_tokens
        self._detokenizer = detokenizer
        self._scanner = StopScanner(params.stop)
        self._num_tokens = 0

    def push(self, token_id: int) -> StopUpdate:
        """Process the next generated token. Must not be called again after a finish reason."""
        self._num_tokens += 1
        if token_id in self.end_tokens:
            return self._finish("", "stop", token_id)
        text = self._detokenizer.push(token_id) if self._detokenizer else ""
        if self._num_tokens == self._max_tokens:
            return self._finish(text, "length", None)
        if self._num_tokens <= self._min_tokens:
            return StopUpdate(text)
        shown, stop = self._scanner.push(text)
        return StopUpdate(shown, "stop" if stop else None, stop)

    def end(self) -> StopUpdate:
        """End a sequence after the last token although it is not an end token: its text is complete."""
        return self._finish("", "stop", None)

    def flush(self) -> str:
        """Text held back so far, for a sequence that is aborted."""
        return self._finish("", "abort", None).text

    def _finish(self, text: str, reason: FinishReason, matched: int | None) -> StopUpdate:
        """End here, unless a stop string in the last text ends it earlier."""
        text += self._detokenizer.flush() if self._detokenizer else ""
        if self._num_tokens <= self._min_tokens:
            return StopUpdate(text, reason, matched)
        shown, stop = self._scanner.push(text)
        if stop:
            return StopUpdate(shown, "stop", stop)
        return StopUpdate(shown + self._scanner.flush(), reason, matched)


class StopScanner:
    """Searches text that arrives in pieces for stop strings, in time linear in the text (Knuth, Morris, Pratt 1977).

    Held-back text is always the beginning of a stop string, so it is not stored.
    """

    def __init__(self, stop: Collection[str]) -> None:
        self._prefixes = [_MatchedPrefix(text) for text in stop]
        self._firsts = {text[0] for text in stop}
        self._held = ""  # the stop string whose beginning is held back
        self._num_held = 0

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string that ended it, if any.

        The stop string that is complete first wins; of those complete at the same character, the longest.
        """
        if not self._num_held and self._firsts.isdisjoint(text):
            return text, None
        for end, character in enumerate(text, self._num_held + 1):
            complete = [prefix.text for prefix in self._prefixes if prefix.push(character)]
            if complete:
                stop = max(complete, key=len)
                shown, self._num_held = self._shown(text, end - len(stop)), 0
                return shown, stop
        longest = max(self._prefixes, key=lambda prefix: prefix.length)
        shown = self._shown(text, self._num_held + len(text) - longest.length)
        self._held, self._num_held = longest.text, longest.length
        return shown, None

    def flush(self) -> str:
        """Text held back, once no text follows it."""
        held, self._num_held = self._held[: self._num_held], 0
        return held

    def _shown(self, text: str, length: int) -> str:
        """The first characters of the held-back text and the text after it."""
        return self._held[: min(length, self._num_held)] + text[: max(0, length - self._num_held)]


class _MatchedPrefix:
    """The longest beginning of one stop string that the text so far ends with.

    `_borders` grows with the longest match, not with the stop string: for each length, the longest shorter beginning
    that the beginning of that length ends with.
    """

    __slots__ = ("_borders", "length", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0
        self._borders = [0]

    def push(self, character: str) -> bool:
        """Match one more character; True where it completes the stop string."""
        self.length = self._extended(self.length, character)
        while len(self._borders) < self.length:
            self._borders.append(self._extended(self._borders[-1], self.text[len(self._borders)]))
        return self.length == len(self.text)

    def _extended(self, length: int, character: str) -> int:
        while length and self.text[length] != character:
            length = self._borders[length - 1]
        return length + (self.text[length] == character)


def _check_tokens(params: SamplingParams, model: ModelFacts) -> None:
    """RequestError for a bias or an allowed token that is not in the vocabulary."""
    for name, tokens in (("logit_bias", dict(params.logit_bias)), ("allowed_token_ids", params.allowed_token_ids)):
        largest = max(tokens or (), default=0)
        if largest >= model.vocab_size:
            raise RequestError(
                f"{name} names token {largest}; the model's token ids go from 0 to {model.vocab_size - 1}", field=name
            )


def _check_ends(params: SamplingParams, end_tokens: Collection[int]) -> None:
    """RequestError where `min_tokens` forbids all tokens that are allowed."""
    if params.min_tokens and params.allowed_token_ids and not set(params.allowed_token_ids) - set(end_tokens):
        raise RequestError(
            f"min_tokens is {params.min_tokens}, and allowed_token_ids has end tokens alone; allow another token",
            field="allowed_token_ids",
        )


class Request:
    """One choice or beam of what was asked, while it is served. `sequence` is the scheduler's view of it.

    `max_tokens` is limited to what the prompt leaves of the model's context. The sequence's id is that of the request,
    except in choices after the first. `grammar` is the compiled constraint of the parameters; the request ends when its
    text is complete and nothing can follow.
    """

    def __init__(
        self,
        request_id: int,
        asked: EngineRequest,
        params: SamplingParams,
        model: ModelFacts,
        tokenizer: Tokenizer | None,
        eos_token_ids: Collection[int],
        *,
        scope: PrefixScope,
        index: int = 0,
        sequence_id: int | None = None,
        grammar: Grammar | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        _check_tokens(params, model)
        prompt, options = asked.token_ids, asked.options
        num_left = model.context_tokens - len(prompt)
        most = min(params.max_tokens, num_left)
        if most < params.max_tokens:
            params = replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
        detokenizer = _detokenizer(tokenizer, params, prompt) if tokenizer else None
        self.id = request_id
        self.index = index
        self.sequence = Sequence.of(
            request_id if sequence_id is None else sequence_id,
            array("q", prompt.tobytes()),
            params.max_tokens,
            scope=scope,
            priority=int(options.priority),
            group=options.group,
            adapter=adapter,
        )
        self.sequence.reuse_prefix = params.prompt_logprobs is None or index > 0 or len(prompt) == 1
        self._prompt_tokens: list[SampledToken] = []  # from the second on
        self._stop = StopChecker(params, eos_token_ids, detokenizer)
        ends = [token for token in self._stop.end_tokens if token < model.vocab_size]
        _check_ends(params, ends)
        self.sampler = Sampler(params, self.sequence.tokens, ends)
        self.matcher = grammar.matcher(self._stop.end_tokens) if grammar else None
        self._texts: list[str] = []
        self._tokens: list[SampledToken] = []
        self._logits: list[FloatArray] | None = [] if asked.keep_logits else None
        self.speculate = options.speculate
        self.adapter_name = options.adapter
        self.needs_logits = asked.keep_logits or not sampled_on_device(params)  # on the host, to sample there
        self.reads_logits = asked.keep_logits or not sampled_in_batch(params)  # itself, on the host
        self.is_beam = False  # of a search, whose result has its output
        assert asked.arrival_seconds is not None
        self.arrival_seconds = asked.arrival_seconds
        timeout = options.timeout_seconds
        self.deadline_seconds = None if timeout is None else self.arrival_seconds + float(timeout)
        self._num_drafted = self._num_accepted = 0  # tokens
        self._first_scheduled_seconds: float | None = None
        self._last_scheduled_seconds = self._paused_seconds = 0.0
        self._num_pauses = 0
        self._first_token_seconds: float | None = None
        self.last_token_seconds: float | None = None

    @property
    def tokens(self) -> tuple[SampledToken, ...]:
        """The generated tokens."""
        return tuple(self._tokens)

    @property
    def num_own_prompt_tokens(self) -> int:
        """Tokens of the prompt; 0 for choices that share that of the first."""
        return 0 if self.index else self.sequence.num_prompt_tokens

    def scheduled(self, now: float) -> None:
        """Record that a step has one of its tokens."""
        if self._first_scheduled_seconds is None:
            self._first_scheduled_seconds = now
        elif self._num_pauses < self.sequence.num_preemptions:
            self._paused_seconds += now - self._last_scheduled_seconds
        self._num_pauses = self.sequence.num_preemptions
        self._last_scheduled_seconds = now

    def drafted(self, num_tokens: int) -> None:
        """Record that a step verifies so many drafted tokens."""
        self._num_drafted += num_tokens

    def accepted(self) -> None:
        """Record that its next token is as drafted."""
        self._num_accepted += 1

    def follow(self, first: "Request") -> None:
        """Record that another request's steps computed the prompt."""
        self._first_scheduled_seconds = first._first_scheduled_seconds
        self._prompt_tokens = first._prompt_tokens

    def read_prompt(self, start: int, rows: list[FloatArray | int]) -> None:
        """Read the logits [vocab] after the prompt's tokens from `start` on. Raises NonFiniteLogits.

        A sequence that was preempted computes the same tokens again, to the same logits.
        """
        for row, position in zip(rows, range(start + 1, start + 1 + len(rows)), strict=True):
            if position == len(self._prompt_tokens) + 1:
                assert not isinstance(row, int)
                self._prompt_tokens.append(self.sampler.known(row, self.sequence.tokens[position]))
        self.sequence.reuse_prefix = len(self._prompt_tokens) + 1 == self.sequence.num_prompt_tokens

    def sample(self, row: FloatArray | int) -> SampledToken:
        """The next token: from logits [vocab], or as sampled on the device. Raises NonFiniteLogits."""
        if isinstance(row, int):
            if row < 0:
                raise NonFiniteLogits("a logit is not finite")
            return SampledToken(row)
        mask = self.matcher.mask() if self.matcher else None
        token = self.sampler.sample(row, self.sequence.generated, mask)
        if self._logits is not None:
            self._logits.append(row.copy())
        return token

    def push(self, token: SampledToken, now: float) -> RequestOutput:
        """Append the sampled token; the output has a completion if the token was the last."""
        if self._first_token_seconds is None:
            self._first_token_seconds = now
        self.last_token_seconds = now
        self.sequence.tokens.append(token.token_id)
        self._tokens.append(token)
        update = self._stop.push(token.token_id)
        if self.matcher and token.token_id not in self._stop.end_tokens:
            update = self._follow(self.matcher, token.token_id, update)
        self._texts.append(update.text)
        completion = self._complete(update.finish_reason, update.matched, now) if update.finish_reason else None
        return self._output(update.text, (token,), completion)

    def _follow(self, matcher: Matcher, token_id: int, update: StopUpdate) -> StopUpdate:
        """Advance the constraint; ends the request where nothing can follow, also with its last token."""
        matcher.consume(token_id)
        if not matcher.is_complete or update.finish_reason == "stop":
            return update
        if update.finish_reason:
            return update._replace(finish_reason="stop")
        last = self._stop.end()
        return last._replace(text=update.text + last.text)

    def extend(self, token_id: int) -> None:
        """Append the next token of a beam, whose output is made at the end of its search."""
        self.sequence.tokens.append(token_id)
        if self.matcher:
            self.matcher.consume(token_id)

    def abort(self, now: float, reason: EarlyEnd = "abort") -> RequestOutput:
        """End the request early; the output has the text that was held back."""
        text = self._stop.flush()
        self._texts.append(text)
        return self._output(text, (), self._complete(reason, None, now))

    def fail(self, error: Exception, now: float) -> RequestOutput:
        """End the request with an error of its own. Text that was held back is lost: it may be what failed."""
        said = str(error) if isinstance(error, IngotError) else f"{type(error).__name__}: {error}"
        choice = f"choice {self.index} of " if self.sampler.params.num_samples > 1 else ""
        message = f"{choice}request {self.id} failed after {len(self._tokens)} tokens: {said}"
        failure = RequestFailed(message, field=getattr(error, "field", None))
        failure.__cause__ = error
        return self.end_with(failure, now)

    def end_with(self, error: EngineError, now: float) -> RequestOutput:
        """End the request with the error of its engine."""
        return self._output("", (), self._complete("error", None, now, error))

    def _output(self, text: str, tokens: tuple[SampledToken, ...], completion: Completion | None) -> RequestOutput:
        return RequestOutput(self.id, text, tokens, completion, result=completion, index=self.index)

    def _complete(
        self, reason: FinishReason, matched: str | int | None, now: float, error: EngineError | None = None
    ) -> Completion:
        tokens = self._tokens
        return Completion(
            request_id=self.id,
            text="".join(self._texts),
            token_ids=tuple(token.token_id for token in tokens),
            finish_reason=reason,
            stop_reason=matched,
            prompt_tokens=self.sequence.num_prompt_tokens,
            cached_tokens_by_tier=self.sequence.cached_tokens or CachedTokens(),
            seed=self.sampler.seed,
            metrics=RequestMetrics(
                self.arrival_seconds,
                self._first_scheduled_seconds,
                self._first_token_seconds,
                now,
                len(tokens),
                self.sequence.num_preemptions,
                self._num_drafted,
                self._num_accepted,
                self._paused_seconds,
            ),
            logprobs=tuple(tokens) if self.sampler.params.logprobs is not None else None,
            prompt_logprobs=tuple(self._prompt_tokens) if self.sampler.params.prompt_logprobs is not None else None,
            logits=np.array(self._logits, np.float32) if self._logits is not None else None,  # [generated, vocab]
            error=error,
            index=self.index,
            mean_logprob=_mean_logprob(tokens),
        )


def _detokenizer(tokenizer: Tokenizer, params: SamplingParams, prompt: Int64Array) -> Detokenizer:
    return tokenizer.detokenizer(
        prompt[-_CONTEXT_TOKENS:].tolist(),
        skip_special_tokens=params.skip_special_tokens,
        kept=params.keep_special_tokens,
    )


def _mean_logprob(tokens: list[SampledToken]) -> float | None:
    """Mean log-probability of tokens; None without tokens or where theirs is unknown."""
    logprobs = [token.logprob for token in tokens if token.logprob is not None]
    return fsum(logprobs) / len(logprobs) if logprobs else None
