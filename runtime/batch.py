"""What passes between the engine and an executor: one step's batch, and the protocols of executors.

Tokens of all sequences are laid end to end, without padding: T tokens, S sequences, R rows of wanted logits.
To add an executor, implement `Executor` in `executors/` and prove it against `simulators/fake_executor.py`'s tests.
One whose
device works on its own while Python goes on implements `PipelinedExecutor`: see `step_pipeline.py`.

From what the scheduler chose to the arrays that an executor reads.

Arrays are made once and filled in place: a step costs a few microseconds per sequence and nothing per token. Token
and block arrays are read through the buffer protocol, so no list is ever walked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ingot.artifact import KVGeometry, ModelFacts
from ingot.runtime.blocks import BlockManager
from ingot.runtime.scheduler import ScheduledBatch

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class ForwardBatch:
    """One step. Sequence s owns rows query_starts[s] : query_starts[s + 1] of the flattened tokens.

    input_ids       [T] i64
    position_ids    [T] i64   0-based position of each token in its sequence
    logits_indices  [R] i64   rows of the T tokens whose logits are wanted, ascending
    query_starts    [S + 1] i32
    context_lens    [S] i32   tokens of the sequence in the KV pool after this step (so positions end at that - 1)
    block_tables    [S, max blocks] i32   block of positions i * block_tokens ..., padded with -1
    """

    input_ids: Int64Array
    position_ids: Int64Array
    logits_indices: Int64Array
    query_starts: Int32Array
    context_lens: Int32Array
    block_tables: Int32Array

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    def check(self, max_tokens: int, context_tokens: int) -> None:
        """Assert that it is whole, and within an executor's limits."""
        assert 0 < self.num_tokens <= max_tokens
        assert self.query_starts[-1] == self.num_tokens == len(self.position_ids)
        assert self.context_lens.max() <= context_tokens
        assert np.diff(self.query_starts).min() > 0


@dataclass(frozen=True)
class TokenDraws:
    """How the device chooses a token from each of a step's R rows of logits. `token_draws.py` makes them.

    temperatures  [R] f32   0 takes the likeliest token (ties go to the lowest id)
    top_ks        [R] i32   keep the k likeliest tokens; 0 keeps all
    top_ps        [R] f32   keep the fewest likeliest of them that hold this share, in (0, 1]
    uniforms      [R] f32   in [0, 1): where the cumulative distribution is inverted; 0 in a greedy row
    """

    temperatures: FloatArray
    top_ks: Int32Array
    top_ps: FloatArray
    uniforms: FloatArray

    @property
    def greedy(self) -> bool:
        """Whether every row takes its likeliest token."""
        return not self.temperatures.any()


@dataclass(frozen=True)
class DeviceFacts:
    """The card that an executor computes on, and the memory there that it took when it was made, in bytes."""

    name: str
    sm: int
    total_bytes: int
    used_bytes: int


class Executor(Protocol):
    """Runs the model's program on a batch and keeps the KV pool.

    A row of the result depends on its sequence's tokens alone, never on its batch mates: bit for bit on the CPU.
    """

    @property
    def model(self) -> ModelFacts:
        """Facts of the model that runs."""
        ...

    @property
    def kv_geometry(self) -> KVGeometry:
        """Shape of one KV block."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks in the KV pool."""
        ...

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens that one batch may hold."""
        ...

    @property
    def device(self) -> DeviceFacts | None:
        """The card that it computes on; None on the CPU."""
        ...

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """Write the batch's keys and values into the pool; return logits [R, vocab].

        The array is only valid until the next call: copy what must live longer.
        """
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block within the pool (copy on write)."""
        ...

    def close(self) -> None:
        """Give back memory and threads. Idempotent."""
        ...


class SubmittedStep(Protocol):
    """A step that was queued on the device."""

    def tokens(self) -> Int64Array:
        """Wait for the step; the token chosen from each row [R], -1 where a row's logits were not finite.

        EngineError when the step failed. The array is the caller's; it may never be asked for.
        """
        ...


@runtime_checkable
class PipelinedExecutor(Executor, Protocol):
    """An executor that queues steps on a device's stream: the next is submitted before this one's tokens are known.

    Everything happens in the order of the calls: a step reads what those submitted before it wrote, a copy of a block
    sees their writes, and a block that was given to another sequence is written later than by its former owner.
    `forward` is only called when the tokens of every submitted step were asked for. `close` may be called with a step
    in flight: it waits for the device before it gives back memory.
    """

    def submit(self, batch: ForwardBatch, draws: TokenDraws, carried: Int32Array) -> SubmittedStep:
        """Queue a step that also chooses its tokens. R may be 0, as in the middle of a prompt.

        carried  [T] i32   row (of R) in the step submitted before, whose token stands for input_ids[t], which is then
                           0; -1 for input_ids[t] itself

        A row whose logits were not finite carries any token of the vocabulary on: what comes of it is discarded.
        The arrays are the caller's again once this returns. EngineError when the step could not be queued; then the
        tokens of the step before are not carried any further.
        """
        ...


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
