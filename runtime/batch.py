"""What passes between the engine and an executor: one step's batch, and the Executor protocol.

Tokens of all sequences are laid end to end, without padding: T tokens, S sequences, R rows of wanted logits.
To add an executor, implement `Executor` in `executors/` and prove it against `executors/fake.py`'s tests.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ingot.artifact import KVGeometry, ModelFacts

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
