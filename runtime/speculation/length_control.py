"""How many drafts a step verifies: as many as make tokens come fastest, and none where they do not pay.

With B sequences, a step without drafts gives B tokens. A draft adds its survival, the probability that it and all
drafts before it are accepted, and makes the step longer. The control adds drafts in order of survival and keeps the
number with the most expected tokens per second (as Liu et al., "Optimizing Speculative Decoding for Serving Large
Language Models Using Goodput", 2024, does for one length that all requests share):

    gain(m) = (B + sum of the m largest survivals) / (B * cost(m))          verified if it is above 1 + MARGIN

    survival   from the acceptance of drafts of the same grade: the request's own, mixed with that of all requests
    cost       of a step with m drafts, in plain steps, measured (`step_times`). Models with side state compute the
               accepted drafts again where one was rejected; the expected cost of that is part of it

Several kinds of drafters may propose for one sequence. Copies cost next to nothing, so all are made, and `pick` takes
the proposal with the most expected tokens; a model is asked only for the sequences where it beats them (`draft_plan`).
What a proposal that was not taken would have given is seen from the tokens that came, so every kind keeps learning.
A model that is not asked while others pay makes one draft for EXPLORE_SHARE of the time.

A request that a model has to catch up with for long joins once it has generated as many tokens as it takes to save that
time: what has lasted is likely to last, and at worst the time is lost once.

What speculation may lose is bounded, whatever drafters and texts do. Every step that the control was asked about, a
look, has its loss measured: its cost in plain steps, less the tokens that it gave each sequence.

    looks and tries   A look that finds nothing worth verifying, or verifies one draft only to learn of it, is followed
                      by rest: by as many steps as its loss divided by LOOK_SHARE. At rest the speculator does nothing.
                      Tries of a kind that fail also become rare among looks, by exponential back-off.
    drafts that pay   Their gains and losses, and BALANCE_SHARE of a plain step for each step, add up to a balance. No
                      step risks more than the balance and OVERDRAFT, and below -OVERDRAFT / 2 the debt is rested off.

So after N steps at most (LOOK_SHARE + BALANCE_SHARE) N + OVERDRAFT plain steps are lost: 1.5 % and two steps. Costs
that are not known yet can exceed this once, so numbers of drafts at most double until they are measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from ingot.runtime.speculation.acceptance import Acceptance
from ingot.runtime.speculation.draft_plan import MARGIN, CopiedDrafts, Draftable, DraftPlan, best_plan
from ingot.runtime.speculation.drafter import Proposal
from ingot.runtime.speculation.step_times import SPIKE, DraftTimes, StepTimes

LOOK_SHARE = 0.01  # of the time, for looks and tries that gain nothing
BALANCE_SHARE = 0.005  # of the time, for drafts that were expected to pay
EXPLORE_SHARE = 0.01  # plain steps for each look, for a model that is not asked while others pay
OVERDRAFT = 2.0  # plain steps
_LARGEST_BALANCE = 64.0  # plain steps, to catch up with a prompt
_LARGEST_STAKE = 4.0  # of the balance, in one step
_LARGEST_CREDIT = 4.0  # plain steps, to explore with
_UNKNOWN_STEP = 1.0  # plain steps of a model's first draft
_LEAST_REST = 2  # steps: the last is measured, after one that was also plain
_MOST_DOUBLINGS = 3  # of the looks between tries
_CATCH_UP_GUESS = 0.05  # plain steps for each token, until it is measured
_CATCH_UP_STEPS = 0.25  # steps of the model for each token, if that is more
_LEAST_SURVIVAL = 0.05
SMALL_CATCH_UP = 16  # tokens: part of the first draft's step


@dataclass(frozen=True, slots=True)
class DraftCandidates:
    """Drafts of one sequence that a step may verify: their kind, and their grades."""

    sequence_id: int
    kind: str
    grades: Sequence[int]


@dataclass(slots=True)
class _Tries:
    """Tries of a kind that is not expected to pay: at every 2^n-th look after n failures, n <= 3."""

    num_failed: int = 0  # in a row
    num_untried: int = 0  # looks since the last try

    def is_due(self) -> bool:
        """Count a look; returns whether to try at it."""
        self.num_untried += 1
        if self.num_untried < 1 << min(self.num_failed, _MOST_DOUBLINGS):
            return False
        self.num_untried = 0
        return True

    def ended(self, *, is_accepted: bool) -> None:
        """Record what became of the first draft."""
        self.num_failed = 0 if is_accepted else self.num_failed + 1


@dataclass(slots=True)
class LengthControl:
    """Chooses kind and number of drafts for each sequence of a step; without `adapts`, all drafts.

    replays   whether accepted drafts are computed again after a rejected one, as models with side state do
    """

    adapts: bool = True
    replays: bool = False
    times: StepTimes = field(default_factory=StepTimes)
    acceptance: Acceptance = field(default_factory=Acceptance)
    _drafting: dict[str, DraftTimes] = field(default_factory=dict)
    _tries: dict[str, _Tries] = field(default_factory=dict)
    _credit: dict[str, float] = field(default_factory=dict)  # plain steps, to explore each kind with
    _balance: float = 0.0  # plain steps
    _pays: bool = False  # whether this look found drafts that are expected to pay
    _tried_kind: str = ""
    _num_looks: int = 0
    _num_replayed: int = 0  # tokens that will be computed again, of the drafts in this step

    def drafting(self, kind: str) -> DraftTimes:
        """Times of the model whose drafts are of this kind."""
        return self._drafting.setdefault(kind, DraftTimes())

    def plan(self, kinds: Mapping[str, Sequence[Draftable]], num_sequences: int) -> dict[str, list[int]]:
        """Number of drafts that models make for each request, by kind. A kind makes those of all requests together.

        `kinds` has the same requests for each kind.
        """
        if not self.adapts:
            return {kind: [request.most for request in requests] for kind, requests in kinds.items()}
        plain = self.times.plain_seconds(num_sequences)
        if plain is None:
            return {}
        copied = self._copied(next(iter(kinds.values())), num_sequences)
        plans = [self._planned(kind, requests, copied, num_sequences, plain) for kind, requests in kinds.items()]
        best = max((found for found in plans if found), key=lambda found: found.gain, default=None)
        if best is None and copied.gain == 1:
            return self._try_one(kinds, plain)
        chosen = {} if best is None else {best.kind: best.lengths}
        self._pays = self._pays or best is not None
        return chosen | self._explored({kind: each for kind, each in kinds.items() if kind not in chosen}, plain)

    def is_worth_more(self, sequence_id: int, kind: str, num_sequences: int, grades: Sequence[int]) -> bool:
        """Report whether a model makes another draft after drafts of these grades."""
        plain = self.times.plain_seconds(num_sequences)
        if not self.adapts or plain is None:
            return True
        costs = self.times.costs(num_sequences, len(grades) + 1)
        step = self.drafting(kind).step_seconds
        more = costs[len(grades) + 1] - costs[len(grades)] + step / plain / num_sequences
        survivals = self.acceptance.survivals(sequence_id, kind, grades)
        survival = (survivals[-1] if survivals else 1.0) * self.acceptance.mean_rate(sequence_id, kind)
        return survival > more * num_sequences

    def pick(self, sequence_id: int, proposals: Sequence[Proposal]) -> Proposal:
        """The proposal with the most expected tokens; without `adapts` the kinds take turns."""
        if len(proposals) == 1:
            return proposals[0]
        if not self.adapts:
            return proposals[self._num_looks % len(proposals)]
        return max(proposals, key=lambda each: sum(self.acceptance.survivals(sequence_id, each.kind, each.grades)))

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
        likeliest = candidates[ranked[0][2]].kind if ranked else ""
        for _, _, index, _ in ranked[: self._best(ranked, num_sequences, likeliest)]:
            chosen[index] += 1
        return chosen

    def verified(self, sequence_id: int, kind: str, grades: Sequence[int], num_accepted: int) -> None:
        """Record drafts of a sequence that a step verified: all were accepted but perhaps the last."""
        self.compared(sequence_id, kind, grades, num_accepted)
        if self.replays and num_accepted < len(grades):
            self._num_replayed += num_accepted + 1

    def compared(self, sequence_id: int, kind: str, grades: Sequence[int], num_accepted: int) -> None:
        """Record drafts that were compared with a sequence's tokens, verified or not: all were right but the last."""
        self.acceptance.observe(sequence_id, kind, grades, num_accepted)
        if not self._pays:
            self._tries.setdefault(kind, _Tries()).ended(is_accepted=num_accepted > 0)

    def looked(
        self, num_sequences: int, num_drafts: int, num_tokens: int, seconds: float | None, drafting_seconds: float = 0.0
    ) -> int:
        """Record a step with a look, which gave its `num_sequences` decoding sequences `num_tokens` tokens.

        `seconds` is None for a step that did more than decode. `drafting_seconds`, which models took to draft, are not
        part of it. Returns the number of steps to rest.
        """
        self._num_looks += 1
        if not self.adapts:
            return 0
        loss = self._loss(num_sequences, num_drafts, num_tokens, seconds, drafting_seconds)
        pays, self._pays, self._num_replayed, self._tried_kind = self._pays, False, 0, ""
        if pays:
            self._balance = min(self._balance + BALANCE_SHARE - loss, _LARGEST_BALANCE)
            due = ceil(-self._balance / (LOOK_SHARE + BALANCE_SHARE)) if self._balance < -OVERDRAFT / 2 else 0
            self._balance += due * LOOK_SHARE
        else:
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
        self.acceptance.forget(sequence_id)

    @property
    def _stake(self) -> float:
        """Plain steps that a step with drafts may take."""
        return 1 + min(self._balance, _LARGEST_STAKE) + OVERDRAFT

    def _copied(self, requests: Sequence[Draftable], num_sequences: int) -> CopiedDrafts:
        num_copied = sum(len(request.copied) for request in requests)
        return CopiedDrafts.best(requests, self.times.costs(num_sequences, num_copied), num_sequences)

    def _planned(
        self, kind: str, requests: Sequence[Draftable], copied: CopiedDrafts, num_sequences: int, plain: float
    ) -> DraftPlan | None:
        """The plan of one kind, without requests that it does not pay to catch up with; None without any left."""
        rows = len(requests) * max(request.most for request in requests) + sum(copied.counts)
        found = best_plan(
            kind,
            requests,
            [self.acceptance.mean_rate(request.sequence_id, kind) for request in requests],
            copied,
            self.times.costs(num_sequences, rows),
            num_sequences=num_sequences,
            step=self.drafting(kind).step_seconds / plain,
            stake=self._stake,
        )
        if found is None:
            return None
        joining = self._joining(kind, requests, 1 / copied.gain - 1 / found.gain, plain)
        lengths = [length if joins else 0 for length, joins in zip(found.lengths, joining, strict=True)]
        return DraftPlan(kind, lengths, found.gain) if any(lengths) else None

    def _joining(self, kind: str, requests: Sequence[Draftable], saved: float, plain: float) -> list[bool]:
        """Which requests get drafts: those where what they have generated, and may still, is worth to catch up with.

        `saved` is the share of a plain step that drafts save for each token. The balance pays for catching up.
        """
        left = self._balance
        joining = []
        for request in requests:
            cost = self._catch_up_cost(kind, request, plain)
            joins = not cost or cost < min(left, saved * min(request.num_generated, request.num_left))
            left -= cost if joins else 0.0
            joining.append(joins)
        return joining

    def _catch_up_cost(self, kind: str, request: Draftable, plain: float) -> float:
        """Plain steps that it takes to catch up with a request; 0 for what the step of the first draft includes."""
        if request.catch_up_tokens <= SMALL_CATCH_UP:
            return 0.0
        times = self.drafting(kind)
        guess = max(_CATCH_UP_GUESS * plain, _CATCH_UP_STEPS * times.step_seconds)
        return times.catch_up_seconds(request.catch_up_tokens, guess) / plain

    def _try_one(self, kinds: Mapping[str, Sequence[Draftable]], plain: float) -> dict[str, list[int]]:
        """One draft of one kind for the request that is most likely to take it, if a try is due."""
        for kind, requests in kinds.items():
            best = self._likeliest(kind, requests)
            is_affordable = self._catch_up_cost(kind, requests[best], plain) <= max(0.0, self._balance)
            if is_affordable and self._tries.setdefault(kind, _Tries()).is_due():
                self._tried_kind = kind
                return {kind: [int(index == best) for index in range(len(requests))]}
        return {}

    def _explored(self, kinds: Mapping[str, Sequence[Draftable]], plain: float) -> dict[str, list[int]]:
        """One draft of a kind that is not asked while others pay, once its share of the time has room for it."""
        chosen: dict[str, list[int]] = {}
        for kind, requests in kinds.items():
            credit = min(self._credit.get(kind, 0.0) + EXPLORE_SHARE, _LARGEST_CREDIT)
            best = self._likeliest(kind, requests)
            cost = self.drafting(kind).step_seconds / plain or _UNKNOWN_STEP
            cost += self._catch_up_cost(kind, requests[best], plain)
            if cost <= credit and not chosen:
                chosen[kind] = [int(index == best) for index in range(len(requests))]
                credit -= cost
            self._credit[kind] = credit
        return chosen

    def _likeliest(self, kind: str, requests: Sequence[Draftable]) -> int:
        """The request with the least to catch up with, and of several the one with the highest acceptance."""
        rates = [self.acceptance.mean_rate(request.sequence_id, kind) for request in requests]
        return max(range(len(requests)), key=lambda index: (-requests[index].catch_up_tokens, rates[index]))

    def _survivals(self, candidates: Sequence[DraftCandidates]) -> list[tuple[float, int, int, float]]:
        """Survival of each draft that could pay, a number that orders those of one sequence, and its candidate.

        The last number is how many more tokens have to be computed again on average, if the model replays.
        """
        found = []
        for index, each in enumerate(candidates):
            survival = 1.0
            for place, grade in enumerate(each.grades):
                before = survival
                survival *= self.acceptance.rate(each.sequence_id, each.kind, grade)
                if place and survival < _LEAST_SURVIVAL:
                    break
                found.append((survival, -place, index, (place + 1) * (before - survival)))
        return found

    def _best(self, ranked: Sequence[tuple[float, int, int, float]], num_sequences: int, likeliest: str) -> int:
        """Number of drafts with the highest gain; 1 for a try, where one is due and affordable; else 0.

        `likeliest` is the kind of the first.
        """
        if not ranked:
            return 0
        costs = self.times.costs(num_sequences, len(ranked))
        stake = self._stake
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
        if costs[1] > stake:
            return 0
        return int(likeliest == self._tried_kind or self._tries.setdefault(likeliest, _Tries()).is_due())

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
