"""A load of requests with one length of prompt and output, and the average step that an engine makes of it."""

from dataclasses import dataclass
from typing import Literal

from ingot.errors import UsageError
from ingot.planning.formulas import accepted_tokens
from ingot.planning.step_model import StepShape, joined

Arrival = Literal["steady", "burst"]

_LEAST = {
    "concurrency": 1,
    "prompt_tokens": 1,
    "output_tokens": 1,
    "cached_tokens": 0,
    "drafted_tokens": 0,
    "acceptance": 0,
}


@dataclass(frozen=True)
class Load:
    """So many requests at a time, each with a prompt and an output of these lengths.

    cached_tokens    leading tokens of a prompt that a prefix cache has
    drafted_tokens   tokens that are drafted for each sequence in a step, and verified
    acceptance       probability that a drafted token is right, each by itself
    arrival          steady: a request begins when another ends. burst: all begin at once, so half of the prompts,
                     on average, are computed while a sequence decodes
    """

    concurrency: int = 1
    prompt_tokens: int = 512
    output_tokens: int = 128
    cached_tokens: int = 0
    drafted_tokens: int = 0
    acceptance: float = 0.0
    arrival: Arrival = "steady"

    def __post_init__(self) -> None:
        for name, low in _LEAST.items():
            if getattr(self, name) < low:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least {low}")
        if self.acceptance > 1:
            raise UsageError(f"acceptance is {self.acceptance}; it is a probability, at most 1")
        if self.cached_tokens >= self.prompt_tokens:
            raise UsageError(
                f"cached_tokens is {self.cached_tokens} of a prompt of {self.prompt_tokens} tokens; at least one token"
                " is computed"
            )

    @property
    def total_tokens(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt_tokens + self.output_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens of a prompt that are computed."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def step_tokens(self) -> float:
        """Mean tokens of output that a sequence gets in a step."""
        return accepted_tokens(self.acceptance, self.drafted_tokens)

    @property
    def mean_context(self) -> float:
        """Mean context of a token of the output."""
        return self.prompt_tokens + self.output_tokens / 2

    def prefill_step(self, prompts: float = 1) -> StepShape:
        """A step that computes whole prompts alone."""
        return StepShape(
            prefill_tokens=prompts * self.computed_tokens,
            prefill_context_tokens=prompts * self._prefill_context,
            num_sequences=prompts,
        )

    def decode_step(self, rows: float | None = None) -> StepShape:
        """A step of decoding alone, in the middle of the outputs."""
        count = self.concurrency if rows is None else rows
        return StepShape(
            decode_rows=count,
            context_tokens=count * self.mean_context,
            draft_rows=count * self.drafted_tokens,
            num_sequences=count,
        )

    def average_step(self, rows: float | None = None) -> StepShape:
        """The average step while so many sequences decode: each output token lets 1 / output_tokens prompts begin."""
        count = self.concurrency if rows is None else rows
        prompts = count * self.step_tokens / self.output_tokens * (0.5 if self.arrival == "burst" else 1.0)
        return joined(self.prefill_step(prompts), self.decode_step(count))

    @property
    def _prefill_context(self) -> float:
        """The sum of the contexts of a prompt's computed tokens."""
        return self.computed_tokens * (self.cached_tokens + (self.computed_tokens + 1) / 2)
