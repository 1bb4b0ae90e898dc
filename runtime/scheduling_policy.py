"""How an engine schedules: when waiting sequences may join those that run, and how fast waiting ones age."""

from dataclasses import dataclass
from typing import Literal, get_args

from ingot.errors import UsageError, shown

Batching = Literal["continuous", "static", "dynamic"]
MAX_BATCH_WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class SchedulingPolicy:
    """Options of the scheduler. Raises UsageError for a value that is not allowed.

    batching             "continuous": a waiting sequence joins at any step, as soon as there is room for it (Orca, Yu
                         et al., OSDI 2022). The two others are for comparison. "static": the sequences that wait when
                         none runs form a batch, and the next waits until all of it has ended. "dynamic": as static,
                         but a batch that is not full waits for more sequences first
    batch_wait_seconds   how long a dynamic batch waits at most, from the first sequence on
    aging_tokens         tokens of more urgent requests that make a waiting one more urgent by one; None: 16 times what
                         the KV pool holds
    """

    batching: Batching = "continuous"
    batch_wait_seconds: float = 0.05
    aging_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.batching not in get_args(Batching):
            raise UsageError(f"batching is {shown(self.batching)}; it must be one of {', '.join(get_args(Batching))}")
        wait = self.batch_wait_seconds
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait <= MAX_BATCH_WAIT_SECONDS:
            raise UsageError(
                f"batch_wait_seconds is {shown(wait)}; it must be a number from 0 to {MAX_BATCH_WAIT_SECONDS:g}"
            )
        if self.aging_tokens is not None and self.aging_tokens < 1:
            raise UsageError(f"priority_aging_tokens is {self.aging_tokens}; it must be at least 1, or None")

    @property
    def is_continuous(self) -> bool:
        """Whether waiting sequences may join at any step."""
        return self.batching == "continuous"
