"""How many drafts a step verifies: as many as make tokens come fastest, and none where they do not pay.

With B sequences, a step without drafts gives B tokens. A draft adds its survival, the probability that it and all
drafts before it are accepted, and makes the step longer. The control adds drafts in order of survival and keeps the
number with the most expected tokens per second (as Liu et al., "Optimizing Speculative Decoding for Serving Large
Language Models Using Goodput", 2024, does for one length that all requests share):

    gain(m) = (B + sum of the m largest survivals) / (B * cost(m))          verified if it is above 1 + MARGIN

    survival   from the acceptance of drafts of the same grade: the request's own, mixed with that of all requests
    cost       of a step with m drafts, in plain steps, measured (`step_times`)

Drafts of a model cost time before it is known how many are worth verifying. So `plan` first chooses how many to make,
by the same rule with the time of drafting added, from the mean acceptance of each request. A request that the draft
model has to catch up with for long joins once it has generated as many tokens as it takes to save that time: what has
lasted is likely to last, and at worst the time is lost once.

Where drafts do not pay it still tries one now and then, because text changes. What such tries may cost is bounded: each
step adds TRY_SHARE of a plain step to an account, and each step with drafts adds what it saved or takes what it lost.
Without a balance nothing is tried, whatever is expected.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from ingot.runtime.speculation.drafter import NUM_GRADES
from ingot.runtime.speculation.step_times import DraftTimes, StepTimes

MARGIN = 0.03
TRY_SHARE = 0.01
_LARGEST_BALANCE = 4.0  # plain steps
_SMALLEST_BALANCE = -2.0
_LEAST_SURVIVAL = 0.05
SMALL_CATCH_UP = 16  # tokens: part of the first draft's step
_OWN_MEMORY = 0.9  # weight of a request's earlier drafts after each of the same grade
_COMMON_MEMORY = 0.99
_COMMON_WEIGHT = 3.0  # drafts that the common estimate counts for
_FIRST_GUESS, _GUESS_WEIGHT = 0.6, 2.0  # acceptance before anything is measured


class Acceptance:
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


@dataclass(frozen=True, slots=True)
class Candidates:
    """Drafts of one sequence that a step may verify, by their grades."""

    sequence_id: int
    grades: Sequence[int]


@dataclass(frozen=True, slots=True)
class Draftable:
    """A request that a draft model may draft for: at most `most` tokens, after it has computed `catch_up_tokens`."""

    sequence_id: int
    most: int
    catch_up_tokens: int
    num_generated: int
    num_left: int


@dataclass(slots=True)
class LengthControl:
    """Chooses the number of drafts for each sequence of a step; without `adapts`, as many as there are."""

    adapts: bool = True
    times: StepTimes = field(default_factory=StepTimes)
    drafting: DraftTimes = field(default_factory=DraftTimes)
    _own: dict[int, Acceptance] = field(default_factory=dict)
    _common: Acceptance = field(default_factory=lambda: Acceptance(_COMMON_MEMORY))
    _balance: float = 0.0  # plain steps

    def plan(self, requests: Sequence[Draftable], num_sequences: int) -> list[int]:
        """Number of drafts that a model makes for each request; it makes those of all together."""
        if not self.adapts:
            return [request.most for request in requests]
        plain = self.times.plain_seconds(num_sequences)
        if plain is None or self.times.needs_plain(num_sequences):
            return [0] * len(requests)
        rates = [self._mean_rate(request.sequence_id) for request in requests]
        step = self.drafting.step_seconds / plain
        length, gain = self._best_length(requests, rates, num_sequences, step)
        saved = 1 - 1 / gain  # of a plain step, for each token
        ready = [self._is_worth_joining(request, saved, plain) for request in requests]
        if length and any(ready) and self._balance > _SMALLEST_BALANCE / 2:
            return [min(length, each.most) if joins else 0 for each, joins in zip(requests, ready, strict=True)]
        return self._try_one(requests, rates, num_sequences, plain)

    def is_worth_more(self, sequence_id: int, num_sequences: int, grades: Sequence[int]) -> bool:
        """Whether a draft model makes another draft after drafts of these grades."""
        plain = self.times.plain_seconds(num_sequences)
        if not self.adapts or plain is None:
            return True
        costs = self.times.costs(num_sequences, len(grades) + 1)
        more = costs[len(grades) + 1] - costs[len(grades)] + self.drafting.step_seconds / plain / num_sequences
        survival = self.survival(sequence_id, grades) * self._mean_rate(sequence_id)
        return survival > more * num_sequences

    def choose(self, candidates: Sequence[Candidates], num_sequences: int, room: int) -> list[int]:
        """Number of leading drafts to verify of each candidate, at most `room` together.

        `num_sequences` sequences decode in this step, those without drafts included.
        """
        if not self.adapts:
            return _in_turns([len(each.grades) for each in candidates], room)
        if self.times.needs_plain(num_sequences):
            return [0] * len(candidates)
        ranked = sorted(self._survivals(candidates), reverse=True)[: max(0, room)]
        chosen = [0] * len(candidates)
        for _, _, index in ranked[: self._best(ranked, num_sequences)]:
            chosen[index] += 1
        return chosen

    def survival(self, sequence_id: int, grades: Sequence[int]) -> float:
        """Probability that drafts of these grades are all accepted."""
        return prod(self.rate(sequence_id, grade) for grade in grades)

    def rate(self, sequence_id: int, grade: int) -> float:
        """Probability that a draft of this grade is accepted once all before it are."""
        common = self._common.rate(grade, _FIRST_GUESS, _GUESS_WEIGHT)
        own = self._own.get(sequence_id)
        return own.rate(grade, common, _COMMON_WEIGHT) if own else common

    def verified(self, sequence_id: int, grades: Sequence[int], num_accepted: int) -> None:
        """Record drafts of a sequence that were compared with its tokens: all were accepted but perhaps the last."""
        own = self._own.setdefault(sequence_id, Acceptance(_OWN_MEMORY))
        for index, grade in enumerate(grades):
            own.observe(grade, index < num_accepted)
            self._common.observe(grade, index < num_accepted)

    def stepped(
        self, num_sequences: int, num_drafts: int, num_tokens: int, seconds: float, drafting_seconds: float = 0.0
    ) -> None:
        """Record a step that decoded `num_sequences` sequences, gave them `num_tokens` tokens and did nothing else.

        `drafting_seconds` were spent before it on making drafts, and are not part of `seconds`.
        """
        self.times.observe(num_sequences, num_drafts, seconds)
        gained = TRY_SHARE - drafting_seconds / (self.times.plain_seconds(num_sequences) or seconds)
        if num_drafts:
            gained += num_tokens / num_sequences - self.times.costs(num_sequences, num_drafts)[num_drafts]
        self._balance = min(max(self._balance + gained, _SMALLEST_BALANCE), _LARGEST_BALANCE)

    def rested(self, num_steps: int) -> None:
        """Record steps that nothing else was recorded of."""
        self._balance = min(self._balance + num_steps * TRY_SHARE, _LARGEST_BALANCE)

    def forget(self, sequence_id: int) -> None:
        """Drop the estimates of a sequence that has ended."""
        self._own.pop(sequence_id, None)

    def _mean_rate(self, sequence_id: int) -> float:
        """Acceptance of a request's drafts, whatever their grade."""
        common = self._common.mean(_FIRST_GUESS, _GUESS_WEIGHT)
        own = self._own.get(sequence_id)
        return own.mean(common, _COMMON_WEIGHT) if own else common

    def _best_length(
        self, requests: Sequence[Draftable], rates: Sequence[float], num_sequences: int, step: float
    ) -> tuple[int, float]:
        """The number of drafts with the highest gain, and the gain; 0 and 1 where none is high enough."""
        most = max(request.most for request in requests)
        costs = self.times.costs(num_sequences, most * len(requests))
        expected, survivals = float(num_sequences), [1.0] * len(requests)
        best, highest = 0, 1 + MARGIN
        for length in range(1, most + 1):
            survivals = [survival * rate for survival, rate in zip(survivals, rates, strict=True)]
            expected += sum(survivals)
            gain = expected / (num_sequences * (costs[length * len(requests)] + length * step))
            if gain > highest:
                best, highest = length, gain
        return best, highest if best else 1.0

    def _is_worth_joining(self, request: Draftable, saved: float, plain: float) -> bool:
        """Whether what a request has generated, and may still, is worth the time to catch up with it."""
        if request.catch_up_tokens <= SMALL_CATCH_UP:
            return True
        cost = self.drafting.catch_up_seconds(request.catch_up_tokens) / plain
        return saved * min(request.num_generated, request.num_left) > cost

    def _try_one(
        self, requests: Sequence[Draftable], rates: Sequence[float], num_sequences: int, plain: float
    ) -> list[int]:
        """One draft for the request that is most likely to take it, if the account can pay that and catching up."""
        best = max(range(len(requests)), key=lambda index: (-requests[index].catch_up_tokens, rates[index]))
        request = requests[best]
        loss = self.times.costs(num_sequences, 1)[1] - 1
        loss += (self.drafting.step_seconds + self.drafting.catch_up_seconds(request.catch_up_tokens)) / plain
        return [int(index == best and self._balance > loss) for index in range(len(requests))]

    def _survivals(self, candidates: Sequence[Candidates]) -> list[tuple[float, int, int]]:
        """Survival of each draft that could pay, a number that orders those of one sequence, and its candidate."""
        found = []
        for index, each in enumerate(candidates):
            survival = 1.0
            for place, grade in enumerate(each.grades):
                survival *= self.rate(each.sequence_id, grade)
                if place and survival < _LEAST_SURVIVAL:
                    break
                found.append((survival, -place, index))
        return found

    def _best(self, ranked: Sequence[tuple[float, int, int]], num_sequences: int) -> int:
        """Number of drafts with the highest gain; 1 for a try that the account can pay; else 0."""
        if not ranked:
            return 0
        costs = self.times.costs(num_sequences, len(ranked))
        expected, best, highest = float(num_sequences), 0, 1 + MARGIN
        for count, (survival, *_) in enumerate(ranked, 1):
            expected += survival
            gain = expected / (num_sequences * costs[count])
            if gain > highest:
                best, highest = count, gain
        if best and self._balance > _SMALLEST_BALANCE / 2:
            return best
        return 1 if self._balance > costs[1] - 1 else 0


def _in_turns(wanted: Sequence[int], room: int) -> list[int]:
    """Give out `room` in turns, at most `wanted` to each."""
    given = [0] * len(wanted)
    while room > 0 and (unserved := [index for index, most in enumerate(wanted) if given[index] < most]):
        share = max(1, room // len(unserved))
        for index in unserved:
            more = min(share, wanted[index] - given[index], room)
            given[index] += more
            room -= more
    return given
