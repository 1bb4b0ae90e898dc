"""Speculation as the step loop sees it: adds drafts to a scheduled step, and learns from what became of them.

    add_drafts   ask the drafters, choose by `length_control`, extend the step as far as tokens and blocks reach
    verified     count accepted drafts, per position
    stepped      learn from proposals that were not taken, measure the step, and rest after it as long as the control
                 says
    rested       count down

Drafters whose proposals cost next to nothing are all asked, then models, for the sequences where they are expected to
pay. Of the proposals for a sequence one is taken. Where a constraint forces text, its tokens are the drafts, and no
drafter is asked.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ingot.runtime.clock import SYSTEM_CLOCK
from ingot.runtime.requests.request import Request
from ingot.runtime.scheduling import sequence as steps
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.sequence import ScheduledBatch, ScheduledSequence
from ingot.runtime.speculation.acceptance import Acceptance
from ingot.runtime.speculation.counters import SpeculationCounters
from ingot.runtime.speculation.draft_plan import Draftable
from ingot.runtime.speculation.drafter import NUM_GRADES, Drafter, DraftRequest, ObservingDrafter, Proposal
from ingot.runtime.speculation.guarded_drafter import GuardedDrafter
from ingot.runtime.speculation.length_control import DraftCandidates, LengthControl

_CONSTRAINT = "constraint"  # kind of drafts that a constraint forces


class _Untaken(NamedTuple):
    """A proposal that the step does not verify, and the number of tokens before its drafts."""

    sequence: steps.Sequence
    num_tokens: int
    proposal: Proposal


class Speculator:
    """Speculation of one engine. It owns the drafters, of which no two have the same kind.

    num_draft_tokens   most drafts of a sequence in a step
    """

    def __init__(
        self, *drafters: Drafter, vocab_size: int, num_draft_tokens: int = 8, control: LengthControl | None = None
    ) -> None:
        assert num_draft_tokens > 0
        assert 0 < len(drafters) == len({drafter.kind for drafter in drafters})
        self.clock: Callable[[], float] = SYSTEM_CLOCK  # the engine's, once it has one; measures the cost of drafts
        self._num_draft_tokens = num_draft_tokens
        self._control = control or LengthControl()
        self.counters = SpeculationCounters()
        self._drafters = [
            GuardedDrafter(drafter, vocab_size, self._control.drafting(drafter.kind), self.counters)
            for drafter in drafters
        ]
        self._taken: dict[int, Proposal] = {}  # whose beginning is in the step, by sequence
        self._untaken: dict[int, list[_Untaken]] = defaultdict(list)  # sequence id -> proposals
        self._num_resting = 0  # steps to come without a look at them
        self._measures_plain = self._control.adapts  # whether the step after them is measured, without a look at it
        self._num_decoding = 0  # sequences in the step
        self._only_decodes = False
        self._num_tokens = 0  # that the step's drafts gave, beyond one for each sequence
        # Called after every step is computed; None where no drafter reads what it computed.
        self.observe = next((each.observe for each in drafters if isinstance(each, ObservingDrafter)), None)

    @property
    def rests(self) -> bool:
        """Whether the next step needs no call but `rested`."""
        return self._num_resting > 0 or not self.is_on

    def rested(self, batch: ScheduledBatch) -> None:
        """Record a step at rest."""
        if batch.entries:
            self._num_resting -= 1

    @property
    def is_on(self) -> bool:
        """Report whether a drafter is called."""
        return any(drafter.is_on for drafter in self._drafters)

    def may_draft(self, requests: Sequence[Request]) -> bool:
        """Whether the next step may have drafts for these requests, which decode."""
        return self.is_on and not self._measures_plain and any(request.speculate for request in requests)

    def add_drafts(self, batch: ScheduledBatch, scheduler: Scheduler, requests: Mapping[int, Request]) -> None:
        """Extend a scheduled step by drafts for the sequences that decode. One short of blocks gets none."""
        self._taken, self._num_tokens = {}, 0
        self._untaken.clear()
        for drafter in self._drafters:
            drafter.begin()
        decoding = [index for index, entry in enumerate(batch.entries) if entry.samples and entry.num_tokens == 1]
        self._num_decoding = len(decoding)
        self._only_decodes = len(decoding) == len(batch.entries)
        if self._measures_plain:
            return
        room = scheduler.max_batch_tokens - batch.num_tokens
        if batch.preempted or room <= 0:
            return
        asked = {
            index: request
            for index in decoding
            if (request := self._request(requests[batch.entries[index].sequence.id])) is not None
        }
        proposals = self._proposals(asked)
        if proposals:
            self._choose(batch, scheduler, proposals, room)

    def _proposals(self, asked: Mapping[int, DraftRequest]) -> dict[int, Proposal]:
        """The proposal to take for entries of the step; only those that are not empty."""
        forced = {index: self._drafters[0].usable(_forced(request), request) for index, request in asked.items()}
        taken = {index: proposal for index, proposal in forced.items() if proposal.tokens}
        asked = {index: request for index, request in asked.items() if index not in taken}
        found: dict[int, list[Proposal]] = {index: [] for index in asked}
        for drafter in self._drafters:
            if asked and drafter.is_free and drafter.is_on:
                self._propose(drafter, asked, found)
        models = [drafter for drafter in self._drafters if drafter.is_on and not drafter.is_free]
        if asked and models:
            for drafter, planned in self._planned(models, asked, found):
                self._propose(drafter, planned, found)
        return taken | {
            index: self._pick(asked[index].sequence, proposals) for index, proposals in found.items() if proposals
        }

    def _propose(
        self, drafter: GuardedDrafter, asked: Mapping[int, DraftRequest], found: Mapping[int, list[Proposal]]
    ) -> None:
        """Add what a drafter proposes to what was found for entries of the step."""
        for index, proposal in zip(asked, drafter.propose([*asked.values()], self.clock), strict=True):
            if proposal.tokens:
                found[index].append(proposal)

    def _pick(self, sequence: steps.Sequence, proposals: Sequence[Proposal]) -> Proposal:
        picked = self._control.pick(sequence.id, proposals)
        self._untaken[sequence.id] = [
            _Untaken(sequence, len(sequence.tokens), each) for each in proposals if each is not picked
        ]
        return picked

    def _choose(
        self, batch: ScheduledBatch, scheduler: Scheduler, proposals: Mapping[int, Proposal], room: int
    ) -> None:
        """Add to the step what is worth verifying."""
        sequences = {index: batch.entries[index].sequence for index in proposals}
        candidates = [
            DraftCandidates(sequences[index].id, proposal.kind, proposal.grades)
            for index, proposal in proposals.items()
        ]
        counts = self._control.choose(candidates, self._num_decoding, room)
        for (index, proposal), count in zip(proposals.items(), counts, strict=True):
            sequence = sequences[index]
            if count:
                scheduler.add_drafts(batch, index, proposal.tokens[:count])
                self._taken[sequence.id] = proposal
            else:
                self._untaken[sequence.id].append(_Untaken(sequence, len(sequence.tokens), proposal))

    def verified(self, entry: ScheduledSequence, tokens: Sequence[int]) -> None:
        """Record the tokens that an entry with drafts gave its request."""
        pairs = [*zip(entry.drafts, tokens, strict=False)]  # one more token than drafts when all were accepted
        num_accepted = sum(draft == token for draft, token in pairs)
        taken = self._taken[entry.sequence.id]
        self.counters.count(taken.kind, len(entry.drafts), len(pairs), num_accepted)
        self._control.verified(entry.sequence.id, taken.kind, taken.grades[: len(pairs)], num_accepted)
        self._num_tokens += max(0, len(tokens) - 1)

    def stepped(self, batch: ScheduledBatch, seconds: float) -> None:
        """Record a step that was not at rest, and choose whether to rest after it."""
        if not self._num_decoding:
            return
        if self._measures_plain:
            if self._only_decodes:
                self._measures_plain = not self._control.rested(self._num_decoding, seconds)
            return
        for untaken in self._untaken.values():
            for each in untaken:
                self._compare(each)
        num_drafts = sum(len(entry.drafts) for entry in batch.entries)
        num_tokens = self._num_decoding + self._num_tokens
        measured = seconds - sum(drafter.elapsed for drafter in self._drafters) if self._only_decodes else None
        drafting = sum(drafter.seconds for drafter in self._drafters)
        rest = self._control.looked(self._num_decoding, num_drafts, num_tokens, measured, drafting)
        if rest:
            self._num_resting, self._measures_plain = rest - 1, True

    def _compare(self, untaken: _Untaken) -> None:
        """Learn from the tokens that came how many drafts of a proposal would have been accepted."""
        sequence, start, (drafts, grades, kind) = untaken
        tokens = sequence.tokens[start : start + len(drafts)]
        num_right = 0
        while num_right < len(tokens) and tokens[num_right] == drafts[num_right]:
            num_right += 1
        if tokens:
            self._control.compared(sequence.id, kind, grades[: min(num_right + 1, len(tokens))], num_right)

    def forget(self, sequence: steps.Sequence) -> None:
        """Free what is kept for a sequence that has ended."""
        for drafter in self._drafters:
            drafter.forget(sequence)
        self._untaken.pop(sequence.id, None)
        self._control.forget(sequence.id)

    def close(self) -> None:
        """Close the drafters. Idempotent."""
        for drafter in self._drafters:
            drafter.close()

    def _request(self, request: Request) -> DraftRequest | None:
        """What to ask the drafter for; None when no draft could be used. A prompt's step has none (`choice_groups`)."""
        sequence = request.sequence
        most = min(self._num_draft_tokens, sequence.max_stored_tokens - len(sequence.tokens))
        if most <= 0 or not request.speculate or sequence.num_in_flight or not sequence.num_generated:
            return None
        return DraftRequest(sequence, request.sampler, most, matcher=request.matcher)

    def _planned(
        self,
        models: Sequence[GuardedDrafter],
        asked: Mapping[int, DraftRequest],
        found: Mapping[int, Sequence[Proposal]],
    ) -> list[tuple[GuardedDrafter, dict[int, DraftRequest]]]:
        """The models that draft in this step, each with the requests that it is to make drafts for, and how many."""
        num_sequences, acceptance = self._num_decoding, self._control.acceptance
        copied = {
            index: _likeliest_survivals(acceptance, request.sequence.id, found[index])
            for index, request in asked.items()
        }
        kinds = {
            model.kind: [_draftable(model, request, copied[index]) for index, request in asked.items()]
            for model in models
        }
        lengths = self._control.plan(kinds, num_sequences)
        planned = []
        for model in models:
            is_worth_more = partial(self._is_worth_more, model.kind)
            requests = {
                index: request._replace(
                    num_tokens=length, is_worth_more=partial(is_worth_more, request.sequence.id, num_sequences)
                )
                for (index, request), length in zip(asked.items(), lengths.get(model.kind, ()), strict=False)
                if length
            }
            if requests:
                planned.append((model, requests))
        return planned

    def _is_worth_more(self, kind: str, sequence_id: int, num_sequences: int, grades: Sequence[int]) -> bool:
        return self._control.is_worth_more(sequence_id, kind, num_sequences, grades)


def _likeliest_survivals(acceptance: Acceptance, sequence_id: int, proposals: Sequence[Proposal]) -> Sequence[float]:
    """Survivals of the proposal with the most expected tokens; none without a proposal."""
    found = [acceptance.survivals(sequence_id, proposal.kind, proposal.grades) for proposal in proposals]
    return max(found, key=sum, default=())


def _draftable(model: GuardedDrafter, request: DraftRequest, copied: Sequence[float]) -> Draftable:
    sequence = request.sequence
    return Draftable(
        sequence.id,
        request.num_tokens,
        model.catch_up_tokens(sequence),
        sequence.num_generated,
        sequence.max_total_tokens - len(sequence.tokens),
        copied,
    )


def _forced(request: DraftRequest) -> Proposal:
    """The tokens of text that a constraint forces. The model may spell it by others, so they are drafts too."""
    if request.matcher is None:
        return Proposal()
    tokens = tuple(request.matcher.forced())
    return Proposal(tokens, (NUM_GRADES - 1,) * len(tokens), _CONSTRAINT)
