"""Acceptance of drafts, learned for each kind of drafter and grade: a request's own, mixed with that of all requests.

Grades of one kind say nothing of another kind's. Without a measurement a draft counts as more likely right than wrong.
"""

from collections.abc import Sequence

from ingot.runtime.speculation.drafter import NUM_GRADES

_OWN_MEMORY = 0.9  # weight of a request's earlier drafts after each of the same grade
_COMMON_MEMORY = 0.99
_COMMON_WEIGHT = 3.0  # drafts that the common estimate counts for
_FIRST_GUESS, _GUESS_WEIGHT = 0.6, 2.0  # acceptance before anything is measured


class GradedAcceptance:
    """Share of drafts that were accepted when all before them were, by grade; older ones count less."""

    __slots__ = ("_accepted", "_memory", "_tested")

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._accepted = [0.0] * NUM_GRADES
        self._tested = [0.0] * NUM_GRADES

    def observe(self, grade: int, accepted: bool) -> None:
        """Add one draft."""
        self._accepted[grade] = self._accepted[grade] * self._memory + accepted
        self._tested[grade] = self._tested[grade] * self._memory + 1

    def rate(self, grade: int, expected: float, weight: float) -> float:
        """Estimate of the acceptance, to which the `expected` one counts as `weight` drafts."""
        return (self._accepted[grade] + weight * expected) / (self._tested[grade] + weight)

    def mean(self, expected: float, weight: float) -> float:
        """The same over all grades."""
        return (sum(self._accepted) + weight * expected) / (sum(self._tested) + weight)


class Acceptance:
    """Estimates for all kinds and requests."""

    def __init__(self) -> None:
        self._own: dict[int, dict[str, GradedAcceptance]] = {}
        self._common: dict[str, GradedAcceptance] = {}

    def observe(self, sequence_id: int, kind: str, grades: Sequence[int], num_accepted: int) -> None:
        """Record drafts that were compared with a sequence's tokens: all were accepted but perhaps the last."""
        own = self._own.setdefault(sequence_id, {}).setdefault(kind, GradedAcceptance(_OWN_MEMORY))
        common = self._common.setdefault(kind, GradedAcceptance(_COMMON_MEMORY))
        for index, grade in enumerate(grades):
            own.observe(grade, index < num_accepted)
            common.observe(grade, index < num_accepted)

    def rate(self, sequence_id: int, kind: str, grade: int) -> float:
        """Probability that a draft of this grade is accepted after all drafts before it."""
        all_requests = self._common.get(kind)
        common = all_requests.rate(grade, _FIRST_GUESS, _GUESS_WEIGHT) if all_requests else _FIRST_GUESS
        own = self._own.get(sequence_id, {}).get(kind)
        return own.rate(grade, common, _COMMON_WEIGHT) if own else common

    def mean_rate(self, sequence_id: int, kind: str) -> float:
        """Acceptance of a request's drafts of a kind, whatever their grade."""
        all_requests = self._common.get(kind)
        common = all_requests.mean(_FIRST_GUESS, _GUESS_WEIGHT) if all_requests else _FIRST_GUESS
        own = self._own.get(sequence_id, {}).get(kind)
        return own.mean(common, _COMMON_WEIGHT) if own else common

    def survivals(self, sequence_id: int, kind: str, grades: Sequence[int]) -> list[float]:
        """For each of some drafts in a row, the probability that it and all before it are accepted."""
        survival, found = 1.0, []
        for grade in grades:
            survival *= self.rate(sequence_id, kind, grade)
            found.append(survival)
        return found

    def forget(self, sequence_id: int) -> None:
        """Drop the estimates of a sequence that has ended."""
        self._own.pop(sequence_id, None)
