"""What latency runs ask for: options and seeded prompts."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ingot.errors import UsageError


@dataclass(frozen=True)
class ServiceLevel:
    """The objective behind goodput: a request counts when both hold. Seconds."""

    ttft_seconds: float
    tpot_seconds: float

    def __post_init__(self) -> None:
        for name in ("ttft_seconds", "tpot_seconds"):
            if not getattr(self, name) > 0:
                raise UsageError(f"latency slo {name} is {getattr(self, name)}; it must be above 0")


@dataclass(frozen=True)
class LatencyOptions:
    """Which load is put on both engines.

    concurrency    levels: requests kept in flight (closed loop)
    prompt_tokens  of each request, random token ids
    output_tokens  of each request, exactly; end-of-sequence is ignored
    requests       per run; a run is one engine at one level in one round
    rounds         pairs of runs per level, in the order A B, B A, A B, ...
    seed           of the prompts
    slo            objective for goodput
    """

    concurrency: tuple[int, ...] = (1, 4)
    prompt_tokens: int = 128
    output_tokens: int = 64
    requests: int = 8
    rounds: int = 5
    seed: int = 0
    slo: ServiceLevel | None = None

    def __post_init__(self) -> None:
        if not self.concurrency or any(level < 1 for level in self.concurrency):
            raise UsageError(
                f"latency concurrency is {list(self.concurrency)}; give levels of 1 or more, such as [1, 4]"
            )
        if len(set(self.concurrency)) < len(self.concurrency):
            raise UsageError(f"latency concurrency {list(self.concurrency)} names a level twice")
        for name, least in (("prompt_tokens", 1), ("output_tokens", 2), ("requests", 1), ("rounds", 2)):
            if getattr(self, name) < least:
                raise UsageError(f"latency {name} is {getattr(self, name)}; it must be {least} or more")

    @property
    def sequence_tokens(self) -> int:
        """Prompt and output of one request together."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True)
class Run:
    """One engine at one concurrency in one round."""

    round: int
    level: int
    side: str


def schedule(options: LatencyOptions) -> Iterator[Run]:
    """Every run in order: per round all levels, baseline first in even rounds and candidate first in odd ones."""
    for number in range(options.rounds):
        sides = ("baseline", "candidate") if number % 2 == 0 else ("candidate", "baseline")
        yield from (Run(number, level, side) for level in options.concurrency for side in sides)


def prompts(options: LatencyOptions, vocab_size: int, round_number: int, level: int) -> list[list[int]]:
    """Prompts of a run, [requests][prompt_tokens]: the same for both engines, new in every round."""
    rng = np.random.default_rng((options.seed, round_number, level))
    ids = rng.integers(0, vocab_size, size=(max(options.requests, level), options.prompt_tokens))
    return [[int(token) for token in row] for row in ids]
