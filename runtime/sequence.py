"""One sequence as the scheduler sees it: its tokens, and how many of them have keys and values in the pool."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

# int64 tokens that numpy can read in place. Quoted: the class cannot be subscripted at run time before Python 3.12.
TokenArray: TypeAlias = "array[int]"


class SequenceState(Enum):
    """Where a sequence stands. A preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and generated tokens in one array; the first `num_computed` of them are in the KV pool.

    `num_in_flight` tokens more were chosen on the device, in steps whose outcome the host has not read yet: their
    number is known, so that the next step can be scheduled, but not what they are. It is 0 where steps do not overlap.
    """

    id: int
    tokens: TokenArray
    num_prompt_tokens: int
    max_total_tokens: int
    reuse_prefix: bool = True  # False where the logits of every token are wanted
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    cached_tokens: int | None = None
    num_preemptions: int = 0
    num_in_flight: int = 0

    def __post_init__(self) -> None:
        assert 0 < self.num_prompt_tokens == len(self.tokens) < self.max_total_tokens

    @classmethod
    def of(cls, sequence_id: int, prompt: Iterable[int], max_tokens: int, *, reuse_prefix: bool = True) -> "Sequence":
        """Make the sequence of a prompt, which ends after `max_tokens` more."""
        tokens = array("q", prompt)
        return cls(sequence_id, tokens, len(tokens), len(tokens) + max_tokens, reuse_prefix)

    @property
    def num_pending(self) -> int:
        """Tokens without keys and values: 1 while decoding, more while the prompt is read."""
        return len(self.tokens) + self.num_in_flight - self.num_computed

    @property
    def num_generated(self) -> int:
        """Tokens made so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def generated(self) -> TokenArray:
        """The tokens made so far (a copy)."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def is_full(self) -> bool:
        """Whether no further token may be made."""
        return len(self.tokens) + self.num_in_flight >= self.max_total_tokens

    @property
    def max_stored_tokens(self) -> int:
        """Most tokens it will ever have in the KV pool: the last one made is never fed back."""
        return self.max_total_tokens - 1
