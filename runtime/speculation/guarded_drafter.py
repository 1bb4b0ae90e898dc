"""One drafter as the speculator calls it: what it proposes is made usable, its time is measured, errors turn it off.

A proposal is cut before its first token outside the vocabulary or forbidden by a constraint, and at the length that was
asked for. A drafter that raises costs its step the drafts; after MOST_FAILURES in a row it is not called again. The log
has its first failure, and the one that turns it off.
"""

import logging
from collections.abc import Callable, Sequence

from ingot.runtime.scheduling import sequence as steps
from ingot.runtime.speculation.counters import SpeculationCounters
from ingot.runtime.speculation.drafter import NUM_GRADES, Drafter, DraftRequest, Proposal
from ingot.runtime.speculation.length_control import SMALL_CATCH_UP
from ingot.runtime.speculation.step_times import DraftTimes

_log = logging.getLogger(__name__)

MOST_FAILURES = 3


class GuardedDrafter:
    """A drafter, which it closes. `elapsed` has the seconds of a model in this step, `seconds` those without noise."""

    def __init__(self, drafter: Drafter, vocab_size: int, times: DraftTimes, counters: SpeculationCounters) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._times = times
        self._counters = counters
        self._num_failures = 0
        self._num_failures_in_row = 0
        self.kind = drafter.kind
        self.is_free = drafter.is_free
        self.elapsed = self.seconds = 0.0

    @property
    def is_on(self) -> bool:
        """Report whether it is called."""
        return self._num_failures_in_row < MOST_FAILURES

    def begin(self) -> None:
        """Begin a step."""
        self.elapsed = self.seconds = 0.0

    def catch_up_tokens(self, sequence: steps.Sequence) -> int:
        """Tokens that it must compute before its first draft for a sequence."""
        return self._drafter.catch_up_tokens(sequence)

    def propose(self, asked: Sequence[DraftRequest], clock: Callable[[], float]) -> list[Proposal]:
        """Return its proposals, as far as they can be verified."""
        try:
            proposals = self._drafter.propose(asked) if self.is_free else self._timed(asked, clock)
            usable = [self.usable(p, request) for p, request in zip(proposals, asked, strict=True)]
        except Exception as error:  # noqa: BLE001 (drafts are optional; it is logged)
            self._failed(error)
            return [Proposal()] * len(asked)
        self._num_failures_in_row = 0
        return usable

    def usable(self, proposal: Proposal, request: DraftRequest) -> Proposal:
        """The drafts of a proposal that can be verified, with their kind."""
        tokens, grades, kind = proposal
        if not tokens:
            return Proposal()
        if len(tokens) != len(grades):
            raise ValueError(f"{len(tokens)} drafts have {len(grades)} grades")
        count = min(len(tokens), request.num_tokens)
        for index in range(count):
            if not (0 <= tokens[index] < self._vocab_size and 0 <= grades[index] < NUM_GRADES):
                count = index
                break
        if request.matcher and count:
            count = request.matcher.num_allowed(tokens[:count])
        return Proposal(tokens[:count], grades[:count], kind or self.kind)

    def forget(self, sequence: steps.Sequence) -> None:
        """Free what is kept for a sequence that has ended."""
        self._drafter.forget(sequence)

    def close(self) -> None:
        """Close the drafter. Idempotent."""
        self._drafter.close()

    def _timed(self, asked: Sequence[DraftRequest], clock: Callable[[], float]) -> list[Proposal]:
        """The proposals of a model, and how long they took."""
        missing = [self._drafter.catch_up_tokens(request.sequence) for request in asked]
        started = clock()
        try:
            proposals = self._drafter.propose(asked)
        finally:
            self.elapsed = self.seconds = clock() - started
        num_steps = max(len(proposal.tokens) for proposal in proposals)
        caught_up = sum(
            before - max(0, self._drafter.catch_up_tokens(request.sequence))
            for before, request in zip(missing, asked, strict=True)
            if before > SMALL_CATCH_UP
        )
        self.seconds = self._times.observe(self.elapsed, num_steps, caught_up)
        return proposals

    def _failed(self, error: Exception) -> None:
        self._num_failures += 1
        self._num_failures_in_row += 1
        self._counters.num_failures += 1
        if not self.is_on or self._num_failures == 1:
            state = "goes on without its drafts for this step" if self.is_on else "makes no more drafts of it"
            _log.warning("the drafter %s failed, the engine %s: %s: %s", self.kind, state, type(error).__name__, error)
