"""What a request took and what the engine did, in the field's usual terms. Times are seconds of a monotonic clock.

TTFT = first token - arrival        E2E = finish - arrival        TPOT = (E2E - TTFT) / (output tokens - 1)

What comes out of the engine: a piece per step while a request runs, the whole of it at its end.
"""

from dataclasses import dataclass
from typing import Literal

from ingot.runtime.batch import FloatArray
from ingot.runtime.sampler import SampledToken


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Timings of one finished request. Moments that never came (aborted before) are None."""

    arrival_seconds: float
    first_scheduled_seconds: float | None
    first_token_seconds: float | None
    finish_seconds: float
    num_output_tokens: int
    num_preemptions: int

    @property
    def queue_seconds(self) -> float | None:
        """From arrival to the first step that held one of its tokens."""
        return _since(self.arrival_seconds, self.first_scheduled_seconds)

    @property
    def ttft_seconds(self) -> float | None:
        """Time to first token."""
        return _since(self.arrival_seconds, self.first_token_seconds)

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


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """The engine at one moment: what runs and waits, and counters since it was made.

    Of the `computed_tokens` of `num_steps`, `discarded_tokens` were in vain: their request ended while they were
    computed, by an end token that was not read yet or from outside. A step counts once its outcome is known.
    """

    num_running: int
    num_waiting: int
    blocks_in_use: int
    blocks_cached: int
    blocks_total: int
    num_steps: int
    num_preemptions: int
    computed_tokens: int
    discarded_tokens: int
    prefix_hit_tokens: int
    output_tokens: int


@dataclass(slots=True)
class StepCounters:
    """What the steps of an engine came to."""

    num_steps: int = 0
    computed_tokens: int = 0
    discarded_tokens: int = 0
    output_tokens: int = 0

    def count(self, computed_tokens: int, discarded_tokens: int = 0) -> None:
        """Add a step."""
        self.num_steps += 1
        self.computed_tokens += computed_tokens
        self.discarded_tokens += discarded_tokens


def _since(start: float, moment: float | None) -> float | None:
    return None if moment is None else moment - start


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request.

    text            output, without the stop string or end token that ended it
    token_ids       every generated token, the one that ended it among them
    finish_reason   "stop" (end token or stop string), "length" (max_tokens or the model's context), "abort"
    stop_reason     the stop string or the end token's id; None otherwise
    prompt_tokens   tokens of the prompt; the first `cached_tokens` of them came from the prefix cache
    seed            what makes the draws again, also when none was given; unused by greedy decoding
    logprobs        one entry per generated token when `SamplingParams.logprobs` was set, else None
    logits          [generated tokens, vocab] float32 when `keep_logits` was set, else None
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_tokens: int
    cached_tokens: int
    seed: int
    metrics: RequestMetrics
    logprobs: tuple[SampledToken, ...] | None = None
    logits: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step brought to one request.

    `text` is only what is new, and may be empty while it could still become a stop string or half a character;
    `tokens` are the new tokens. The last output of a request has its `completion`.
    """

    request_id: int
    text: str
    tokens: tuple[SampledToken, ...]
    completion: Completion | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the new tokens."""
        return tuple(token.token_id for token in self.tokens)

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.completion is not None
