"""Attention over whole sequences in standard ONNX: what calibration runs in place of ingot::PagedAttention.

Sequences lie end to end. Where all have the same length S, nothing but shapes tells them apart; where they differ, rows
are first laid out as sequences of the longest's length, and taken back behind it (sequences.py has these inputs):

    q, k, v      [B * S, heads * D] -> [B, KV, group, S, D], [B, KV, 1, D, S], [B, KV, 1, S, D]
    attended     Softmax(softcap(q @ k * scale) + mask) @ v                       mask [S, S]: 0, or -inf where not seen

Whole sequences that run together, their tokens end to end: nothing but attention knows where one ends.

Sequences of one length need nothing more. Where lengths differ, attention is given four more inputs, and only there do
rows exist that are no tokens of the data:

    sequences.tokens       [1]              S, the longest of the chunk
    sequences.padded       [B * S]          row of the chunk for every place of B sequences of S; a short one's last row
                                            stands for what it lacks, where its own tokens do not see it
    sequences.real         [tokens]         place of every row of the chunk
    sequences.mask.WINDOW  [S, S]           see attention.causal_mask
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.calibration import Float32Array
from ingot.pipeline.calibrate.data import CalibrationData, Tokens

AddOp = Callable[..., ir.Value]
AddConstant = Callable[[np.ndarray[tuple[int, ...], np.dtype[np.generic]]], ir.Value]
AddInput = Callable[[str, ir.DataType], ir.Value]

LAYOUT_TOKENS, PADDED_ROWS, REAL_ROWS = "sequences.tokens", "sequences.padded", "sequences.real"
_MASK = "sequences.mask."


def causal_mask(sequence_tokens: int, window: int) -> Float32Array:
    """[S, S]: 0 where a token (row) sees another: itself and those before it, or the last `window` of these."""
    at = np.arange(sequence_tokens)
    distance = at[:, None] - at
    seen = (distance >= 0) & (distance < window) if window else distance >= 0
    return np.where(seen, np.float32(0), np.float32(-np.inf))


def window_of_mask(name: str) -> int | None:
    """The window of the mask that an input of this name is; None for another input."""
    return int(name.removeprefix(_MASK)) if name.startswith(_MASK) else None


@dataclass(frozen=True)
class FixedLayout:
    """All sequences have so many tokens."""

    tokens: int
    add: AddOp
    constant: AddConstant

    def shaped(self, x: ir.Value | None, *columns: int) -> ir.Value:
        """x [B * S, columns' product] as [B, S, *columns]."""
        return self.add("Reshape", [x, self.constant(np.array([-1, self.tokens, *columns], np.int64))])

    def flat(self, x: ir.Value, columns: int) -> ir.Value:
        """The way back: [B * S, columns]."""
        return self.add("Reshape", [x, self.constant(np.array([-1, columns], np.int64))])

    def mask(self, window: int) -> ir.Value:
        """[S, S]."""
        return self.constant(causal_mask(self.tokens, window))


@dataclass(frozen=True)
class RaggedLayout(FixedLayout):
    """Each chunk says how long its sequences are; `tokens` is not used."""

    read: AddInput

    def shaped(self, x: ir.Value | None, *columns: int) -> ir.Value:
        """x [tokens, columns' product] as [B, S, *columns], with S that of the chunk's longest."""
        padded = self.add("Gather", [x, self.read(PADDED_ROWS, ir.DataType.INT64)], axis=0)
        sizes = [np.array([-1], np.int64), np.array(columns, np.int64)]
        first, last = map(self.constant, sizes)
        shape = self.add("Concat", [first, self.read(LAYOUT_TOKENS, ir.DataType.INT64), last], axis=0)
        return self.add("Reshape", [padded, shape])

    def flat(self, x: ir.Value, columns: int) -> ir.Value:
        """The way back, without the rows that are no tokens: [tokens, columns]."""
        return self.add("Gather", [super().flat(x, columns), self.read(REAL_ROWS, ir.DataType.INT64)], axis=0)

    def mask(self, window: int) -> ir.Value:
        """[S, S], fed."""
        return self.read(f"{_MASK}{window}", ir.DataType.FLOAT)


def expand_attention(
    node: ir.Node, inputs: list[ir.Value | None], layout: FixedLayout, add: AddOp, constant: AddConstant
) -> ir.Value:
    """Add the nodes; return what stands for the node's output, [tokens, heads * D]."""
    query, key, value = (*inputs, None, None)[:3]
    if None in (query, key, value) or any(extra is not None for extra in inputs[3:]):
        raise PassError(f"{node.name!r} reads more than query, key and value; run calibrated passes before its fusions")
    heads, kv_heads, dim, window = (_int(node, name) for name in ("num_heads", "num_kv_heads", "head_dim", "window"))
    group = heads // kv_heads

    def by_head(x: ir.Value | None, group: int, perm: tuple[int, ...]) -> ir.Value:
        return add("Transpose", [layout.shaped(x, kv_heads, group, dim)], perm=perm)

    def scalar(number: float | None) -> ir.Value:
        return constant(np.array(number, np.float32))

    product = add("MatMul", [by_head(query, group, (0, 2, 3, 1, 4)), by_head(key, 1, (0, 2, 3, 4, 1))])
    scores = add("Mul", [product, scalar(node.attributes.get_float("scale"))])
    if softcap := node.attributes.get_float("softcap", 0.0):
        scores = add("Mul", [add("Tanh", [add("Div", [scores, scalar(softcap)])]), scalar(softcap)])
    masked = add("Add", [scores, layout.mask(window)])
    attended = add("MatMul", [add("Softmax", [masked], axis=-1), by_head(value, 1, (0, 2, 3, 1, 4))])
    by_token = add("Transpose", [attended], perm=(0, 3, 1, 2, 4))  # [B, S, KV, group, D]
    return layout.flat(by_token, heads * dim)


def _int(node: ir.Node, name: str) -> int:
    number = node.attributes.get_int(name, 0)
    assert number is not None
    return number


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
