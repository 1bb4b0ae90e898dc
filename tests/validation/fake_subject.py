"""Subjects with known logits, and with latencies of a clock that the test sets."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ingot.validation.subject import LogitsArray, StepEvent


@dataclass
class TableSubject:
    """Logits of the next token are row `token` of a table [vocab, vocab]; chunks of `chunk_tokens` rows."""

    table: LogitsArray
    context_tokens: int = 64
    chunk_tokens: int = 3
    prompts: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def vocab_size(self) -> int:
        """Rows of the table."""
        return len(self.table)

    def prompt_logits(self, token_ids: Sequence[int]) -> Iterator[LogitsArray]:
        """Rows of the table; one buffer is reused for every chunk, as an engine may do."""
        self.prompts.append(tuple(token_ids))
        buffer = np.empty((self.chunk_tokens, self.vocab_size), np.float32)
        for start in range(0, len(token_ids), self.chunk_tokens):
            chunk = list(token_ids[start : start + self.chunk_tokens])
            buffer[: len(chunk)] = self.table[chunk]
            yield buffer[: len(chunk)]
            buffer[:] = np.nan


@dataclass
class Clock:
    """A clock that only advances when the test sets it."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class ClockedSubject:
    """Every step takes `step_seconds`, and gives each running request one token; prefill takes `prefill_steps` more."""

    clock: Clock
    step_seconds: float
    prefill_steps: int = 1
    vocab_size: int = 100
    context_tokens: int = 64
    most_in_flight: int = 0
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    _left: dict[int, list[int]] = field(default_factory=dict)

    def submit(self, prompt: Sequence[int], output_tokens: int) -> int:
        """Queue the request with its [prefill steps, tokens] left."""
        self.prompts.append(tuple(prompt))
        self._left[len(self.prompts)] = [self.prefill_steps, output_tokens]
        self.most_in_flight = max(self.most_in_flight, len(self._left))
        return len(self.prompts)

    def step(self) -> list[StepEvent]:
        """Advance the clock and every request."""
        self.clock.now += self.step_seconds
        return [event for request in list(self._left) if (event := self._advance(request))]

    def _advance(self, request: int) -> StepEvent | None:
        left = self._left[request]
        if left[0] > 1:
            left[0] -= 1
            return None
        left[1] -= 1
        if left[1] == 0:
            del self._left[request]
        return StepEvent(request, 1, left[1] == 0)
