"""How many drafts a model makes in a step, and for which requests, next to drafts that were copied for nothing.

Drafts of a model cost time before it is known how many are worth verifying. A number is chosen by the rule of
`length_control` with the time of drafting added, from the mean acceptance of each request:

    gain(n) = expected tokens / (B * (cost(rows) + n * a draft's step))

A request takes the model's n drafts in place of its copied ones where they are expected to give more tokens than the
further rows cost, and keeps its own otherwise. So where the copies are good, no model is asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

MARGIN = 0.03


@dataclass(frozen=True, slots=True)
class Draftable:
    """A request that a model may draft for: at most `most` tokens, after it has computed `catch_up_tokens`.

    copied   survivals of the drafts that it has without the model
    """

    sequence_id: int
    most: int
    catch_up_tokens: int
    num_generated: int
    num_left: int
    copied: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class CopiedDrafts:
    """Copied drafts that are worth verifying: numbers and expected tokens by request, and the gain over plain steps."""

    counts: Sequence[int]
    expected: Sequence[float]
    gain: float

    @classmethod
    def best(cls, requests: Sequence[Draftable], costs: Sequence[float], num_sequences: int) -> Self:
        """Choose the number with the highest gain; none where it is within the margin."""
        ranked = sorted(
            ((survival, index) for index, each in enumerate(requests) for survival in each.copied), reverse=True
        )
        total, best, highest = float(num_sequences), 0, 1 + MARGIN
        for count, (survival, _) in enumerate(ranked, 1):
            total += survival
            if total / (num_sequences * costs[count]) > highest:
                best, highest = count, total / (num_sequences * costs[count])
        counts, expected = [0] * len(requests), [0.0] * len(requests)
        for survival, index in ranked[:best]:
            counts[index] += 1
            expected[index] += survival
        return cls(counts, expected, highest if best else 1.0)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Number of drafts that one kind makes for each request, and the gain over plain steps."""

    kind: str
    lengths: list[int]
    gain: float


def best_plan(
    kind: str,
    requests: Sequence[Draftable],
    rates: Sequence[float],
    copied: CopiedDrafts,
    costs: Sequence[float],
    *,
    num_sequences: int,
    step: float,
    stake: float,
) -> DraftPlan | None:
    """The drafts of one kind with the highest gain; None where none is better than the copied ones.

    rates   mean acceptance by request
    costs   of a step by number of drafts, in plain steps
    step    plain steps of a draft for all requests together; 0 before it is measured, and then one is made
    stake   plain steps that a step with drafts may take
    """
    most = max(request.most for request in requests) if step else 1
    rows_at_most = most * len(requests)
    row = num_sequences * (costs[rows_at_most] - costs[0]) / rows_at_most  # tokens that a further row costs
    survivals, values = [1.0] * len(requests), [0.0] * len(requests)
    best, highest = None, copied.gain * (1 + MARGIN)
    for length in range(1, most + 1):
        survivals = [survival * rate for survival, rate in zip(survivals, rates, strict=True)]
        values = [value + survival for value, survival in zip(values, survivals, strict=True)]
        takes = [
            value - had > row * max(0, length - count)
            for value, had, count in zip(values, copied.expected, copied.counts, strict=True)
        ]
        rows = sum(length if own else count for own, count in zip(takes, copied.counts, strict=True))
        cost = costs[rows] + length * step
        if cost > stake:
            break
        tokens = sum(value if own else had for own, value, had in zip(takes, values, copied.expected, strict=True))
        gain = (num_sequences + tokens) / (num_sequences * cost)
        if gain > highest and any(takes):
            lengths = [min(length, each.most) if own else 0 for own, each in zip(takes, requests, strict=True)]
            best, highest = DraftPlan(kind, lengths, gain), gain
    return best
