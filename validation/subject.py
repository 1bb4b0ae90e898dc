"""The subjects of a measurement, candidate and baseline: small protocols, and the engine that implements them.

Tests implement the protocols with known logits and with a clock that they set.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ingot.artifact import Artifact
from ingot.errors import DataError
from ingot.runtime.asking.outputs import require_success
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.executors import DeviceFacts
from ingot.runtime.options import EngineOptions

LogitsArray = NDArray[np.float32]
_SPARE_BLOCKS = 2


@dataclass(frozen=True)
class StepEvent:
    """Result of one engine step for one request: number of new tokens, and whether the request is finished."""

    request: int
    new_tokens: int
    finished: bool


class AccuracySubject(Protocol):
    """Computes the logits of whole prompts."""

    @property
    def vocab_size(self) -> int:
        """Number of columns of the logits."""
        ...

    @property
    def context_tokens(self) -> int:
        """Maximum length of a sequence."""
        ...

    def prompt_logits(self, token_ids: Sequence[int]) -> Iterator[LogitsArray]:
        """Logits of every position, in order, in chunks [n, vocab]; two subjects split a prompt at the same places.

        A chunk is valid until the next one is requested. Each prompt starts with an empty context.
        """
        ...


class GreedySubject(Protocol):
    """Continues prompts with its likeliest tokens."""

    @property
    def context_tokens(self) -> int:
        """Maximum length of a sequence, prompt and output together."""
        ...

    def continue_greedily(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[list[int]]:
        """Exactly `output_tokens` tokens for each prompt."""
        ...


class LatencySubject(Protocol):
    """Serves requests step by step; the caller measures time."""

    @property
    def vocab_size(self) -> int:
        """Token ids below this are valid."""
        ...

    @property
    def context_tokens(self) -> int:
        """Maximum length of a sequence, prompt and output together."""
        ...

    def submit(self, prompt: Sequence[int], output_tokens: int) -> int:
        """Queue a greedy request for exactly `output_tokens` tokens; returns its id."""
        ...

    def step(self) -> list[StepEvent]:
        """Run one engine step."""
        ...


class EngineSubject:
    """Implements all protocols with an engine that it owns, without prefix cache: every prompt is computed in full."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @classmethod
    def load(
        cls, artifact: Artifact, sequence_tokens: int | None = None, num_threads: int | None = None
    ) -> "EngineSubject":
        """Load an artifact with a KV pool that fits `sequence_tokens` tokens; None for the default size.

        Raises EngineError, like Engine.load.
        """
        blocks = None
        if sequence_tokens is not None:
            blocks = 2 * -(-sequence_tokens // artifact.manifest.kv.block_tokens) + _SPARE_BLOCKS
        options = EngineOptions(kv_blocks=blocks, kv_offload="off", prefix_cache=False, num_threads=num_threads)
        return cls(Engine.load(artifact, **vars(options)))  # all of them: the recipe's `serving` is not measured

    @property
    def device(self) -> DeviceFacts | None:
        """The GPU it runs on; None on the CPU."""
        return self._engine.device

    @property
    def vocab_size(self) -> int:
        """Number of columns of the logits."""
        return self._engine.model.vocab_size

    @property
    def context_tokens(self) -> int:
        """Maximum length of a sequence."""
        return self._engine.model.context_tokens

    def encode(self, text: str) -> tuple[list[int], int | None]:
        """Tokens of a text without special tokens, and the BOS token if the tokenizer adds one.

        DataError when the artifact has no tokenizer.
        """
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise DataError("the artifact has no tokenizer, so no text can be evaluated; disable accuracy")
        opened = tokenizer.encode(text[:1])
        bos = tokenizer.bos_token_id if opened[:1] == [tokenizer.bos_token_id] else None
        return tokenizer.encode(text, add_special_tokens=False), bos

    def prompt_logits(self, token_ids: Sequence[int]) -> Iterator[LogitsArray]:
        """Logits of every position in chunks [n, vocab]; the scheduler splits only by token counts."""
        return (chunk.logits for chunk in self._engine.iterate_prompt_logits([token_ids]))

    def continue_greedily(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[list[int]]:
        """Exactly `output_tokens` likeliest tokens for each prompt. RequestFailed when a request fails."""
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        done = self._engine.generate([list(prompt) for prompt in prompts], params)
        return [list(completion.token_ids) for completion in done]

    def submit(self, prompt: Sequence[int], output_tokens: int) -> int:
        """Queue a greedy request of exactly `output_tokens` tokens."""
        return self._engine.add(list(prompt), SamplingParams(max_tokens=output_tokens, ignore_eos=True))

    def step(self) -> list[StepEvent]:
        """Run one engine step. EngineError when a request failed."""
        outputs = require_success(self._engine.step())
        return [StepEvent(output.request_id, len(output.tokens), output.finished) for output in outputs]

    def close(self) -> None:
        """Free memory and threads."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
