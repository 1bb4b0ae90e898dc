"""A request in the engine: its sequence, sampler, text so far, and timings."""

from array import array
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from ingot.artifact import ModelFacts
from ingot.runtime.batch import FloatArray, Int64Array
from ingot.runtime.outputs import Completion, FinishReason, RequestMetrics, RequestOutput
from ingot.runtime.sampler import SampledToken, Sampler, sampled_on_device
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.scheduler import Sequence
from ingot.runtime.stopping import StopChecker
from ingot.runtime.text.tokenizer import Tokenizer

# Tokens of the prompt that the detokenizer gets as context; no character is spread over more.
_CONTEXT_TOKENS = 16


class Request:
    """One request. `sequence` is the scheduler's view of it.

    `max_tokens` is limited to what the prompt leaves of the model's context.
    """

    def __init__(
        self,
        request_id: int,
        prompt: Int64Array,
        params: SamplingParams,
        model: ModelFacts,
        tokenizer: Tokenizer | None,
        eos_token_ids: Collection[int],
        *,
        keep_logits: bool,
        now: float,
    ) -> None:
        num_left = model.context_tokens - len(prompt)
        params = replace(params, max_tokens=min(params.max_tokens, num_left))
        detokenizer = tokenizer.detokenizer(prompt[-_CONTEXT_TOKENS:].tolist()) if tokenizer else None
        self.sequence = Sequence.of(request_id, array("q", prompt.tobytes()), params.max_tokens)
        self.sampler = Sampler(params, self.sequence.tokens)
        self._stop = StopChecker(params, eos_token_ids, detokenizer)
        self._texts: list[str] = []
        self._tokens: list[SampledToken] = []
        self._logits: list[FloatArray] | None = [] if keep_logits else None
        self.needs_logits = keep_logits or not sampled_on_device(params)  # on the host, to sample there
        self._arrival_seconds = now
        self.first_scheduled_seconds: float | None = None
        self._first_token_seconds: float | None = None

    def sample(self, logits: FloatArray) -> SampledToken:
        """Sample the next token from logits [vocab]."""
        if self._logits is not None:
            self._logits.append(logits.copy())
        return self.sampler.sample(logits, self.sequence.generated)

    def push(self, token: SampledToken, now: float) -> RequestOutput:
        """Append the sampled token; the output has a completion if the token was the last."""
        if self._first_token_seconds is None:
            self._first_token_seconds = now
        self.sequence.tokens.append(token.token_id)
        self._tokens.append(token)
        update = self._stop.push(token.token_id)
        self._texts.append(update.text)
        completion = self._complete(update.finish_reason, update.matched, now) if update.finish_reason else None
        return RequestOutput(self.sequence.id, update.text, (token,), completion)

    def abort(self, now: float) -> RequestOutput:
        """End the request early; the output has the text that was held back."""
        text = self._stop.flush()
        self._texts.append(text)
        return RequestOutput(self.sequence.id, text, (), self._complete("abort", None, now))

    def _complete(self, reason: FinishReason, matched: str | int | None, now: float) -> Completion:
        tokens = self._tokens
        return Completion(
            request_id=self.sequence.id,
            text="".join(self._texts),
            token_ids=tuple(token.token_id for token in tokens),
            finish_reason=reason,
            stop_reason=matched,
            prompt_tokens=self.sequence.num_prompt_tokens,
            cached_tokens=self.sequence.cached_tokens or 0,
            seed=self.sampler.seed,
            metrics=RequestMetrics(
                self._arrival_seconds,
                self.first_scheduled_seconds,
                self._first_token_seconds,
                now,
                len(tokens),
                self.sequence.num_preemptions,
            ),
            logprobs=tuple(tokens) if self.sampler.params.logprobs is not None else None,
            logits=np.array(self._logits, np.float32) if self._logits is not None else None,  # [generated, vocab]
        )
