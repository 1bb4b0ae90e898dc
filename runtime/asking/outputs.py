"""Output of the engine: an output per step of a request, and its completion and timings at the end.

Times are seconds of a monotonic clock.

TTFT = first token - arrival        E2E = finish - arrival        TPOT = (E2E - TTFT) / (output tokens - 1)
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ingot.errors import EngineError, RequestFailed
from ingot.runtime.forward_batch import FloatArray
from ingot.runtime.kv.transfers.restored_prefix import CachedTokens

EarlyEnd = Literal["abort", "timeout"]
FinishReason = Literal["stop", "length", "error"] | EarlyEnd


@dataclass(frozen=True)
class TokenLogprob:
    """A token and its log-probability (natural) in the model's own distribution."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class SampledToken:
    """A sampled token; with `logprobs` set, its log-probability and the most likely tokens, most likely first.

    Log-probabilities are the model's own: before penalties, temperature and warpers.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Timings of one finished request. Events that never happened, because it was aborted before, are None.

    Drafted tokens are those that steps verified for it, accepted ones are those of them that are in its output.
    `paused_seconds` is the time that it waited again after preemptions.
    """

    arrival_seconds: float
    first_scheduled_seconds: float | None
    first_token_seconds: float | None
    finish_seconds: float
    num_output_tokens: int
    num_preemptions: int
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    paused_seconds: float = 0.0

    @property
    def queue_seconds(self) -> float | None:
        """From arrival to the first step with one of its tokens."""
        return self._since_arrival(self.first_scheduled_seconds)

    @property
    def ttft_seconds(self) -> float | None:
        """Time to first token."""
        return self._since_arrival(self.first_token_seconds)

    @property
    def prefill_seconds(self) -> float | None:
        """From the first step with one of its tokens to the first token."""
        if self.first_token_seconds is None or self.first_scheduled_seconds is None:
            return None
        return self.first_token_seconds - self.first_scheduled_seconds

    @property
    def decode_seconds(self) -> float | None:
        """From the first token to the end."""
        return None if self.first_token_seconds is None else self.finish_seconds - self.first_token_seconds

    @property
    def e2e_seconds(self) -> float:
        """From arrival to the last token."""
        return self.finish_seconds - self.arrival_seconds

    @property
    def tpot_seconds(self) -> float | None:
        """Time per output token after the first; None with fewer than two tokens."""
        if self.ttft_seconds is None or self.num_output_tokens < 2:
            return None
        return (self.e2e_seconds - self.ttft_seconds) / (self.num_output_tokens - 1)

    def _since_arrival(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.arrival_seconds


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request.

    text            output, without the stop string or end token that ended it
    token_ids       every generated token, including the one that ended it
    finish_reason   "stop" (end token or stop string), "length" (max_tokens or the model's context),
                    "timeout" (`RequestOptions.timeout_seconds`), "abort", "error"
    stop_reason     the stop string or the end token's id; None otherwise
    prompt_tokens   tokens of the prompt; the first `cached_tokens` of them came from the prefix cache, in the tiers of
                    `cached_tokens_by_tier` (device, host, disk) when the request was admitted first
    seed            reproduces the output, also when the parameters had no seed; unused by greedy decoding
    logprobs        one entry per generated token when `SamplingParams.logprobs` was set, else None
    prompt_logprobs one entry per token of the prompt from the second on when `SamplingParams.prompt_logprobs` was set,
                    else None; of a request that ended before its prompt was computed, those that were
    logits          [generated tokens, vocab] float32 when `keep_logits` was set, else None
    error           why the request failed, when `finish_reason` is "error"; text and tokens are those before
    index           number of this choice among those of its request, from 0
    mean_logprob    mean log-probability of the tokens, when `logprobs` or a `best_of` above n was set, else None
    score           of a beam search, by which its sequences are ranked, else None
    others          choices 1 and following of a request with n above 1; only the result of the whole request has them
    unreturned_tokens  tokens of the candidates that a `best_of` above n left out; only that result has them
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_tokens: int
    cached_tokens_by_tier: CachedTokens
    seed: int
    metrics: RequestMetrics
    logprobs: tuple[SampledToken, ...] | None = None
    prompt_logprobs: tuple[SampledToken, ...] | None = None
    logits: FloatArray | None = None
    error: EngineError | None = None
    index: int = 0
    mean_logprob: float | None = None
    score: float | None = None
    others: "tuple[Completion, ...]" = ()
    unreturned_tokens: int = 0

    @property
    def choices(self) -> "tuple[Completion, ...]":
        """All choices in order of index: this one and the others."""
        return (self, *self.others)

    @property
    def generated_tokens(self) -> int:
        """Tokens of all choices, and of the candidates that were left out."""
        return sum(len(choice.token_ids) for choice in self.choices) + self.unreturned_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that came from the prefix cache."""
        return self.cached_tokens_by_tier.total


def raise_failure(completions: Sequence[Completion], kind: str = "choices") -> None:
    """Raise the first error of completions, if there is one; a RequestFailed carries all of them.

    `kind` is what they are, in the plural.
    """
    errors = [completion.error for completion in completions if completion.error]
    if not errors:
        return
    first = errors[0]
    if not isinstance(first, RequestFailed):
        raise EngineError(str(first)) from first
    share = f" ({len(errors)} of {len(completions)} {kind} failed)" if len(completions) > 1 else ""
    raise RequestFailed(f"{first}{share}", completions, first.field) from first.__cause__


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step added to one request, or the error that ended it.

    With speculation a step may add several tokens. `text` is the new text only. It may be empty while the end of the
    output could still become a stop string or is an incomplete character. `tokens` are the new tokens. `index` is the
    choice that they belong to; the last output of a choice has its `completion`. The last output of the request has its
    `result`: choice 0, with the others in `others`.
    """

    request_id: int
    text: str
    tokens: tuple[SampledToken, ...]
    completion: Completion | None = None
    result: Completion | None = None
    index: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the new tokens."""
        return tuple(token.token_id for token in self.tokens)

    @property
    def error(self) -> EngineError | None:
        """Why the choice failed."""
        return self.completion.error if self.completion else None

    @property
    def new_tokens(self) -> int:
        """Number of tokens that the output adds to those generated so far."""
        return len(self.tokens) + (self.result.unreturned_tokens if self.result else 0)

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.result is not None


def joined(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Outputs of one choice that one step made, in order, as one."""
    if len(outputs) == 1:
        return outputs[0]
    text = "".join(output.text for output in outputs)
    tokens = tuple(token for output in outputs for token in output.tokens)
    return replace(outputs[-1], text=text, tokens=tokens)


def require_success(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Return the outputs of a step; raises the error of a choice that failed in it."""
    raise_failure([output.completion for output in outputs if output.completion])
    return outputs


def ranked_outputs(
    ranked: Sequence[tuple[Completion, tuple[SampledToken, ...]]], unreturned_tokens: int = 0
) -> list[RequestOutput]:
    """One output for each completion, with its whole text and its tokens. Its rank becomes its index."""
    completions = [replace(completion, index=rank) for rank, (completion, _) in enumerate(ranked)]
    result = replace(completions[0], others=tuple(completions[1:]), unreturned_tokens=unreturned_tokens)
    last = len(ranked) - 1
    return [
        RequestOutput(one.request_id, one.text, tokens, one, result if one.index == last else None, one.index)
        for one, (_, tokens) in zip(completions, ranked, strict=True)
    ]


class OutputQueues:
    """Outputs that have not been read yet: one queue for each request that has its own reader, one for all others.

    `in` tells whether a request has its own queue.
    """

    def __init__(self) -> None:
        self._of_request: dict[int, deque[RequestOutput]] = {}
        self._others: list[RequestOutput] = []

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._of_request

    @property
    def has_any(self) -> bool:
        """Whether `take` would return an output."""
        return bool(self._others)

    def open(self, request_id: int) -> None:
        """Give a request its own queue."""
        self._of_request[request_id] = deque()

    def close(self, request_id: int) -> None:
        """Remove a request's own queue and its unread outputs."""
        del self._of_request[request_id]

    def put(self, output: RequestOutput) -> None:
        """Add an output to its request's own queue, or to the common one."""
        self._of_request.get(output.request_id, self._others).append(output)

    def next(self, request_id: int) -> RequestOutput | None:
        """Take the oldest output from a request's own queue; None when it is empty."""
        queue = self._of_request[request_id]
        return queue.popleft() if queue else None

    def take(self) -> list[RequestOutput]:
        """Take all outputs from the common queue."""
        outputs, self._others = self._others, []
        return outputs
