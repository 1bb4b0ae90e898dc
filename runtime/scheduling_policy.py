"""How an engine schedules: when waiting sequences may join those that run, and how fast waiting ones age."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ingot.options import Doc, Range, check_options

Batching = Literal["continuous", "static", "dynamic"]
_WAIT = Range(ge=0, le=60, words="a number from 0 to 60")


@dataclass(frozen=True, kw_only=True)
class SchedulingPolicy:
    """Options of the scheduler. Raises UsageError for a value that is not allowed.

    With continuous batching a waiting sequence joins at any step, as soon as there is room for it (Orca, Yu et al.,
    OSDI 2022). The two others are for comparison. Static: the sequences that wait when none runs form a batch, and the
    next waits until all of it has ended. Dynamic: as static, but a batch that is not full waits for more sequences
    first.
    """

    batching: Annotated[
        Batching,
        Doc("when waiting sequences join; other than continuous is for comparison"),
    ] = "continuous"
    batch_wait_seconds: Annotated[
        float,
        _WAIT,
        Doc("longest wait of a dynamic batch, from its first sequence on"),
    ] = 0.05
    priority_aging_tokens: Annotated[
        int | None,
        Range(ge=1),
        Doc(
            "tokens of more urgent requests that make a waiting one more urgent by one",
            none="16 times what the KV pool holds",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def is_continuous(self) -> bool:
        """Whether waiting sequences may join at any step."""
        return self.batching == "continuous"
