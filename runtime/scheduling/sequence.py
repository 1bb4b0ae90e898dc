"""A sequence: the scheduler's view of one request, its tokens and how many of them are in the KV pool."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from ingot.runtime.adapters import Adapter
from ingot.runtime.kv.blocks import SHARED, TokenArray
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
    def max_stored_tokens(self) -> int:
        """Most tokens that it can have in the KV pool: the last generated token is never fed back."""
        return self.max_total_tokens - 1
