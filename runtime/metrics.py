"""What a request took and what the engine did, in the field's usual terms. Times are seconds of a monotonic clock.

TTFT = first token - arrival        E2E = finish - arrival        TPOT = (E2E - TTFT) / (output tokens - 1)
"""

from dataclasses import dataclass


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
