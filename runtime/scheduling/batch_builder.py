"""Fill a `ForwardBatch` from what the scheduler chose.

The arrays are allocated once and filled in place: a step costs a few microseconds per sequence and nothing per token,
because numpy reads token and block arrays through the buffer protocol.
"""

from collections.abc import Callable, Mapping

import numpy as np

from ingot.runtime.adapters import Adapter
from ingot.runtime.forward_batch import ForwardBatch, Int32Array
from ingot.runtime.kv.blocks import BlockManager
from ingot.runtime.kv.states import StateManager
from ingot.runtime.scheduling.sequence import ScheduledBatch


class BatchBuilder:
    """Makes ForwardBatches. A batch is valid until the next `build`: its arrays are views of the builder's arrays."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_batch_tokens: int,
        max_sequences: int,
        adapter_slot: Callable[[Adapter], int] | None = None,
    ) -> None:
        self._blocks = blocks
        self._adapter_slot = adapter_slot  # loads it there if it is not; None: the executor computes none
        rows = min(max_sequences, max_batch_tokens)
        self._input_ids = np.zeros(max_batch_tokens, np.int64)
        self._position_ids = np.zeros(max_batch_tokens, np.int64)
        self._carried = np.zeros(max_batch_tokens, np.int32)
        self._logits_indices = np.zeros(max_batch_tokens, np.int64)
        self._query_starts = np.zeros(rows + 1, np.int32)
        self._context_lens = np.zeros(rows, np.int32)
        self._state_slots = np.zeros(rows, np.int32)
        self._adapter_slots = np.zeros(rows, np.int32)
        self._counting = np.arange(max_batch_tokens, dtype=np.int64)
        self.num_built = 0

    def build(self, batch: ScheduledBatch) -> ForwardBatch:
        """Lay the step's tokens end to end.

        Adapters that are not in their slots yet are loaded, which raises what the executor does.
        """
        self.num_built += 1
        row, num_logits, has_adapters = 0, 0, False
        tables, count, width = self._blocks.tables, len(batch.entries), 0
        for entry in batch.entries:
            width = max(width, len(tables[entry.sequence.id].blocks))
            has_adapters |= entry.sequence.adapter is not None
        block_tables = np.empty((count, width), np.int32)  # [sequences, max blocks]
        block_tables.fill(-1)
        for index, entry in enumerate(batch.entries):
            sequence, start, num_tokens, _, drafts, _ = entry
            end = row + num_tokens
            if num_tokens == 1:
                self._input_ids[row] = sequence.tokens[start] if start < len(sequence.tokens) else 0  # see `carried`
                self._position_ids[row] = start
            else:
                tokens = np.frombuffer(sequence.tokens, np.int64, num_tokens, start * sequence.tokens.itemsize)
                self._input_ids[row:end] = tokens
                np.add(self._counting[:num_tokens], start, out=self._position_ids[row:end])
                del tokens  # an array cannot grow while numpy holds its buffer
            if drafts:  # they follow the newest token, and each gets logits
                row, end = end, end + len(drafts)
                self._input_ids[row:end] = drafts
                np.add(self._counting[: len(drafts)], start + num_tokens, out=self._position_ids[row:end])
            row = end
            self._query_starts[index + 1] = row
            self._context_lens[index] = start + num_tokens + len(drafts)
            blocks = tables[sequence.id].blocks
            block_tables[index, : len(blocks)] = np.frombuffer(blocks, np.int32)
            if rows := entry.num_logits:
                self._logits_indices[num_logits : num_logits + rows] = self._counting[row - rows : row]
                num_logits += rows
        return ForwardBatch(
            input_ids=self._input_ids[:row],
            position_ids=self._position_ids[:row],
            logits_indices=self._logits_indices[:num_logits],
            query_starts=self._query_starts[: count + 1],
            context_lens=self._context_lens[:count],
            block_tables=block_tables,
            state_slots=self._slots(batch, self._blocks.states) if self._blocks.states else None,
            adapter_slots=self._slots_of_adapters(batch) if has_adapters else None,
        )

    def _slots(self, batch: ScheduledBatch, states: StateManager) -> Int32Array:
        slots = self._state_slots[: len(batch.entries)]
        slots[:] = [states.slot(entry.sequence.id) for entry in batch.entries]
        return slots

    def _slots_of_adapters(self, batch: ScheduledBatch) -> Int32Array | None:
        slot_of = self._adapter_slot
        if slot_of is None:
            return None
        slots = self._adapter_slots[: len(batch.entries)]
        slots[:] = [slot_of(each) if (each := entry.sequence.adapter) else -1 for entry in batch.entries]
        return slots

    def carried(self, batch: ScheduledBatch, rows: Mapping[int, int]) -> Int32Array:
        """For each token [T], the row of the step in flight that samples it; -1 where the token is known.

        `rows` maps a sequence id to its row in the step in flight. The array is valid until the next call.
        """
        carried = self._carried[: batch.num_tokens]
        carried.fill(-1)
        row = 0
        for entry in batch.entries:
            if entry.start >= len(entry.sequence.tokens):
                carried[row] = rows[entry.sequence.id]
            row += entry.num_rows
        return carried
