"""What is measured: two subjects, the candidate and the baseline, behind one small protocol.

`engine_subject.EngineSubject` puts a compiled artifact behind it; tests put known logits and a hand-driven clock.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

LogitsArray = NDArray[np.float32]


@dataclass(frozen=True)
class StepEvent:
    """What one engine step did for one request: tokens it gained, and whether it is complete."""

    request: int
    new_tokens: int
    finished: bool


class AccuracySubject(Protocol):
    """Gives the logits of whole prompts."""

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        ...

    @property
    def context_tokens(self) -> int:
        """Longest sequence."""
        ...

    def prompt_logits(self, token_ids: Sequence[int]) -> Iterator[LogitsArray]:
        """Logits of every position, in order, as chunks [n, vocab]; two subjects cut a prompt at the same places.

        A chunk is only valid until the next one is asked for. Each prompt starts with an empty context.
        """
        ...


class LatencySubject(Protocol):
    """Serves requests step by step; the caller holds the clock."""

    @property
    def vocab_size(self) -> int:
        """Token ids below this are valid."""
        ...

    @property
    def context_tokens(self) -> int:
        """Longest sequence, prompt and output together."""
        ...

    def submit(self, prompt: Sequence[int], output_tokens: int) -> int:
        """Queue a greedy request that makes exactly `output_tokens` tokens; returns its id."""
        ...

    def step(self) -> list[StepEvent]:
        """Run one engine step."""
        ...


class Subject(AccuracySubject, LatencySubject, Protocol):
    """Both."""
