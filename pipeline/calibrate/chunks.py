"""Whole sequences that run together, their tokens end to end: nothing but attention knows where one ends.

Sequences of one length need nothing more. Where lengths differ, attention is given four more inputs, and only there do
rows exist that are no tokens of the data:

    sequences.tokens       [1]              S, the longest of the chunk
    sequences.padded       [B * S]          row of the chunk for every place of B sequences of S; a short one's last row
                                            stands for what it lacks, where its own tokens do not see it
    sequences.real         [tokens]         place of every row of the chunk
    sequences.mask.WINDOW  [S, S]           see attention.causal_mask
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.pipeline.calibrate.attention import LAYOUT_TOKENS, PADDED_ROWS, REAL_ROWS, causal_mask, window_of_mask
from ingot.pipeline.calibrate.data import CalibrationData, Tokens

CHUNK_TOKENS = 2048


@dataclass(frozen=True)
class Chunk:
    """Token ids [tokens] of some sequences of these lengths."""

    ids: Tokens
    lengths: Tokens

    @property
    def tokens(self) -> int:
        """Rows of every activation."""
        return len(self.ids)

    @cached_property
    def rows(self) -> Mapping[str, NDArray[Any]]:
        """What the graph reads that depends on the lengths alone, masks apart."""
        starts, longest = np.cumsum(self.lengths) - self.lengths, int(self.lengths.max())
        places = np.arange(longest)
        real = places < self.lengths[:, None]
        return {
            "input_ids": self.ids,
            "position_ids": np.concatenate([places[:length] for length in self.lengths]),
            "logits_indices": np.arange(self.tokens),
            LAYOUT_TOKENS: np.array([longest]),
            PADDED_ROWS: (starts[:, None] + np.minimum(places, self.lengths[:, None] - 1)).reshape(-1),
            REAL_ROWS: np.flatnonzero(real),
        }

    def feed(self, name: str) -> NDArray[Any] | None:
        """The input of that name; None when it is no input of the model."""
        window = window_of_mask(name)
        return self.rows.get(name) if window is None else causal_mask(int(self.lengths.max()), window)


def chunks_of(data: CalibrationData, most_tokens: int = CHUNK_TOKENS) -> Sequence[Chunk]:
    """The sequences in order, as many together as `most_tokens` hold with the longest of them, and at least one."""
    width = data.sequences.shape[1]
    lengths = np.full(len(data.sequences), width) if data.lengths is None else data.lengths
    chunks, start = [], 0
    for stop in range(1, len(lengths) + 1):
        if stop == len(lengths) or (stop + 1 - start) * lengths[start : stop + 1].max() > most_tokens:
            real = np.arange(width) < lengths[start:stop, None]
            chunks.append(Chunk(data.sequences[start:stop][real], lengths[start:stop]))
            start = stop
    return chunks
