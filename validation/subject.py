"""A compiled artifact as a subject of measurement: the runtime's engine behind the protocol of subject.py.

What is measured: two subjects, the candidate and the baseline, behind one small protocol.

`engine_subject.EngineSubject` puts a compiled artifact behind it; tests put known logits and a hand-driven clock.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ingot.artifact import Artifact
from ingot.errors import DataError
from ingot.runtime.engine import Engine
from ingot.runtime.executors import DeviceFacts
from ingot.runtime.sampling import SamplingParams

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


_SPARE_BLOCKS = 2


class EngineSubject:
    """Owns an engine without a prefix cache: every prompt is computed from its start, in both roles."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @classmethod
    def load(
        cls, artifact: Artifact, sequence_tokens: int | None = None, num_threads: int | None = None
    ) -> "EngineSubject":
        """Load an artifact; `sequence_tokens` sizes the KV pool so that so many tokens fit, else it has its own size.

        Raises EngineError as Engine.load does.
        """
        blocks = None
        if sequence_tokens is not None:
            blocks = 2 * -(-sequence_tokens // artifact.manifest.kv.block_tokens) + _SPARE_BLOCKS
        return cls(Engine.load(artifact, kv_blocks=blocks, prefix_cache=False, num_threads=num_threads))

    @property
    def device(self) -> DeviceFacts | None:
        """The card that it computes on; None on the CPU."""
        return self._engine.device

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._engine.model.vocab_size

    @property
    def context_tokens(self) -> int:
        """Longest sequence."""
        return self._engine.model.context_tokens

    def encode(self, text: str) -> tuple[list[int], int | None]:
        """Tokens of a text without any added token, and the BOS token where the tokenizer puts one in front.

        DataError when the artifact has no tokenizer.
        """
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise DataError("the artifact has no tokenizer, so no text can be evaluated; leave accuracy out")
        opened = tokenizer.encode(text[:1])
        bos = tokenizer.bos_token_id if opened[:1] == [tokenizer.bos_token_id] else None
        return tokenizer.encode(text, add_special_tokens=False), bos

    def prompt_logits(self, token_ids: Sequence[int]) -> Iterator[LogitsArray]:
        """Logits of every position as chunks [n, vocab]; the scheduler cuts by token counts alone."""
        return (part.logits for part in self._engine.iterate_prompt_logits([token_ids]))

    def submit(self, prompt: Sequence[int], output_tokens: int) -> int:
        """Queue a greedy request of exactly `output_tokens` tokens."""
        return self._engine.add(list(prompt), SamplingParams(max_tokens=output_tokens, ignore_eos=True))

    def step(self) -> list[StepEvent]:
        """Run one engine step."""
        return [StepEvent(output.request_id, len(output.tokens), output.finished) for output in self._engine.step()]

    def close(self) -> None:
        """Give back memory and threads."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
