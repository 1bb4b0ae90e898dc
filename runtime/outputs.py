"""What comes out of the engine: a piece per step while a request runs, the whole of it at its end."""

from dataclasses import dataclass
from typing import Literal

from ingot.runtime.batch import FloatArray
from ingot.runtime.metrics import RequestMetrics
from ingot.runtime.sampler import SampledToken

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
