"""Batches whole sequences into chunks, and expands ingot::PagedAttention into standard ONNX over them.

The tokens of a chunk's sequences are concatenated; only attention needs their boundaries:

    q, k, v      [B * S, heads * D] -> [B, KV, group, S, D], [B, KV, 1, D, S], [B, KV, 1, S, D]
    scores       softcap(q @ k * scale) + mask                                    mask [S, S]: 0, or -inf where masked
    attended     Softmax(scores) @ v, and where there are sinks * Sigmoid(ReduceLogSumExp(scores) - sinks)

If all sequences have the same length S, a reshape is enough. If lengths differ, attention pads its rows to the longest
sequence and removes the padding afterwards, by four more inputs; padding exists nowhere else:

    sequences.tokens       [1]              S, the longest sequence of the chunk
    sequences.padded       [B * S]          row of the chunk for every position of B sequences of S; a short sequence is
                                            padded with its last row, which its own tokens do not attend to
    sequences.real         [tokens]         position of every row of the chunk
    sequences.mask.WINDOW  [S, S]           see causal_mask
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.numerics.arrays import Float32Array
from ingot.passes.rewriting import value_dim
from ingot.pipeline.calibrate.data import CalibrationData, Tokens

AddOp = Callable[..., ir.Value]
AddConstant = Callable[[np.ndarray[tuple[int, ...], np.dtype[np.generic]]], ir.Value]
AddInput = Callable[[str, ir.DataType], ir.Value]

CHUNK_TOKENS = 2048
LAYOUT_TOKENS, PADDED_ROWS, REAL_ROWS = "sequences.tokens", "sequences.padded", "sequences.real"
_MASK = "sequences.mask."


def causal_mask(sequence_tokens: int, window: int) -> Float32Array:
    """Mask [S, S]: 0 where a token (row) attends to itself and earlier ones, or the last `window` of these; else
    -inf."""
    at = np.arange(sequence_tokens)
    distance = at[:, None] - at
    seen = (distance >= 0) & (distance < window) if window else distance >= 0
    return np.where(seen, np.float32(0), np.float32(-np.inf))


def window_of_mask(name: str) -> int | None:
    """The window of the mask input of this name; None for other inputs."""
    return int(name.removeprefix(_MASK)) if name.startswith(_MASK) else None


@dataclass(frozen=True)
class FixedLayout:
    """Layout of sequences that all have `tokens` tokens."""

    tokens: int
    add: AddOp
    constant: AddConstant

    def shaped(self, x: ir.Value | None, *columns: int) -> ir.Value:
        """Reshape x [B * S, prod(columns)] to [B, S, *columns]."""
        return self.add("Reshape", [x, self.constant(np.array([-1, self.tokens, *columns], np.int64))])

    def flat(self, x: ir.Value, columns: int) -> ir.Value:
        """Reshape back to [B * S, columns]."""
        return self.add("Reshape", [x, self.constant(np.array([-1, columns], np.int64))])

    def mask(self, window: int) -> ir.Value:
        """The causal mask [S, S], a constant."""
        return self.constant(causal_mask(self.tokens, window))


@dataclass(frozen=True)
class RaggedLayout(FixedLayout):
    """Layout of sequences of different lengths, which are inputs of each chunk; `tokens` is unused."""

    read: AddInput

    def shaped(self, x: ir.Value | None, *columns: int) -> ir.Value:
        """Pad x [tokens, prod(columns)] to [B, S, *columns], S the length of the chunk's longest sequence."""
        padded = self.add("Gather", [x, self.read(PADDED_ROWS, ir.DataType.INT64)], axis=0)
        sizes = [np.array([-1], np.int64), np.array(columns, np.int64)]
        first, last = map(self.constant, sizes)
        shape = self.add("Concat", [first, self.read(LAYOUT_TOKENS, ir.DataType.INT64), last], axis=0)
        return self.add("Reshape", [padded, shape])

    def flat(self, x: ir.Value, columns: int) -> ir.Value:
        """Remove the padding: [tokens, columns]."""
        return self.add("Gather", [super().flat(x, columns), self.read(REAL_ROWS, ir.DataType.INT64)], axis=0)

    def mask(self, window: int) -> ir.Value:
        """The causal mask [S, S], an input."""
        return self.read(f"{_MASK}{window}", ir.DataType.FLOAT)


