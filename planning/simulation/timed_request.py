"""Requests of a simulation: lengths that arrive at a moment, and how they ended."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ingot.planning.simulation.traces import MOONCAKE_BLOCK_TOKENS, RequestLengths, block_tokens, tokens_of_line
from ingot.runtime.asking.outputs import FinishReason, RequestMetrics
from ingot.runtime.forward_batch import Int64Array
from ingot.runtime.kv.blocks import TokenArray
from ingot.runtime.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request of a load: when it arrives, and its lengths.

    received_tokens   tokens of its prompt whose keys and values come with it, from another engine
    waited_seconds    how long before it was sent; its timeout counts from there
    """

    seconds: float
    lengths: RequestLengths
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    received_tokens: int = 0
    waited_seconds: float = 0.0

    def prompt(self, vocab_size: int) -> Int64Array:
        """Return its tokens: equal blocks have equal ones; without blocks, those of no other line."""
        lengths = self.lengths
        if not lengths.blocks:
            return tokens_of_line(lengths.line, lengths.prompt_tokens, vocab_size)
        blocks = [block_tokens(block, self.block_tokens, vocab_size) for block in lengths.blocks]
        return np.concatenate(blocks)[: lengths.prompt_tokens]

    def stand_ins(self) -> TokenArray:
        """Return the numbers of its blocks, or of its line, for tokens: equal wherever tokens of `prompt` match.

        They are not below the size of any vocabulary, and none is 0, the value of generated tokens.
        """
        lengths = self.lengths
        if not lengths.blocks:
            return array("q", (-1 - lengths.line,)) * lengths.prompt_tokens
        tokens = array("q")
        for block in lengths.blocks:
            tokens.extend(array("q", (1 + block,)) * self.block_tokens)
        return tokens[: lengths.prompt_tokens]


class RequestOutcome(Protocol):
    """How a request was served. `Completion` implements this too."""

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        ...

    @property
    def cached_tokens(self) -> int:
        """Leading ones that were not computed."""
        ...

    @property
    def metrics(self) -> RequestMetrics:
        """Its times and counts."""
        ...


class ServedLengths(NamedTuple):
    """How a request was served of which only lengths are known. Implements `RequestOutcome`."""

    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    metrics: RequestMetrics


class EndedRequest(NamedTuple):
    """A request that has ended, and how; without a completion it was refused."""

    request: TimedRequest
    completion: RequestOutcome | None


class ComputedTokens(NamedTuple):
    """Tokens of a request that a step, or each step of a decode run in turn, computes.

    start       leading tokens that are in the KV pool before
    is_prompt   whether they are known tokens: of the prompt or, after a preemption, of the output
    """

    request: TimedRequest
    start: int
    num_tokens: int
    is_prompt: bool


class ObservedSteps(NamedTuple):
    """A step of an engine, or a decode run, that has been made; `scheduler` is the engine's."""

    scheduler: Scheduler
    begin: float
    end: float
    num_steps: int
    computed: Sequence[ComputedTokens]


StepWatch = Callable[[ObservedSteps], object]
