"""A sequence, which is the scheduler's view of one request, and a step of some: which tokens of each it computes."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ingot.runtime.adapters import Adapter
from ingot.runtime.kv.blocks import SHARED, Copy, TokenArray
from ingot.runtime.kv.keys import PrefixScope
from ingot.runtime.kv.transfers.restored_prefix import CachedTokens, RestoredPrefix


class SequenceState(Enum):
    """State of a sequence.

    An unforked one waits for a prompt that it will share. A loading one has its blocks, which are being restored. A
    preempted one waits again; a parked one gave up its blocks while it had no token to compute, until its next one.
    """

    UNFORKED = "unforked"
    PARKED = "parked"
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and generated tokens in one array; the first `num_computed` of them are in the KV pool.

    `num_in_flight` more tokens are sampled on the device by a step that the host has not read yet. Their number is
    known, so the next step can be scheduled, but not their ids. It is 0 unless steps are pipelined.

    `rank` orders running sequences, the most urgent first: level and place. The level is the priority at first, and
    gets lower by waiting (`waiting`). Places count first admissions from 1; 0 before. Sequences that were forked from
    another have its place, and their id after it.
    """

    id: int
    tokens: TokenArray
    num_prompt_tokens: int
    max_total_tokens: int
    reuse_prefix: bool = True  # False while every token needs logits
    scope: PrefixScope = SHARED  # of its blocks in the prefix index
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    cached_tokens: CachedTokens | None = None  # when it was admitted first
    load: RestoredPrefix | None = None
    is_read_ahead: bool = False
    num_failed_loads: int = 0  # after which it started over
    num_preemptions: int = 0
    num_in_flight: int = 0
    priority: int = 0  # lower numbers are served first
    group: str = ""  # a user or tenant; groups share the engine fairly
    rank: tuple[int, ...] = (0, 0)
    num_yields: int = 0  # preemptions for a more urgent sequence
    resume_level: int = 0  # level that it has at most when it is admitted
    num_charged: int = 0  # leading tokens that its group was charged for
    adapter: Adapter | None = None  # that its tokens are computed with

    def __post_init__(self) -> None:
        assert 0 < self.num_prompt_tokens == len(self.tokens) < self.max_total_tokens
        self.rank = (self.priority, 0)
        self.resume_level = self.priority

    @classmethod
    def of(
        cls,
        sequence_id: int,
        prompt: Iterable[int],
        max_tokens: int,
        *,
        reuse_prefix: bool = True,
        scope: PrefixScope = SHARED,
        priority: int = 0,
        group: str = "",
        adapter: Adapter | None = None,
    ) -> "Sequence":
        """The sequence of a prompt, for at most `max_tokens` more."""
        tokens = array("q", prompt)
        most = len(tokens) + max_tokens
        return cls(
            sequence_id,
            tokens,
            len(tokens),
            most,
            reuse_prefix=reuse_prefix,
            scope=scope,
            priority=priority,
            group=group,
            adapter=adapter,
        )

    def follow(self, parent: "Sequence") -> None:
        """Take the rank after a sequence that computed, and was charged for, the tokens that both begin with."""
        self.rank = (parent.level, parent.place, self.id)
        self.resume_level = parent.resume_level
        self.cached_tokens = parent.cached_tokens
        self.num_charged = parent.num_charged

    @property
    def level(self) -> int:
        """How urgent it is: its priority, or less by waiting."""
        return self.rank[0]

    @property
    def place(self) -> int:
        """Its number among first admissions, from 1; 0 before the first."""
        return self.rank[1]

    @property
    def num_pending(self) -> int:
        """Tokens without keys and values: 1 while decoding, more during prefill."""
        return len(self.tokens) + self.num_in_flight - self.num_computed

    @property
    def num_generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def generated(self) -> TokenArray:
        """The generated tokens (a copy)."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def is_full(self) -> bool:
        """Whether no further token may be generated."""
        return len(self.tokens) + self.num_in_flight >= self.max_total_tokens

    @property
    def num_left(self) -> int:
        """Most tokens that it may still generate, and at least 1."""
        return max(1, self.max_total_tokens - len(self.tokens))

    @property
    def max_stored_tokens(self) -> int:
        """Most tokens that it can have in the KV pool: the last generated token is never fed back."""
        return self.max_total_tokens - 1


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
