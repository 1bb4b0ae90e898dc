"""Fake executors of models whose layers differ, with a pool of bytes laid out by a KVGeometry, and with side state.

Each layer writes vectors of its own size at its own offset, made from a hidden value that all layers before it changed,
and reads back what its window shows it. So a wrong offset, a block that lacks some layer's bytes, a window that hides
too much or too little, and a missing, stale or wrong state change the tokens. The side state is a running hash, which
depends on the order of all tokens; hidden values start from it.

Every byte that is written is odd, so a byte of zero was never written, and reading one is refused.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.artifact import KVGeometry
from ingot.artifact.kv_geometry import KVLayer
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.kv.blocks import Copy
from ingot.runtime.kv.states import StateCopy
from tests.simulators.fake_executor import FakeExecutor, mark, mix, require, within
from tests.simulators.fake_host_blocks import FakeHostBlocks
from tests.simulators.pipelined_executor import FakePipelinedExecutor

_Bytes = NDArray[np.uint8]
_UInt64Array = NDArray[np.uint64]
_STATE_WORD = 8  # bytes
_ODD = np.uint64(0x9E3779B97F4A7C15)

VARIANTS: dict[str, dict[str, Any]] = {
    "unequal heads and dims": {
        "num_layers": 3,
        "num_kv_heads": [2, 1, 3],
        "head_dim": [2, 5, 1],
        "value_dim": [2, 3, 4],
    },
    "windows": {"num_layers": 3, "num_kv_heads": 1, "head_dim": 2, "window": [0, 3, 9]},
    "shared keys and values": {
        "num_layers": 4,
        "num_kv_heads": [2, 1, 2, 1],
        "head_dim": [1, 2, 1, 2],
        "window": [0, 6, 0, 6],
        "shares": [0, 1, 0, 1],
    },
    "latent": {"num_layers": 2, "num_kv_heads": 1, "head_dim": [6, 4], "value_dim": 0, "dtype": "float16"},
    "scales": {"num_layers": 2, "num_kv_heads": [1, 2], "head_dim": 4, "dtype": "int8"},
    "side state": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2, "state_bytes": 24},
    "all": {
        "num_layers": 5,
        "num_kv_heads": [2, 1, 1, 1, 1],
        "head_dim": [2, 4, 4, 4, 6],
        "value_dim": [2, 4, 4, 4, 0],
        "window": [0, 5, 5, 0, 0],
        "shares": [0, 1, 1, 3, 4],
        "dtype": "int4",
        "state_bytes": 16,
    },
}


class LayeredExecutor(FakeExecutor):
    """FakeExecutor with the layers of `layout`, the fields of a KVGeometry without block_tokens.

    num_states   slots of side state, if the layout has any
    """

    def __init__(
        self, layout: dict[str, Any] | str, *, block_tokens: int = 16, num_states: int = 16, **options: Any
    ) -> None:
        super().__init__(block_tokens=block_tokens, **options)
        fields = VARIANTS[layout] if isinstance(layout, str) else layout
        self._geometry = KVGeometry.model_validate({**fields, "block_tokens": block_tokens})
        self.num_states = num_states if self._geometry.state_bytes else 0
        self._blocks = np.zeros((self._num_blocks, self._geometry.block_bytes), np.uint8)
        self._views: dict[int, list[_Bytes]] = {}
        self._state_pool = np.zeros((self.num_states, self._geometry.state_bytes // _STATE_WORD), np.uint64)

    def logits(self, batch: ForwardBatch) -> FloatArray:
        """Logits from what all layers read."""
        self._check_slots(batch)
        hidden = np.concatenate([self._compute(batch, s) for s in range(len(batch.context_lens))])  # [T]
        self.num_forwards += 1
        bits = mix(hidden[batch.logits_indices, None] ^ self._vocab) >> np.uint64(40)  # [R, vocab] 24 bits
        return bits.astype(np.float32) * np.float32(2.0**-20) - np.float32(8.0)

    def copy_state(self, source: int, target: int) -> None:
        """Copy one state."""
        self.move(StateCopy(source, target))

    def host_states(self, num_slots: int) -> FakeHostBlocks:
        """Slots that side states move to and from as `kv.transfers` has it."""
        size = self._geometry.state_bytes
        return FakeHostBlocks(self, num_slots, self.transfers, place=self._state, num_bytes=size, waits_to_save=True)

    def _state(self, slot: int) -> _Bytes:
        view: _Bytes = self._state_pool[slot].view(np.uint8)
        return view

    def move(self, copy: Copy) -> None:
        """Make a copy at once."""
        pool = self._state_pool if isinstance(copy, StateCopy) else self._blocks
        require(within(np.array(copy), len(pool)), f"{copy} is outside of the pool")
        pool[copy.target] = pool[copy.source]

    def block_bytes(self, block: int) -> _Bytes:
        """The bytes of a block, writable."""
        view: _Bytes = self._blocks[block]
        return view

    def _check_slots(self, batch: ForwardBatch) -> None:
        slots = batch.state_slots
        if not self.num_states:
            require(slots is None, "a model without side state got state slots")
            return
        require(slots is not None, "state_slots are missing")
        assert slots is not None
        require(len(slots) == len(batch.context_lens) and within(slots, self.num_states), "a state slot is missing")
        require(len(np.unique(slots)) == len(slots), "two sequences have one state slot")

    def _compute(self, batch: ForwardBatch, s: int) -> _UInt64Array:
        """Run all layers on one sequence's new tokens; their hidden values at the end."""
        rows = slice(int(batch.query_starts[s]), int(batch.query_starts[s + 1]))
        positions = batch.position_ids[rows]
        context = int(batch.context_lens[s])
        table = batch.block_tables[s, : -(-context // self._geometry.block_tokens)]
        hidden: _UInt64Array = mark(batch.input_ids[rows], positions) ^ self.salts(batch)[s]
        if batch.state_slots is not None:
            hidden = hidden ^ self._advance(int(batch.state_slots[s]), hidden, int(positions[0]))
        for number, layer in enumerate(self._geometry.layers):
            if layer.source == number:
                self._write(layer, number, table, positions, hidden)
            hidden = mix(hidden + self._read(layer, table, int(positions[0]), context) + np.uint64(number))
        return hidden

    def _advance(self, slot: int, marks: _UInt64Array, start: int) -> _UInt64Array:
        """Feed marks to a state, one after the other; a digest of the state after each."""
        state = self._state_pool[slot] if start else np.zeros_like(self._state_pool[slot])
        digests = np.zeros_like(marks)
        for number, one in enumerate(marks):
            state = mix(state * _ODD + np.roll(state, 1) + one + np.arange(len(state), dtype=np.uint64))
            digests[number] = state.sum()
        self._state_pool[slot] = state
        return digests

    def _write(
        self, layer: KVLayer, number: int, table: NDArray[np.int32], positions: NDArray[np.int64], hidden: _UInt64Array
    ) -> None:
        blocks, slots = np.divmod(positions, self._geometry.block_tokens)
        for part, run in enumerate(self._runs(layer)):  # [blocks, heads, tokens, width]
            heads, width = run.shape[1], run.shape[3]
            seeds = hidden[:, None] + np.arange(heads * width, dtype=np.uint64) + np.uint64((number * 4 + part) << 32)
            run[table[blocks], :, slots] = (mix(seeds) | np.uint64(1)).astype(np.uint8).reshape(-1, heads, width)

    def _read(self, layer: KVLayer, table: NDArray[np.int32], start: int, context: int) -> _UInt64Array:
        """What the positions start .. context - 1 read: a sum over the vectors that the window shows to each."""
        digests = np.zeros(context, np.uint64)
        oldest = max(0, start - layer.window + 1) if layer.window else 0  # what is before it is never read
        read_tokens = digests[oldest:]
        for run in self._runs(layer):
            vectors = run[table].transpose(0, 2, 1, 3).reshape(len(table) * run.shape[2], -1)[oldest:context]
            require(bool(vectors.all()), "a position of the context was never written")
            read_tokens[:] = mix(read_tokens + (vectors * _weights(vectors.shape[1])).sum(axis=1, dtype=np.uint64))
        sums: _UInt64Array = np.cumsum(digests * self._weights[:context], dtype=np.uint64)  # wraps around intentionally
        before_window = np.concatenate([np.zeros(layer.window or context, np.uint64), sums])[:context]
        read: _UInt64Array = (sums - before_window)[start:]
        return read

    def _runs(self, layer: KVLayer) -> list[_Bytes]:
        """Views of a layer's keys, values and their scales in all blocks: [blocks, heads, tokens, bytes]."""
        if layer.keys not in self._views:
            self._views[layer.keys] = self._views_of(layer)
        return self._views[layer.keys]

    def _views_of(self, layer: KVLayer) -> list[_Bytes]:
        places = [(layer.keys, layer.key_bytes), (layer.values, layer.value_bytes)]
        if self._geometry.is_quantized:
            places += [(layer.key_scales, 2), (layer.value_scales, 2 if layer.value_dim else 0)]
        shape = (self._num_blocks, layer.num_kv_heads, self._geometry.block_tokens)
        runs = []
        for offset, width in places:
            size = layer.num_kv_heads * self._geometry.block_tokens * width
            if width:
                runs.append(self._blocks[:, offset : offset + size].reshape(*shape, width))
        return runs


@cache
def _weights(width: int) -> _UInt64Array:
    weights: _UInt64Array = mix(np.arange(1, width + 1, dtype=np.uint64)) | np.uint64(1)
    return weights


class LayeredPipelinedExecutor(LayeredExecutor, FakePipelinedExecutor):
    """The same as an asynchronous device."""

    def copy_state(self, source: int, target: int) -> None:
        """Queue the copy."""
        self._queue.append(StateCopy(source, target))
        self.num_queued += 1


class FailingExecutor(LayeredExecutor):
    """Fails steps, which leaves their states undefined, and copies of states."""

    failed_steps: frozenset[int] = frozenset()
    failed_copies: frozenset[int] = frozenset()
    num_computed = num_copied = 0

    def logits(self, batch: ForwardBatch) -> FloatArray:
        """Compute, then fail."""
        logits = super().logits(batch)
        self.num_computed += 1
        if self.num_computed - 1 in self.failed_steps:
            self._state_pool[batch.state_slots] += np.uint64(1)
            raise RuntimeError("the step failed")
        return logits

    def copy_state(self, source: int, target: int) -> None:
        """Copy, or fail."""
        self.num_copied += 1
        if self.num_copied - 1 in self.failed_copies:
            raise RuntimeError("the copy failed")
        super().copy_state(source, target)


class FailingPipelinedExecutor(FailingExecutor, LayeredPipelinedExecutor):
    """The same with a step in flight."""
