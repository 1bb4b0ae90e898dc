"""The fake executors with faults: damaged keys and values, logits that are not finite, steps and copies that fail.

The last NUM_TAGS tokens of the vocabulary are tags: they mark a sequence in its prompt, and are never sampled.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ingot.errors import EngineError
from ingot.runtime.forward_batch import FloatArray, ForwardBatch, Int32Array, SamplingArrays
from tests.simulators.fake_executor import FakeExecutor, mark
from tests.simulators.pipelined_executor import FakePipelinedExecutor, FakeStep

NUM_TAGS = 16
_DAMAGED = np.uint64(0xBAD)


@dataclass
class Faults:
    """Numbers count from 0 over the executor's life; `fails_at` is the sequence length at which a tag's steps fail."""

    damaged_tokens: set[int] = field(default_factory=set)
    lost_rows: set[int] = field(default_factory=set)
    failed_steps: set[int] = field(default_factory=set)
    failed_submits: set[int] = field(default_factory=set)
    failed_copies: set[int] = field(default_factory=set)
    fails_at: dict[int, int] = field(default_factory=dict)
    is_broken: bool = False  # every step fails from now on


class FaultyExecutor(FakeExecutor):
    """A damaged slot gives every sequence that reads it logits of NaN, as a NaN in a real KV pool does."""

    def __init__(self, faults: Faults | None = None, *, vocab_size: int = 8 + NUM_TAGS, **options: Any) -> None:
        super().__init__(vocab_size=vocab_size, **options)
        self.faults = faults or Faults()
        self.num_tokens = self.num_rows = self.num_copies = self.num_computed = self.num_submits = 0

    def logits(self, batch: ForwardBatch) -> FloatArray:
        """Logits of the fake executor, with the faults that are due."""
        self.num_computed += 1
        if self.faults.is_broken or self.num_computed - 1 in self.faults.failed_steps:
            raise RuntimeError("the step failed")
        logits = super().logits(batch)
        logits[:, self._model.vocab_size - NUM_TAGS :] = -np.inf
        self._damage(batch)
        of_row = np.searchsorted(batch.query_starts, batch.logits_indices, side="right") - 1
        for sequence in range(len(batch.context_lens)):
            if self._is_damaged(batch, sequence):
                logits[of_row == sequence] = np.nan
        for row in range(len(logits)):
            if self.num_rows + row in self.faults.lost_rows:
                logits[row] = np.nan
        self.num_rows += len(logits)
        return logits

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block, or fail."""
        self.num_copies += 1
        if self.num_copies - 1 in self.faults.failed_copies:
            raise RuntimeError("the copy failed")
        super().copy_block(source, target)

    def damage(self, block: int) -> None:
        """Damage the content of a block."""
        size = self._geometry.block_tokens
        self._pool[block * size : (block + 1) * size] = _DAMAGED

    def _damage(self, batch: ForwardBatch) -> None:
        """Overwrite the slots of tokens that are to be damaged."""
        size = self._geometry.block_tokens
        for sequence, context in enumerate(batch.context_lens):
            for row in range(batch.query_starts[sequence], batch.query_starts[sequence + 1]):
                if self.num_tokens + row in self.faults.damaged_tokens:
                    position = context - batch.query_starts[sequence + 1] + row
                    self._pool[batch.block_tables[sequence, position // size] * size + position % size] = _DAMAGED
        self.num_tokens += batch.num_tokens

    def _is_damaged(self, batch: ForwardBatch, sequence: int) -> bool:
        """Whether a sequence reads a damaged slot. EngineError when its step fails."""
        size, context = self._geometry.block_tokens, int(batch.context_lens[sequence])
        blocks = batch.block_tables[sequence, : -(-context // size)]
        history = self._pool.reshape(-1, size)[blocks].reshape(-1)[:context]
        for tag, length in self.faults.fails_at.items():
            if context >= length and (history == mark(np.full(context, tag), np.arange(context))).any():
                raise EngineError(f"the step of tag {tag} failed")
        return bool((history == _DAMAGED).any())


class FaultyPipelinedExecutor(FaultyExecutor, FakePipelinedExecutor):
    """The same with a step in flight; steps may also fail when they are queued."""

    def submit(self, batch: ForwardBatch, sampling: SamplingArrays, carried: Int32Array) -> FakeStep:
        """Queue a step, or fail."""
        self.num_submits += 1
        if self.num_submits - 1 in self.faults.failed_submits:
            raise RuntimeError("the queue is full")
        return super().submit(batch, sampling, carried)
