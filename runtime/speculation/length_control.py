"""How many drafts a step verifies: as many as make tokens come fastest, and none where they do not pay.

With B sequences, a step without drafts gives B tokens. A draft adds its survival, the probability that it and all
drafts before it are accepted, and makes the step longer. The control adds drafts in order of survival and keeps the
number with the most expected tokens per second (as Liu et al., "Optimizing Speculative Decoding for Serving Large
Language Models Using Goodput", 2024, does for one length that all requests share):

    gain(m) = (B + sum of the m largest survivals) / (B * cost(m))          verified if it is above 1 + MARGIN

    survival   from the acceptance of drafts of the same grade: the request's own, mixed with that of all requests
    cost       of a step with m drafts, in plain steps, measured (`step_times`). Models with side state compute the
               accepted drafts again where one was rejected; the expected cost of that is part of it

Drafts of a model cost time before it is known how many are worth verifying. So `plan` first chooses how many to make,
by the same rule with the time of drafting added, from the mean acceptance of each request. A request that the draft
model has to catch up with for long joins once it has generated as many tokens as it takes to save that time: what has
lasted is likely to last, and at worst the time is lost once.

What speculation may lose is bounded, whatever drafters and texts do. Every step that the control was asked about, a
look, has its loss measured: its cost in plain steps, less the tokens that it gave each sequence.

    looks and tries   A look that finds nothing worth verifying, or verifies one draft only to learn of it, is followed
                      by rest: by as many steps as its loss divided by LOOK_SHARE. At rest the speculator does nothing.
                      Tries that fail also become rare among looks, by exponential back-off.
    drafts that pay   Their gains and losses, and BALANCE_SHARE of a plain step for each step, add up to a balance. No
                      step risks more than the balance and OVERDRAFT, and below -OVERDRAFT / 2 the debt is rested off.

So after N steps at most (LOOK_SHARE + BALANCE_SHARE) N + OVERDRAFT plain steps are lost: 1.5 % and two steps. Costs
that are not known yet can exceed this once, so numbers of drafts at most double until they are measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, prod

from ingot.runtime.speculation.drafter import NUM_GRADES
from ingot.runtime.speculation.step_times import SPIKE, DraftTimes, StepTimes

MARGIN = 0.03
LOOK_SHARE = 0.01  # of the time, for looks and tries that gain nothing
BALANCE_SHARE = 0.005  # of the time, for drafts that were expected to pay
OVERDRAFT = 2.0  # plain steps
_LARGEST_BALANCE = 64.0  # plain steps, to catch up with a prompt
_LARGEST_STAKE = 4.0  # of the balance, in one step
_LEAST_REST = 2  # steps: the last is measured, after one that was also plain
_MOST_DOUBLINGS = 3  # of the looks between tries
_CATCH_UP_GUESS = 0.05  # plain steps for each token, until it is measured
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
class DraftCandidates:
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
    """Chooses the number of drafts for each sequence of a step; without `adapts`, as many as there are.

    replays   whether accepted drafts are computed again after a rejected one, as models with side state do
    """

    adapts: bool = True
    replays: bool = False
    times: StepTimes = field(default_factory=StepTimes)
    drafting: DraftTimes = field(default_factory=DraftTimes)
    _own: dict[int, Acceptance] = field(default_factory=dict)
    _common: Acceptance = field(default_factory=lambda: Acceptance(_COMMON_MEMORY))
    _balance: float = 0.0  # plain steps
    _pays: bool = False  # whether this look found drafts that are expected to pay
    _num_failed_tries: int = 0  # in a row
    _num_untried: int = 0  # looks since the last try
    _num_replayed: int = 0  # tokens that will be computed again, of the drafts in this step

    def plan(self, requests: Sequence[Draftable], num_sequences: int) -> list[int]:
        """Number of drafts that a model makes for each request; it makes those of all together."""
        if not self.adapts:
            return [request.most for request in requests]
        plain = self.times.plain_seconds(num_sequences)
        if plain is None:
            return [0] * len(requests)
        rates = [self._mean_rate(request.sequence_id) for request in requests]
        step = self.drafting.step_seconds / plain
        length, gain = self._best_length(requests, rates, num_sequences, step)
        if length:
            joining = self._joining(requests, 1 - 1 / gain, plain)
            if any(joining):
                self._pays = True
                return [min(length, each.most) if joins else 0 for each, joins in zip(requests, joining, strict=True)]
        return self._try_one(requests, rates, plain)

    def is_worth_more(self, sequence_id: int, num_sequences: int, grades: Sequence[int]) -> bool:
        """Whether a draft model makes another draft after drafts of these grades."""
        plain = self.times.plain_seconds(num_sequences)
        if not self.adapts or plain is None:
            return True
        costs = self.times.costs(num_sequences, len(grades) + 1)
        more = costs[len(grades) + 1] - costs[len(grades)] + self.drafting.step_seconds / plain / num_sequences
        survival = self.survival(sequence_id, grades) * self._mean_rate(sequence_id)
        return survival > more * num_sequences

    def choose(self, candidates: Sequence[DraftCandidates], num_sequences: int, room: int) -> list[int]:
        """Number of leading drafts to verify of each candidate, at most `room` together.

        `num_sequences` sequences decode in this step, those without drafts included.
        """
        if not self.adapts:
            return _in_turns([len(each.grades) for each in candidates], room)
        if self.times.plain_seconds(num_sequences) is None:
            return [0] * len(candidates)
        ranked = sorted(self._survivals(candidates), reverse=True)[: max(0, room)]
        chosen = [0] * len(candidates)
        for _, _, index, _ in ranked[: self._best(ranked, num_sequences)]:
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
        if self.replays and num_accepted < len(grades):
            self._num_replayed += num_accepted + 1

    def looked(
        self, num_sequences: int, num_drafts: int, num_tokens: int, seconds: float | None, drafting_seconds: float = 0.0
    ) -> int:
        """Record a step with a look, which gave its `num_sequences` decoding sequences `num_tokens` tokens.

        `seconds` is None for a step that did more than decode. `drafting_seconds`, which a draft model took, are not
        part of it. Returns the number of steps to rest.
        """
        if not self.adapts:
            return 0
        loss = self._loss(num_sequences, num_drafts, num_tokens, seconds, drafting_seconds)
        pays, self._pays, self._num_replayed = self._pays, False, 0
        if pays:
            self._balance = min(self._balance + BALANCE_SHARE - loss, _LARGEST_BALANCE)
            due = ceil(-self._balance / (LOOK_SHARE + BALANCE_SHARE)) if self._balance < -OVERDRAFT / 2 else 0
            self._balance += due * LOOK_SHARE
        else:
            if num_drafts:
                self._tried(is_accepted=num_tokens > num_sequences)
            due = ceil(max(0.0, loss) / LOOK_SHARE)
        if due or self.times.needs_plain(num_sequences):
            due = max(due, _LEAST_REST)
        self._balance = min(self._balance + due * BALANCE_SHARE, _LARGEST_BALANCE)
        return due

    def rested(self, num_sequences: int, seconds: float) -> bool:
        """Record a step at rest that did nothing but decode; returns whether enough are measured."""
        self.times.observe_plain(num_sequences, seconds)
        return not self.times.needs_plain(num_sequences)

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

    def _joining(self, requests: Sequence[Draftable], saved: float, plain: float) -> list[bool]:
        """Which requests get drafts: those where what they have generated, and may still, is worth to catch up with.

        `saved` is the share of a plain step that drafts save for each token. The balance pays for catching up.
        """
        left = self._balance
        joining = []
        for request in requests:
            cost = self._catch_up_cost(request, plain)
            joins = not cost or cost < min(left, saved * min(request.num_generated, request.num_left))
            left -= cost if joins else 0.0
            joining.append(joins)
        return joining

    def _catch_up_cost(self, request: Draftable, plain: float) -> float:
        """Plain steps that it takes to catch up with a request; 0 for what the step of the first draft includes."""
        if request.catch_up_tokens <= SMALL_CATCH_UP:
            return 0.0
        return self.drafting.catch_up_seconds(request.catch_up_tokens, _CATCH_UP_GUESS * plain) / plain

    def _try_one(self, requests: Sequence[Draftable], rates: Sequence[float], plain: float) -> list[int]:
        """One draft for the request that is most likely to take it, if a try is due."""
        best = max(range(len(requests)), key=lambda index: (-requests[index].catch_up_tokens, rates[index]))
        is_affordable = self._catch_up_cost(requests[best], plain) <= max(0.0, self._balance)
        tries = is_affordable and self._is_try_due()
        return [int(index == best and tries) for index in range(len(requests))]

    def _is_try_due(self) -> bool:
        """Whether to verify a draft that is not expected to pay: at every 2^n-th look after n failures, n <= 3."""
        self._num_untried += 1
        return self._num_untried >= 1 << min(self._num_failed_tries, _MOST_DOUBLINGS)

    def _tried(self, *, is_accepted: bool) -> None:
        self._num_untried = 0
        self._num_failed_tries = 0 if is_accepted else self._num_failed_tries + 1

    def _survivals(self, candidates: Sequence[DraftCandidates]) -> list[tuple[float, int, int, float]]:
        """Survival of each draft that could pay, a number that orders those of one sequence, and its candidate.

        The last number is how many more tokens have to be computed again on average, if the model replays.
        """
        found = []
        for index, each in enumerate(candidates):
            survival = 1.0
            for place, grade in enumerate(each.grades):
                before = survival
                survival *= self.rate(each.sequence_id, grade)
                if place and survival < _LEAST_SURVIVAL:
                    break
                found.append((survival, -place, index, (place + 1) * (before - survival)))
        return found

    def _best(self, ranked: Sequence[tuple[float, int, int, float]], num_sequences: int) -> int:
        """Number of drafts with the highest gain; 1 for a try, where one is due and affordable; else 0."""
        if not ranked:
            return 0
        costs = self.times.costs(num_sequences, len(ranked))
        stake = 1 + min(self._balance, _LARGEST_STAKE) + OVERDRAFT
        most = max(1, 2 * self.times.most_measured(num_sequences))  # the first of more may cost anything
        expected, replayed = float(num_sequences), 0.0
        best, highest = 0, 1.0 if self._pays else 1 + MARGIN  # drafts of a model are paid for already
        for count, (survival, _, _, again) in enumerate(ranked[:most], 1):
            expected += survival
            replayed += again if self.replays else 0.0
            if costs[count] + self._replay_cost(num_sequences, count) > stake:
                break
            gain = expected / (num_sequences * (costs[count] + self._replay_cost(num_sequences, replayed)))
            if gain > highest:
                best, highest = count, gain
        if best or self._pays:
            self._pays = True
            return best
        return int(costs[1] <= stake and self._is_try_due())

    def _replay_cost(self, num_sequences: int, num_tokens: float) -> float:
        """Plain steps that it takes to compute tokens again in the next step; 0 if the model does not replay."""
        count = ceil(num_tokens) if self.replays else 0
        costs = self.times.costs(num_sequences, count)
        return max(0.0, costs[count] - costs[0])

    def _loss(
        self, num_sequences: int, num_drafts: int, num_tokens: int, seconds: float | None, drafting_seconds: float
    ) -> float:
        """Plain steps that a step with a look took longer than its tokens would have without."""
        cost = self.times.costs(num_sequences, num_drafts)[num_drafts]
        cost += self._replay_cost(num_sequences, self._num_replayed)
        plain = self.times.plain_seconds(num_sequences)
        if plain and seconds is not None:
            is_measured = self.times.is_measured(num_sequences, num_drafts)
            self.times.observe(num_sequences, num_drafts, seconds)
            most = SPIKE * cost if is_measured else 2.0 + num_drafts  # as if each row took a step, and one to prepare
            cost += min(seconds / plain, most) - self.times.costs(num_sequences, num_drafts)[num_drafts]
        if plain:
            cost += drafting_seconds / plain
        return cost - num_tokens / num_sequences


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
