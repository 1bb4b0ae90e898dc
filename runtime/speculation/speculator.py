"""Speculation as the step loop sees it: adds drafts to a scheduled step, and learns from what became of them.

    add_drafts   ask the drafter, choose by `length_control`, extend the step as far as tokens and blocks reach
    verified     count accepted drafts, per position
    stepped      measure the step, and rest after it as long as the control says
    rested       count down

A proposal is cut before its first token outside the vocabulary or forbidden by a constraint, and at the length that was
asked for. Where a constraint forces text, its tokens are the drafts, and the drafter is not asked. A drafter that
raises costs its step the drafts; after MOST_FAILURES in a row it is not called again. The log has the first failure,
and the one that turns it off.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ingot.runtime.requests.request import Request
from ingot.runtime.scheduling import sequence as steps
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.sequence import ScheduledBatch, ScheduledSequence
from ingot.runtime.speculation.counters import SpeculationCounters
from ingot.runtime.speculation.drafter import NUM_GRADES, Drafter, DraftRequest, Proposal
from ingot.runtime.speculation.length_control import SMALL_CATCH_UP, Draftable, DraftCandidates, LengthControl

_log = logging.getLogger(__name__)

MOST_FAILURES = 3


class Speculator:
    """Speculation of one engine. It owns the drafter.

    num_draft_tokens   most drafts of a sequence in a step
    """

    def __init__(
        self, drafter: Drafter, *, vocab_size: int, num_draft_tokens: int = 8, control: LengthControl | None = None
    ) -> None:
        assert num_draft_tokens > 0
        self.clock: Callable[[], float] = time.perf_counter  # seconds; what the cost of drafts is measured with
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._num_draft_tokens = num_draft_tokens
        self._control = control or LengthControl()
        self._num_failures = 0  # in a row
        self._grades: dict[int, tuple[int, ...]] = {}  # of the drafts in the step, by sequence
        self._num_resting = 0  # steps to come without a look at them
        self._measures_plain = self._control.adapts  # whether the step after them is measured, without a look at it
        self._num_decoding = 0  # sequences in the step
        self._only_decodes = False
        self._elapsed = 0.0  # seconds of the draft model in the step
        self._drafting_seconds = 0.0  # of them, without disturbances
        self._num_tokens = 0  # that the step's drafts gave, beyond one for each sequence
        self.counters = SpeculationCounters()

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
        """Whether the drafter is called."""
        return self._num_failures < MOST_FAILURES

    def may_draft(self, requests: Sequence[Request]) -> bool:
        """Whether the next step may have drafts for these requests, which decode."""
        return self.is_on and not self._measures_plain and any(request.speculate for request in requests)

    def add_drafts(self, batch: ScheduledBatch, scheduler: Scheduler, requests: Mapping[int, Request]) -> None:
        """Extend a scheduled step by drafts for the sequences that decode. One short of blocks gets none."""
        self._grades, self._num_tokens = {}, 0
        self._elapsed = self._drafting_seconds = 0.0
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
        """What the drafter proposes for entries of the step; only those that are not empty."""
        forced = {index: self._usable(_forced(request), request) for index, request in asked.items()}
        found = {index: proposal for index, proposal in forced.items() if proposal.tokens}
        asked = {index: request for index, request in asked.items() if index not in found}
        if asked and not self._drafter.is_free:
            asked = self._planned(asked, self._num_decoding)
        if not asked:
            return found
        proposals = self._propose([*asked.values()])
        return found | {index: proposal for index, proposal in zip(asked, proposals, strict=True) if proposal.tokens}

    def _choose(
        self, batch: ScheduledBatch, scheduler: Scheduler, proposals: Mapping[int, Proposal], room: int
    ) -> None:
        """Add to the step what is worth verifying."""
        ids = {index: batch.entries[index].sequence.id for index in proposals}
        candidates = [DraftCandidates(ids[index], proposal.grades) for index, proposal in proposals.items()]
        counts = self._control.choose(candidates, self._num_decoding, room)
        for (index, proposal), count in zip(proposals.items(), counts, strict=True):
            if count:
                scheduler.add_drafts(batch, index, proposal.tokens[:count])
                self._grades[ids[index]] = proposal.grades

    def verified(self, entry: ScheduledSequence, tokens: Sequence[int]) -> None:
        """Record the tokens that an entry with drafts gave its request."""
        pairs = [*zip(entry.drafts, tokens, strict=False)]  # one more token than drafts when all were accepted
        num_accepted = sum(draft == token for draft, token in pairs)
        self.counters.count(len(entry.drafts), len(pairs), num_accepted)
        self._control.verified(entry.sequence.id, self._grades[entry.sequence.id][: len(pairs)], num_accepted)
        self._num_tokens += max(0, len(tokens) - 1)

    def stepped(self, batch: ScheduledBatch, seconds: float) -> None:
        """Record a step that was not at rest, and choose whether to rest after it."""
        if not self._num_decoding:
            return
        if self._measures_plain:
            if self._only_decodes:
                self._measures_plain = not self._control.rested(self._num_decoding, seconds)
            return
        num_drafts = sum(len(entry.drafts) for entry in batch.entries)
        num_tokens = self._num_decoding + self._num_tokens
        measured = seconds - self._elapsed if self._only_decodes else None
        rest = self._control.looked(self._num_decoding, num_drafts, num_tokens, measured, self._drafting_seconds)
        if rest:
            self._num_resting, self._measures_plain = rest - 1, True

    def forget(self, sequence: steps.Sequence) -> None:
        """Free what is kept for a sequence that has ended."""
        self._drafter.forget(sequence)
        self._control.forget(sequence.id)

    def close(self) -> None:
        """Close the drafter. Idempotent."""
        self._drafter.close()

    def _request(self, request: Request) -> DraftRequest | None:
        """What to ask the drafter for; None when no draft could be used. A prompt's step has none (`choice_groups`)."""
        sequence = request.sequence
        most = min(self._num_draft_tokens, sequence.max_stored_tokens - len(sequence.tokens))
        if most <= 0 or not request.speculate or sequence.num_in_flight or not sequence.num_generated:
            return None
        return DraftRequest(sequence, request.sampler, most, matcher=request.matcher)

    def _planned(self, asked: Mapping[int, DraftRequest], num_sequences: int) -> dict[int, DraftRequest]:
        """The requests that a draft model is to make drafts for, and how many."""
        draftable = [self._draftable(request) for request in asked.values()]
        lengths = self._control.plan(draftable, num_sequences) if draftable else []
        return {
            index: request._replace(
                num_tokens=length,
                is_worth_more=partial(self._control.is_worth_more, request.sequence.id, num_sequences),
            )
            for (index, request), length in zip(asked.items(), lengths, strict=True)
            if length
        }

    def _draftable(self, request: DraftRequest) -> Draftable:
        sequence = request.sequence
        return Draftable(
            sequence.id,
            request.num_tokens,
            self._drafter.catch_up_tokens(sequence),
            sequence.num_generated,
            sequence.max_total_tokens - len(sequence.tokens),
        )

    def _propose(self, asked: Sequence[DraftRequest]) -> list[Proposal]:
        """What the drafter proposes, as far as it can be verified."""
        try:
            proposals = self._drafter.propose(asked) if self._drafter.is_free else self._timed(asked)
            usable = [self._usable(p, request) for p, request in zip(proposals, asked, strict=True)]
        except Exception as error:  # noqa: BLE001 (drafts are optional; it is logged)
            self._failed(error)
            return [Proposal()] * len(asked)
        self._num_failures = 0
        return usable

    def _timed(self, asked: Sequence[DraftRequest]) -> list[Proposal]:
        """The proposals of a draft model, and how long they took."""
        missing = [self._drafter.catch_up_tokens(request.sequence) for request in asked]
        started = self.clock()
        try:
            proposals = self._drafter.propose(asked)
        finally:
            self._elapsed = self._drafting_seconds = self.clock() - started
        num_steps = max(len(proposal.tokens) for proposal in proposals)
        caught_up = sum(
            before - max(0, self._drafter.catch_up_tokens(request.sequence))
            for before, request in zip(missing, asked, strict=True)
            if before > SMALL_CATCH_UP
        )
        self._drafting_seconds = self._control.drafting.observe(self._elapsed, num_steps, caught_up)
        return proposals

    def _failed(self, error: Exception) -> None:
        self._num_failures += 1
        self.counters.num_failures += 1
        if not self.is_on or self.counters.num_failures == 1:
            state = "goes on without drafts for this step" if self.is_on else "makes no more drafts"
            _log.warning("the drafter failed, the engine %s: %s: %s", state, type(error).__name__, error)

    def _usable(self, proposal: Proposal, request: DraftRequest) -> Proposal:
        tokens, grades = proposal
        if not tokens:
            return proposal
        if len(tokens) != len(grades):
            raise ValueError(f"{len(tokens)} drafts have {len(grades)} grades")
        count = min(len(tokens), request.num_tokens)
        for index in range(count):
            if not (0 <= tokens[index] < self._vocab_size and 0 <= grades[index] < NUM_GRADES):
                return proposal.cut(index)
        if request.matcher:
            count = request.matcher.num_allowed(tokens[:count])
        return proposal.cut(count)


def _forced(request: DraftRequest) -> Proposal:
    """The tokens of text that a constraint forces. The model may spell it by others, so they are drafts too."""
    if request.matcher is None:
        return Proposal()
    tokens = tuple(request.matcher.forced())
    return Proposal(tokens, (NUM_GRADES - 1,) * len(tokens))