def expand_attention(
    node: ir.Node, inputs: list[ir.Value | None], layout: FixedLayout, add: AddOp, constant: AddConstant
) -> ir.Value:
    """Add the nodes; return the value that replaces the node's output, [tokens, heads * V]."""
    query, key, value, cos, sin, sinks = (*inputs, None, None, None, None, None)[:6]
    if None in (query, key) or cos is not None or sin is not None:
        raise PassError(f"{node.name!r} reads rotary tables; run calibrated passes before attention fusions")
    heads, kv_heads, dim, window = (_int(node, name) for name in ("num_heads", "num_kv_heads", "head_dim", "window"))
    group, width = heads // kv_heads, value_dim(node)

    def by_head(x: ir.Value | None, group: int, perm: tuple[int, ...]) -> ir.Value:
        return add("Transpose", [layout.shaped(x, kv_heads, group, dim)], perm=perm)

    def scalar(number: float | None) -> ir.Value:
        return constant(np.array(number, np.float32))

    logits = add("MatMul", [by_head(query, group, (0, 2, 3, 1, 4)), by_head(key, 1, (0, 2, 3, 4, 1))])
    scores = add("Mul", [logits, scalar(node.attributes.get_float("scale"))])
    if softcap := node.attributes.get_float("softcap", 0.0):
        scores = add("Mul", [add("Tanh", [add("Div", [scores, scalar(softcap)])]), scalar(softcap)])
    masked = add("Add", [scores, layout.mask(window)])
    values = by_head(key, 1, (0, 2, 3, 1, 4))
    if value is None:  # latent attention: the last dims of the keys
        values = add("Slice", [values, *(constant(np.array([at], np.int64)) for at in (dim - width, dim, 4))])
    else:
        values = add("Transpose", [layout.shaped(value, kv_heads, 1, width)], perm=(0, 2, 3, 1, 4))
    attended = add("MatMul", [add("Softmax", [masked], axis=-1), values])
    if sinks is not None:
        by_query = add("Reshape", [sinks, constant(np.array([kv_heads, group, 1, 1], np.int64))])
        everything = add("ReduceLogSumExp", [masked, constant(np.array([-1], np.int64))])
        attended = add("Mul", [attended, add("Sigmoid", [add("Sub", [everything, by_query])])])
    by_token = add("Transpose", [attended], perm=(0, 3, 1, 2, 4))  # [B, S, KV, group, D]
    return layout.flat(by_token, heads * width)


def _int(node: ir.Node, name: str) -> int:
    number = node.attributes.get_int(name, 0)
    assert number is not None
    return number


@dataclass(frozen=True)
class Chunk:
    """Token ids [tokens] of some sequences of these lengths."""

    ids: Tokens
    lengths: Tokens

    @property
    def tokens(self) -> int:
        """Number of tokens: the rows of every activation."""
        return len(self.ids)

    @cached_property
    def rows(self) -> Mapping[str, NDArray[Any]]:
        """Inputs of the graph by name, except masks."""
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
        """The input of this name; None for the name of an activation."""
        window = window_of_mask(name)
        return self.rows.get(name) if window is None else causal_mask(int(self.lengths.max()), window)


def chunks_of(data: CalibrationData, most_tokens: int = CHUNK_TOKENS) -> Sequence[Chunk]:
    """Batch the sequences in order: at most `most_tokens` tokens, padding included, but at least one sequence."""
    width, lengths = data.sequences.shape[1], data.row_lengths
    chunks, start = [], 0
    for stop in range(1, len(lengths) + 1):
        if stop == len(lengths) or (stop + 1 - start) * lengths[start : stop + 1].max() > most_tokens:
            real = np.arange(width) < lengths[start:stop, None]
            chunks.append(Chunk(data.sequences[start:stop][real], lengths[start:stop]))
            start = stop
    return chunks
