"""Drafters: where guesses at the next tokens come from.

A drafter may propose anything. Each token is sampled from the model's own logits with the random number of its place in
the output, and a draft counts only if it equals that token, so a bad drafter costs time and never changes a token.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from ingot.runtime.constraints.matcher import Matcher
from ingot.runtime.requests.sampler import Sampler
from ingot.runtime.scheduling import sequence as steps
from ingot.runtime.scheduling.sequence import ScheduledBatch

NUM_GRADES = 8


def _always(grades: Sequence[int]) -> bool:
    return True


class Proposal(NamedTuple):
    """Drafts for one sequence, and for each of them a grade: how sure the drafter is, from 0 to NUM_GRADES - 1.

    What a grade is worth is measured while the drafts are verified (`acceptance`), for each `kind` on its own: where
    the drafts come from. An empty kind is the drafter's.
    """

    tokens: tuple[int, ...] = ()
    grades: tuple[int, ...] = ()
    kind: str = ""

    def cut(self, count: int) -> "Proposal":
        """The first `count` drafts."""
        return Proposal(self.tokens[:count], self.grades[:count], self.kind)


class DraftRequest(NamedTuple):
    """A request for at most `num_tokens` drafts that continue all tokens of a sequence.

    `is_worth_more` decides, from the grades of the drafts so far, whether another one pays. A drafter whose drafts are
    expensive stops when it is False. `matcher` is that of a request with a constraint.
    """

    sequence: steps.Sequence
    sampler: Sampler
    num_tokens: int
    is_worth_more: Callable[[Sequence[int]], bool] = _always
    matcher: Matcher | None = None


class Drafter(Protocol):
    """Proposes drafts. It reads the tokens of a sequence itself, so it needs no report of which were accepted.

    When a call raises, the step runs without drafts; a drafter that keeps raising is not called again (`speculator`).
    """

    @property
    def kind(self) -> str:
        """Name of where its drafts come from, in metrics and logs; what is learned of them is kept by it."""
        ...

    @property
    def is_free(self) -> bool:
        """Whether a proposal costs next to nothing, so that it pays to choose among more drafts than are verified."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """A proposal for each request, which may be empty."""
        ...

    def catch_up_tokens(self, sequence: steps.Sequence) -> int:
        """Tokens that it must compute before its first draft for a sequence; 0 if that costs next to nothing."""
        ...

    def forget(self, sequence: steps.Sequence) -> None:
        """Free what is kept for a sequence that has ended; it may be unknown."""
        ...

    def close(self) -> None:
        """Free memory and threads. Idempotent."""
        ...


@runtime_checkable
class ObservingDrafter(Drafter, Protocol):
    """A drafter that reads what every step computed."""

    def observe(self, batch: ScheduledBatch) -> None:
        """Take note of a step that was computed, before its tokens are read; also where the speculator rests."""
        ...
