"""One scheduled step: the sequences and tokens that it computes, and the blocks that are copied before it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ingot.runtime.kv.blocks import Copy
from ingot.runtime.scheduling.sequence import Sequence, SequenceState


class ScheduledSequence(NamedTuple):
    """Tokens start .. start + num_tokens - 1 of a sequence; `samples` when they end with its newest token.

    `drafts` are guesses at the tokens that follow, which the step computes too, in order to verify them
    (`ingot.runtime.speculation`). Only an entry that samples has any. With `all_logits` every token gets logits.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    drafts: tuple[int, ...] = ()
    all_logits: bool = False

    @property
    def num_rows(self) -> int:
        """Tokens that the step computes for it, drafts included."""
        return self.num_tokens + len(self.drafts)

    @property
    def num_logits(self) -> int:
        """Rows of logits that it takes: after its newest token and after each draft, or after all tokens."""
        if self.all_logits:
            return self.num_rows
        return 1 + len(self.drafts) if self.samples else 0


@dataclass(slots=True)
class ScheduledBatch:
    """One step: what is computed, what is copied before, which sequences were preempted."""

    entries: list[ScheduledSequence] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, sequence: Sequence, num_tokens: int, copies: Iterable[Copy] = ()) -> None:
        """Add the next `num_tokens` tokens of a sequence to the step."""
        samples = num_tokens == sequence.num_pending
        start, reads_all = sequence.num_computed, not sequence.reuse_prefix
        self.entries.append(ScheduledSequence(sequence, start, num_tokens, samples, all_logits=reads_all))
        self.num_tokens += num_tokens
        if copies:
            self.copies.extend(copies)

    def only(self, entry: ScheduledSequence) -> "ScheduledBatch":
        """A step of one of the entries alone, without its drafts; its copies have been made."""
        return ScheduledBatch([entry._replace(drafts=())], num_tokens=entry.num_tokens)

    @property
    def has_drafts(self) -> bool:
        """Whether the step verifies drafts."""
        return any(entry.drafts for entry in self.entries)

    def drop_ended(self) -> None:
        """Remove the sequences that have ended since this was scheduled."""
        for entry in self.entries:
            if entry.sequence.state is SequenceState.FINISHED:
                break
        else:
            return
        self.entries = [entry for entry in self.entries if entry.sequence.state is not SequenceState.FINISHED]
        self.num_tokens = sum(entry.num_rows for entry in self.entries)
