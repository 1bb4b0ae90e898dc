"""Batches of sequences that grow step by step, each in blocks of its own."""

from collections.abc import Sequence

import numpy as np

from ingot.runtime.executors import Executor
from ingot.runtime.forward_batch import FloatArray, ForwardBatch, Int64Array, SamplingArrays


def token_ids(count: int, seed: int = 0, vocabulary: int = 128) -> Int64Array:
    return np.random.default_rng(seed).integers(3, vocabulary, count)


def greedy(rows: int) -> SamplingArrays:
    zeros, ones = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    return SamplingArrays(zeros, np.zeros(rows, np.int32), ones, zeros)


class Growing:
    """Sequences of known tokens; `step` takes some of each, `tables` are blocks [sequences, blocks].

    Sequence s has the side state of slot s, of models with any.
    """

    def __init__(self, ids: Sequence[Int64Array], tables: Sequence[Sequence[int]]) -> None:
        self.ids = ids
        self.tables = np.array(tables, np.int32)
        self.done = [0] * len(ids)

    def step(self, counts: Sequence[int], wanted: str = "all") -> ForwardBatch:
        """So many next tokens of each sequence, 0 leaves it out. `wanted` logits: all, last, none."""
        chosen = [index for index, count in enumerate(counts) if count]
        starts = [self.done[index] for index in chosen]
        taken = [counts[index] for index in chosen]
        ends = [start + count for start, count in zip(starts, taken, strict=True)]
        for index, end in zip(chosen, ends, strict=True):
            self.done[index] = end
        spans = list(zip(chosen, starts, ends, strict=True))
        bounds = np.cumsum([0, *taken])
        rows = {"all": np.arange(bounds[-1]), "last": bounds[1:] - 1, "none": np.zeros(0)}[wanted]
        return ForwardBatch(
            input_ids=np.concatenate([self.ids[index][start:end] for index, start, end in spans]),
            position_ids=np.concatenate([np.arange(start, end) for _, start, end in spans]),
            logits_indices=rows.astype(np.int64),
            query_starts=bounds.astype(np.int32),
            context_lens=np.array(ends, np.int32),
            block_tables=self.tables[chosen],
            state_slots=np.array(chosen, np.int32),
        )


def whole_logits(executor: Executor, ids: Int64Array) -> FloatArray:
    """Logits [tokens, vocab] of one sequence in one step, in the pool's first blocks."""
    blocks = -(-len(ids) // executor.kv_geometry.block_tokens)
    return executor.forward(Growing([ids], [list(range(blocks))]).step([len(ids)])).copy()
