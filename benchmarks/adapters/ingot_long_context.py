"""Ingot with a long context that it computes in part: later prompt tokens get copies of computed keys and values.

The engine serves the whole prompt, in chunks; its executor computes the first `computed_tokens` and then copies their
blocks. A prompt that was served before is found by the prefix cache. Steps of one token are always computed.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.adapters.base import PreparedModel, Setup, run
from benchmarks.adapters.ingot import MAX_BATCH_TOKENS, Ingot, describe
from ingot.artifact import Artifact, open_artifact
from ingot.runtime.cpu.executor import OnnxRuntimeExecutor
from ingot.runtime.engine.engine import Engine
from ingot.runtime.forward_batch import FloatArray, ForwardBatch


class CopyingExecutor(OnnxRuntimeExecutor):
    """Computes the chunks of a prompt that begin before `computed_tokens`, a multiple of a block; copies the others."""

    def __init__(self, artifact: Artifact, *, computed_tokens: int, num_blocks: int, num_threads: int | None) -> None:
        super().__init__(
            artifact,
            num_blocks=num_blocks,
            max_batch_tokens=MAX_BATCH_TOKENS,
            max_sequences=1,
            num_threads=num_threads,
        )
        assert computed_tokens % self.kv_geometry.block_tokens == 0
        self._computed_tokens = computed_tokens

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """As the base class; logits of tokens that are not computed are zeros."""
        begin, end = int(batch.position_ids[0]), int(batch.context_lens[0])
        if batch.num_tokens == 1 or begin < self._computed_tokens:
            return super().forward(batch)
        block_tokens = self.kv_geometry.block_tokens
        computed_blocks = self._computed_tokens // block_tokens
        blocks = range(begin // block_tokens, -(-end // block_tokens))
        for source, target in copies(batch.block_tables[0].tolist(), blocks, computed_blocks):
            self.copy_block(source, target)
        return np.zeros((len(batch.logits_indices), self.model.vocab_size), np.float32)


def copies(table: Sequence[int], blocks: range, computed_blocks: int) -> Iterator[tuple[int, int]]:
    """Source and target of each block of a sequence: the first `computed_blocks` of its table, again and again."""
    return ((table[index % computed_blocks], table[index]) for index in blocks)


class IngotLongContext(Ingot):
    """One engine over the artifact that the options name, with its prefix cache."""

    def __init__(self, setup: Setup, model: Path) -> None:
        artifact = open_artifact(model, verify=False)
        executor = CopyingExecutor(
            artifact,
            computed_tokens=int(setup.options["computed_tokens"]),
            # the prompt in the prefix cache, and the sequence that runs
            num_blocks=2 * (-(-setup.max_tokens // artifact.manifest.kv.block_tokens) + 1),
            num_threads=setup.threads,
        )
        self._engine = Engine(executor, max_sequences=1)
        self._requests = []


def prepare(setup: Setup) -> PreparedModel:
    """Facts about the artifact that the options name."""
    return describe(open_artifact(Path(str(setup.options["artifact"])), verify=False))


if __name__ == "__main__":
    run(prepare, IngotLongContext)
