"""Seconds of one step of an engine: a sum of named terms, each non-negative and bound by one resource.

A term is the time of work that runs one after the other; within it, uses of different resources overlap, and the
slowest binds. Where the numbers come from (measured rows, a data sheet) is the business of fit.py and roofline.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import add, attrgetter, mul
from typing import Any, Literal, NamedTuple

from ingot.artifact.programs.expert_choices import Reach, reached

Resource = Literal["memory", "compute", "link", "host", "overhead"]
"""Bandwidth of device memory, arithmetic, links between devices, copies from and to the host, fixed costs."""

Count = Literal[
    "steps",
    "rows",
    "prefill_tokens",
    "prefill_context_tokens",
    "decode_rows",
    "context_tokens",
    "draft_rows",
    "num_sequences",
    "adapter_rows",
    "copied_bytes",
    "restored_bytes",
]


class StepShape(NamedTuple):
    """Counts of a step, none of them negative. An average of many steps has fractions.

    Give them by name. A simulation makes millions of these, for which a frozen dataclass takes three times as long.

    prefill_tokens          tokens of prompts that are computed
    prefill_context_tokens  the sum, over these tokens, of the tokens that each attends to
    decode_rows             sequences that get their next token
    context_tokens          the sum, over these sequences, of the tokens in their context
    longest_context         the most tokens in the context of one of them; 0: all are as long
    draft_rows              drafted tokens that are verified
    num_sequences           sequences of the step
    adapter_rows            tokens that are computed with an adapter
    copied_bytes            bytes of KV and side state written to host memory
    restored_bytes          bytes of KV and side state read from it
    """

    prefill_tokens: float = 0
    prefill_context_tokens: float = 0
    decode_rows: float = 0
    context_tokens: float = 0
    longest_context: float = 0
    draft_rows: float = 0
    num_sequences: float = 0
    adapter_rows: float = 0
    copied_bytes: float = 0
    restored_bytes: float = 0

    @property
    def rows(self) -> float:
        """Tokens that the matmuls compute."""
        return self.prefill_tokens + self.decode_rows + self.draft_rows

    @property
    def steps(self) -> int:
        """One, the count of what a step costs whatever is in it."""
        return 1


def joined(one: StepShape, other: StepShape) -> StepShape:
    """One step that does the work of two."""
    sums = StepShape(*map(add, one, other))
    return sums._replace(longest_context=max(one.longest_context, other.longest_context))


@dataclass(frozen=True, slots=True)
class Use:
    """Seconds of one resource, in proportion to a count of the step, or to the share of a whole that it reaches.

    This is how rows reach experts.
    """

    resource: Resource
    count: Count
    seconds: float
    reach: Reach = ()

    def __post_init__(self) -> None:
        assert self.seconds >= 0
        assert all(0 <= share < 1 for _, share in self.reach)

    def of(self, step: StepShape) -> float:
        """Seconds of this use in a step."""
        count: float = getattr(step, self.count)
        return self.seconds * (reached(self.reach, count) if self.reach else count)


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a step. Uses of one resource add up; those of different resources overlap."""

    name: str
    uses: tuple[Use, ...]

    def of(self, step: StepShape) -> "TermSeconds":
        """The term's seconds in a step, and the resource that binds them."""
        totals: dict[Resource, float] = {}
        for use in self.uses:
            totals[use.resource] = totals.get(use.resource, 0.0) + use.of(step)
        resource = max(totals, key=totals.__getitem__)
        return TermSeconds(self.name, resource, totals[resource])

    @property
    def is_linear(self) -> bool:
        """Return True where the term is a sum of seconds in proportion to counts."""
        return len({use.resource for use in self.uses}) == 1 and not any(use.reach for use in self.uses)


@dataclass(frozen=True, slots=True)
class TermSeconds:
    """One term of a step's time, and the resource that binds it."""

    name: str
    resource: Resource
    seconds: float


@dataclass(frozen=True)
class StepModel:
    """Predicts steps of one engine with one model on one machine.

    source          where the numbers come from, in words
    relative_error  half the width of the 95 % interval of a prediction, as a share of it
    """

    parts: tuple[Term, ...]
    source: str
    relative_error: float

    def seconds(self, step: StepShape) -> float:
        """Predicted seconds of a step."""
        counts, factors, others = self._sums
        seconds: float = sum(map(mul, counts(step), factors))
        for part in others:
            seconds += part.of(step).seconds
        return seconds

    @cached_property
    def _sums(self) -> tuple[Callable[[StepShape], Any], tuple[float, ...], tuple[Term, ...]]:
        """The counts of linear terms with the seconds of each, and the other terms: many steps are predicted."""
        factors: dict[str, float] = {"steps": 0.0, "num_sequences": 0.0}
        for part in self.parts:
            for use in part.uses if part.is_linear else ():
                factors[use.count] = factors.get(use.count, 0.0) + use.seconds
        others = tuple(part for part in self.parts if not part.is_linear)
        return attrgetter(*factors), tuple(factors.values()), others

    def interval(self, step: StepShape) -> tuple[float, float]:
        """The 95 % interval of `seconds`."""
        seconds = self.seconds(step)
        return seconds * max(0.0, 1 - self.relative_error), seconds * (1 + self.relative_error)

    def terms(self, step: StepShape) -> Iterator[TermSeconds]:
        """Yield each term of `seconds`, which is their sum."""
        return (part.of(step) for part in self.parts)
