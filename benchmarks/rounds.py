"""What is measured, in which order, how often, and what the figures come to. Pure: no clock, no process.

Engines take turns: A B C, then C B A, and so on, so that whatever else the machine does meets them all alike.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MIN_ROUNDS = 2  # one in each direction


@dataclass(frozen=True)
class Scenario:
    """One kind of measurement: what counts (prompt or later tokens), for how many sequences at once."""

    phase: Literal["prefill", "decode"]
    batch: int
    prompt_tokens: int
    new_tokens: int

    def __str__(self) -> str:
        return f"{self.phase}, batch {self.batch}"

    @property
    def counted_tokens(self) -> int:
        """Tokens that pass through the model in the measured time; the first new token belongs to the prefill."""
        return self.batch * (self.prompt_tokens if self.phase == "prefill" else self.new_tokens - 1)

    @property
    def warm_up(self) -> "Scenario":
        """A short form that touches the same code."""
        return Scenario(self.phase, self.batch, min(self.prompt_tokens, 32), min(self.new_tokens, 4))


@dataclass(frozen=True)
class Spread:
    """Median of the rounds, with the slowest and the fastest."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarise at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))


def scenarios(batches: Sequence[int], prompt_tokens: int, new_tokens: int) -> list[Scenario]:
    """Decode after a short prompt, then prefill of a whole one, each at every batch size."""
    decode = [Scenario("decode", batch, 32, new_tokens) for batch in batches]
    return decode + [Scenario("prefill", batch, prompt_tokens, 1) for batch in batches]


def order_of_round(names: Sequence[str], round_index: int) -> list[str]:
    """Names as they come in even rounds, backwards in odd ones."""
    return list(names) if round_index % 2 == 0 else list(reversed(names))


def another_round(done: int, spent_seconds: float, max_rounds: int, budget_seconds: float) -> bool:
    """Whether to measure once more: always twice, never past `max_rounds`, nor when the time is used up."""
    return done < MIN_ROUNDS or (done < max_rounds and spent_seconds < budget_seconds)


def bandwidth_share(scenario: Scenario, tokens_per_second: float, weight_bytes: int, bandwidth: float) -> float | None:
    """Weight bytes that decode reads per second, over the measured read bandwidth (bytes per second).

    A step reads the weights once for all sequences. Prefill is bound by arithmetic: None.
    """
    if scenario.phase == "prefill":
        return None
    return weight_bytes * tokens_per_second / scenario.batch / bandwidth
