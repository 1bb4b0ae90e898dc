"""Attention over the paged pool in numpy: same semantics as the C kernel, but slower; used where it was not built.

It stores the same bytes as the kernel, and decodes them to the same floats.

Every token is computed by matmuls of one shape, [kv head, group, dim] @ [kv head, dim, tile], over tiles at fixed
positions, so that its result depends on its own sequence alone, bit for bit, as the kernel's does.
"""

from collections.abc import Callable

import numpy as np

from ingot.artifact import AttentionStep
from ingot.runtime.cpu.attention_operands import AttentionOperands, RotaryOperands
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.kv_precision import decode, encode
from ingot.runtime.forward_batch import FloatArray, ForwardBatch, Int64Array

TILE = 64
"""Tokens of a tile; the same as in the C kernel."""

_MASKED = np.float32(-1e30)
_CHUNK_TOKENS = 32  # query tokens of one numpy call; limits the memory of the scores


class NumpyAttention:
    """Attention in numpy over one KV pool. Implements `attention.Attention`."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._batch: ForwardBatch | None = None

    def begin(self, batch: ForwardBatch) -> None:
        """Set the step's sequences, for every call until the next `begin`."""
        self._batch = batch

    def bind(
        self,
        step: AttentionStep,
        operands: AttentionOperands,
        output: FloatArray,
        rotation: RotaryOperands | None = None,
        sinks: FloatArray | None = None,
    ) -> Callable[[], None]:
        """Return the call that runs `step` on these buffers."""

        def attend() -> None:
            assert self._batch is not None
            for s in range(len(self._batch.context_lens)):
                rows = slice(int(self._batch.query_starts[s]), int(self._batch.query_starts[s + 1]))
                positions = self._positions(s, rows.stop - rows.start)
                if self._pool.geometry.layers[step.layer].source == step.layer:  # else it attends to another layer's
                    assert operands.key is not None
                    key = _rotated(step, operands.key[rows], positions, rotation)
                    self._write(step, s, key, None if operands.value is None else operands.value[rows])
                query = _rotated(step, operands.query[rows], positions, rotation)
                self._attend(step, s, query, sinks, output[rows])

        return attend

    def _write(self, step: AttentionStep, s: int, key: FloatArray, value: FloatArray | None) -> None:
        block, slot = self._places(s, self._positions(s, len(key)))
        geometry, views = self._pool.geometry, self._pool.layer(step.layer)
        layer = geometry.layers[step.layer]
        for vectors, dtype, codes, scales in (
            (key, layer.key_type, views.keys, views.key_scales),
            (value, layer.value_type, views.values, views.value_scales),
        ):
            if vectors is None:  # a part of the key
                continue
            heads = vectors.reshape(len(vectors), step.num_kv_heads, -1)  # [tokens, kv heads, dim]
            codes[block, :, slot], made = encode(heads, dtype, layer.int4_group)
            if scales is not None:
                scales[block, :, slot] = made

    def _attend(
        self, step: AttentionStep, s: int, query: FloatArray, sinks: FloatArray | None, output: FloatArray
    ) -> None:
        positions = self._positions(s, len(query))
        for at in range(0, len(query), _CHUNK_TOKENS):
            chunk = slice(at, at + _CHUNK_TOKENS)
            output[chunk] = self._attend_chunk(step, s, query[chunk], positions[chunk], sinks)

    @np.errstate(invalid="ignore", over="ignore")  # infinite keys and values end in NaN, which the engine reports
    def _attend_chunk(
        self, step: AttentionStep, s: int, query: FloatArray, positions: Int64Array, sinks: FloatArray | None
    ) -> FloatArray:
        """Compute attention for tokens [n] at `positions`: query [n, heads * dim], result [n, heads * output_dim]."""
        n, heads, dim = len(query), step.num_heads, step.head_dim
        q: FloatArray = (query * step.scale).reshape(n, step.num_kv_heads, -1, dim)
        top: FloatArray = np.full((*q.shape[:3], 1), _MASKED)  # [n, kv heads, group, 1]
        total = np.zeros_like(top)
        out: FloatArray = np.zeros((*q.shape[:3], step.output_dim), np.float32)
        oldest = max(0, int(positions[0]) - step.window + 1) if step.window else 0
        for start in range(oldest // TILE * TILE, int(positions[-1]) + 1, TILE):
            keys, values = self._tile(step, s, start, oldest, int(positions[-1]) + 1)
            scores = _softcapped(q @ keys.transpose(0, 2, 1), step.softcap)  # [n, kv heads, group, TILE]
            seen = _visible(positions, start, step.window)
            new_top = np.maximum(top, np.where(seen, scores, _MASKED).max(axis=-1, keepdims=True))
            weights = np.where(seen, np.exp(np.minimum(scores - new_top, 0)), np.float32(0))
            alpha = np.exp(top - new_top)
            total = total * alpha + weights.sum(axis=-1, keepdims=True)
            out, top = out * alpha + weights @ values, new_top
        if sinks is not None:
            total = total + np.exp(sinks.reshape(step.num_kv_heads, -1, 1) - top)
        output: FloatArray = (out / total + np.float32(0)).reshape(n, heads * step.output_dim)
        return output

    def _tile(self, step: AttentionStep, s: int, start: int, oldest: int, stop: int) -> tuple[FloatArray, FloatArray]:
        """Keys and values [kv heads, TILE, dim] of the positions from start on; zeros outside oldest .. stop."""
        positions = np.arange(max(start, oldest), min(start + TILE, stop))
        block, slot = self._places(s, positions)
        views, layer = self._pool.layer(step.layer), self._pool.geometry.layers[step.layer]
        stored = [(step.head_dim, layer.key_type, views.keys, views.key_scales)]
        if layer.value_dim:
            stored.append((layer.value_dim, layer.value_type, views.values, views.value_scales))
        tiles = []
        for dim, dtype, codes, scales in stored:
            of_tokens = None if scales is None else scales[block, :, slot]  # [tokens, kv heads, scales]
            rows = decode(codes[block, :, slot], of_tokens, dtype, layer.int4_group)  # [tokens, kv heads, dim]
            tiles.append(np.zeros((step.num_kv_heads, TILE, dim), np.float32))
            tiles[-1][:, positions - start] = rows.swapaxes(0, 1)
        return tiles[0], tiles[1] if layer.value_dim else tiles[0][:, :, step.head_dim - step.output_dim :]

    def _positions(self, s: int, tokens: int) -> Int64Array:
        assert self._batch is not None
        end = int(self._batch.context_lens[s])
        return np.arange(end - tokens, end)

    def _places(self, s: int, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Block and slot of each position."""
        assert self._batch is not None
        index, slot = np.divmod(positions, self._pool.geometry.block_tokens)
        return self._batch.block_tables[s][index].astype(np.int64), slot


def _rotated(step: AttentionStep, x: FloatArray, positions: Int64Array, rotation: RotaryOperands | None) -> FloatArray:
    """Rotate rows [n, heads * dim] of the tokens at `positions`."""
    if rotation is None:
        return x
    return rotation.apply(x.reshape(len(x), -1, step.head_dim), positions).reshape(x.shape)


def _softcapped(scores: FloatArray, softcap: float) -> FloatArray:
    if not softcap:
        return scores
    capped: FloatArray = np.tanh(scores / np.float32(softcap)) * np.float32(softcap)
    return capped


def _visible(positions: Int64Array, start: int, window: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Whether each token attends to each position of the tile: [n, 1, 1, TILE]."""
    tokens = np.arange(start, start + TILE)
    distance = positions[:, None] - tokens  # [n, TILE]
    seen = (distance >= 0) & (distance < window) if window else distance >= 0
    return seen[:, None, None, :]
