"""From what the scheduler chose to the arrays that an executor reads.

Arrays are made once and filled in place: a step costs a few microseconds per sequence and nothing per token. Token
and block arrays are read through the buffer protocol, so no list is ever walked.
"""

from collections.abc import Mapping

import numpy as np

from ingot.runtime.batch import ForwardBatch, Int32Array
from ingot.runtime.blocks import BlockManager
from ingot.runtime.scheduler import ScheduledBatch


class BatchBuilder:
    """Makes ForwardBatches. A batch is valid until the next `build`: its arrays are views of the builder's."""

    def __init__(self, blocks: BlockManager, *, max_batch_tokens: int, max_sequences: int) -> None:
        self._blocks = blocks
        rows = min(max_sequences, max_batch_tokens)
        self._input_ids = np.zeros(max_batch_tokens, np.int64)
        self._position_ids = np.zeros(max_batch_tokens, np.int64)
        self._carried = np.zeros(max_batch_tokens, np.int32)
        self._logits_indices = np.zeros(max_batch_tokens, np.int64)
        self._query_starts = np.zeros(rows + 1, np.int32)
        self._context_lens = np.zeros(rows, np.int32)
        self._counting = np.arange(max_batch_tokens, dtype=np.int64)
        self.num_built = 0

    def build(self, batch: ScheduledBatch, *, all_logits: bool = False) -> ForwardBatch:
        """Lay the step's tokens end to end. `all_logits` wants every token's logits, not only the sampled ones."""
        self.num_built += 1
        row, num_logits = 0, 0
        tables = [self._blocks.table(entry.sequence.id) for entry in batch.entries]
        block_tables = np.full((len(tables), max(map(len, tables))), -1, np.int32)  # [sequences, max blocks]
        for index, (sequence, start, num_tokens, samples) in enumerate(batch.entries):
            end = row + num_tokens
            if num_tokens == 1:
                self._input_ids[row] = sequence.tokens[start] if start < len(sequence.tokens) else 0  # see `carried`
                self._position_ids[row] = start
            else:
                tokens = np.frombuffer(sequence.tokens, np.int64, num_tokens, start * sequence.tokens.itemsize)
                self._input_ids[row:end] = tokens
                np.add(self._counting[:num_tokens], start, out=self._position_ids[row:end])
                del tokens  # an array that numpy still looks into cannot grow
            row = end
            self._query_starts[index + 1] = row
            self._context_lens[index] = start + num_tokens
            block_tables[index, : len(tables[index])] = np.frombuffer(tables[index], np.int32)
            if samples:
                self._logits_indices[num_logits] = row - 1
                num_logits += 1
        return ForwardBatch(
            input_ids=self._input_ids[:row],
            position_ids=self._position_ids[:row],
            logits_indices=self._counting[:row] if all_logits else self._logits_indices[:num_logits],
            query_starts=self._query_starts[: len(tables) + 1],
            context_lens=self._context_lens[: len(tables)],
            block_tables=block_tables,
        )

    def carried(self, batch: ScheduledBatch, rows: Mapping[int, int]) -> Int32Array:
        """For each token [T] the row of the step in flight that chooses it; -1 where the token is known.

        `rows` are those of the step in flight by sequence id. The array is valid until the next call.
        """
        carried = self._carried[: batch.num_tokens]
        carried.fill(-1)
        row = 0
        for sequence, start, num_tokens, _ in batch.entries:
            if start >= len(sequence.tokens):
                carried[row] = rows[sequence.id]
            row += num_tokens
        return carried
