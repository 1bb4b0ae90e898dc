"""What an executor computes in one step, as flat arrays: tokens of all sequences end to end, without padding.

A batch has T tokens of S sequences and R rows of logits.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class ForwardBatch:
    """One step. Sequence s owns rows query_starts[s] : query_starts[s + 1] of the flattened tokens.

    input_ids       [T] i64
    position_ids    [T] i64   0-based position of each token in its sequence
    logits_indices  [R] i64   rows of the T tokens to return logits for, ascending
    query_starts    [S + 1] i32
    context_lens    [S] i32   tokens of the sequence in the KV pool after this step: positions end at this - 1
    block_tables    [S, max blocks] i32   block of positions i * block_tokens ..., padded with -1
    state_slots     [S] i32   slot of the sequence's side state, which the step reads and replaces by the state after
                              its last token; not read where the step begins at position 0. None for models without
    adapter_slots   [S] i32   slot of the adapter that the sequence is computed with, -1 for none; None if all are -1
    """

    input_ids: Int64Array
    position_ids: Int64Array
    logits_indices: Int64Array
    query_starts: Int32Array
    context_lens: Int32Array
    block_tables: Int32Array
    state_slots: Int32Array | None = None
    adapter_slots: Int32Array | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    def check(self, max_tokens: int, context_tokens: int) -> None:
        """Assert that the arrays are consistent and within an executor's limits."""
        assert 0 < self.num_tokens <= max_tokens
        assert self.query_starts[-1] == self.num_tokens == len(self.position_ids)
        assert self.context_lens.max() <= context_tokens
        assert np.diff(self.query_starts).min() > 0


@dataclass(frozen=True)
class SamplingArrays:
    """Sampling parameters of a step's R rows of logits, for a device that samples. `sampling_arrays` makes them.

    temperatures  [R] f32   0 takes the most likely token (ties go to the lowest id)
    top_ks        [R] i32   keep the k most likely tokens; 0 keeps all
    top_ps        [R] f32   keep the fewest most likely tokens that reach this probability, in (0, 1]
    uniforms      [R] f32   in [0, 1): the point at which to invert the cumulative distribution; 0 in a greedy row
    """

    temperatures: FloatArray
    top_ks: Int32Array
    top_ps: FloatArray
    uniforms: FloatArray

    @property
    def greedy(self) -> bool:
        """Whether every row takes its most likely token."""
        return not self.temperatures.any()

    def rows(self, span: slice) -> "SamplingArrays":
        """Those of some rows, as views."""
        return SamplingArrays(self.temperatures[span], self.top_ks[span], self.top_ps[span], self.uniforms[span])
