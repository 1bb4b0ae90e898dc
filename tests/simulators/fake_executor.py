"""An executor without a model: its logits are a hash of the token history that it reads from its paged pool.

It writes a token's mark into the pool slot given by block table and position, and reads each sequence's whole history
back through its block table. A wrong table, a missed copy, a wrong position or a block allocated to two sequences
therefore changes the tokens, as it would with a real model. It also refuses batches that violate `ForwardBatch`.
"""

import math

import numpy as np
from numpy.typing import NDArray

from ingot.artifact import KVGeometry, ModelFacts
from ingot.artifact.kv_geometry import KeyOrder
from ingot.artifact.programs.projections import Projection
from ingot.errors import EngineError
from ingot.runtime.adapters import Adapter, LowRankUpdate
from ingot.runtime.forward_batch import FloatArray, ForwardBatch, Int64Array
from ingot.runtime.kv.blocks import BlockCopy, Copy
from ingot.runtime.kv.transfers.transfer import Bytes
from tests.simulators.fake_host_blocks import FakeHostBlocks, Transfers

_UInt64Array = NDArray[np.uint64]
_EMPTY = np.uint64(0)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


PROJECTIONS = tuple(Projection(module=f"layers.{i}.proj", node=f"proj.{i}", rows=4, columns=3) for i in range(2))


def fake_adapter(name: str, seed: int) -> Adapter:
    """An adapter of rank 2 for PROJECTIONS; equal seeds have equal digests."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, 3)).astype(np.float32), rng.normal(size=(4, 2)).astype(np.float32)
    return Adapter(name, {"proj.0": [LowRankUpdate("layers.0.proj", 0, a, b)]})


class FakeExecutor:
    """Deterministic logits in [-8, 8) from token history alone; a row depends on its sequence only, bit for bit."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        num_fast_blocks: int | None = None,
        block_tokens: int = 16,
        max_batch_tokens: int = 64,
        max_sequences: int = 64,
        vocab_size: int = 256,
        context_tokens: int = 512,
        eos_token_ids: tuple[int, ...] = (),
        transfers: Transfers | None = None,
        max_adapters: int = 0,
        max_adapter_rank: int = 8,
        adapter_bytes: int = 0,
    ) -> None:
        self._model = ModelFacts(
            family="fake",
            num_layers=1,
            hidden_size=1,
            vocab_size=vocab_size,
            context_tokens=context_tokens,
            num_parameters=1,
            eos_token_ids=eos_token_ids,
        )
        self._geometry = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=1, block_tokens=block_tokens)
        self._num_blocks = num_blocks
        self.num_fast_blocks = num_blocks if num_fast_blocks is None else num_fast_blocks
        self.slow_bytes_per_second = math.inf
        self._max_batch_tokens = max_batch_tokens
        self._max_sequences = max_sequences
        self._pool = np.full(num_blocks * block_tokens, _EMPTY)  # [block * token] marks, 0 where never written
        self._weights = mix(np.arange(1, context_tokens + 1, dtype=np.uint64)) | np.uint64(1)  # odd: loses no bit
        self._vocab = mix(np.arange(vocab_size, dtype=np.uint64) * _GOLDEN)  # [vocab]
        self.kernel_version = "fake"
        self.key_order: KeyOrder = "by-token"
        self.transfers = transfers or Transfers()
        self.num_queued = self.num_worked = 0  # steps and copies, if they are queued
        self.num_forwards = 0
        self.closed = False
        self.projections = PROJECTIONS
        self.max_adapters, self.max_adapter_rank = max_adapters, max_adapter_rank
        self.adapter_bytes = adapter_bytes
        self.adapters: dict[int, Adapter] = {}  # by slot
        self.num_adapter_loads = 0

    @property
    def model(self) -> ModelFacts:
        """Facts about a model that does not exist."""
        return self._model

    @property
    def kv_geometry(self) -> KVGeometry:
        """One layer, one head, one dimension."""
        return self._geometry

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._num_blocks

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens of one batch."""
        return self._max_batch_tokens

    @property
    def max_sequences(self) -> int:
        """Most sequences of one batch."""
        return self._max_sequences

    @property
    def device(self) -> None:
        """No GPU."""
        return None

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """Write marks, read histories back, return logits [R, vocab]. EngineError for an invalid batch."""
        self.require_open()
        self.check(batch)
        return self.logits(batch)

    def logits(self, batch: ForwardBatch) -> FloatArray:
        """`forward` without its checks."""
        size = self._geometry.block_tokens
        sequences = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.query_starts))  # [T]
        positions = batch.position_ids
        slots = batch.block_tables[sequences, positions // size].astype(np.int64) * size + positions % size
        require(len(np.unique(slots)) == len(slots), "two tokens are written to one slot")
        self._pool[slots] = mark(batch.input_ids, positions) ^ self.salts(batch)[sequences]
        states = np.concatenate([self._states(batch, index) for index in range(len(batch.context_lens))])  # [T]
        self.num_forwards += 1
        bits = mix(states[batch.logits_indices, None] ^ self._vocab) >> np.uint64(40)  # [R, vocab] 24 bits
        return bits.astype(np.float32) * np.float32(2.0**-20) - np.float32(8.0)

    def adapter_share(self, adapter: Adapter) -> float:
        """Share of the memory for adapters; 0 without a limit."""
        return adapter.num_bytes / self.adapter_bytes if self.adapter_bytes else 0.0

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter into a free slot."""
        require(0 <= slot < self.max_adapters and slot not in self.adapters, f"slot {slot} is not free")
        require(adapter.rank <= self.max_adapter_rank, f"rank {adapter.rank}")
        if sum(map(self.adapter_share, [*self.adapters.values(), adapter])) > 1:
            raise EngineError("too little memory for the adapter")
        self.adapters[slot] = adapter
        self.num_adapter_loads += 1

    def unload_adapter(self, slot: int) -> None:
        """Free a slot."""
        require(slot in self.adapters, f"slot {slot} is free")
        del self.adapters[slot]

    def salts(self, batch: ForwardBatch) -> _UInt64Array:
        """By what the marks of each sequence's tokens are changed [S]: the digest of its adapter, 0 without one."""
        count = len(batch.context_lens)
        slots = [-1] * count if batch.adapter_slots is None else batch.adapter_slots.tolist()
        require(len(slots) == count, "adapter_slots has another length")
        require(all(slot == -1 or slot in self.adapters for slot in slots), "a slot has no adapter")
        digests = [0 if slot < 0 else int(self.adapters[slot].digest[:16], 16) for slot in slots]
        return np.array(digests, np.uint64)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block of marks."""
        self.move(BlockCopy(source, target))

    def move(self, copy: Copy) -> None:
        """Make a copy at once."""
        source, target, size = copy.source, copy.target, self._geometry.block_tokens
        self._pool[target * size : (target + 1) * size] = self._pool[source * size : (source + 1) * size]

    def host_blocks(self, num_slots: int) -> FakeHostBlocks:
        """Slots that blocks move to and from as `kv.transfers` has it."""
        size = self.kv_geometry.block_bytes
        return FakeHostBlocks(self, num_slots, self.transfers, place=self.block_bytes, num_bytes=size)

    def has_worked(self, number: int) -> bool:
        """Whether the device has done what was queued before this number of steps and copies."""
        return self.num_worked >= number

    def work_until(self, number: int) -> bool:
        """Let the device do what was queued before this number of steps and copies; True once it has."""
        return True

    def block_bytes(self, block: int) -> Bytes:
        """The bytes of a block, writable."""
        size = self._geometry.block_tokens
        view: Bytes = self._pool[block * size : (block + 1) * size].view(np.uint8)
        return view

    def close(self) -> None:
        """Set `closed`."""
        self.closed = True

    def require_open(self) -> None:
        """Raise EngineError after `close`."""
        if self.closed:
            raise EngineError("the executor is closed; create another")

    def _states(self, batch: ForwardBatch, index: int) -> _UInt64Array:
        """Hash of the history up to each of the sequence's new tokens: [tokens of the sequence]."""
        size, context = self._geometry.block_tokens, int(batch.context_lens[index])
        num_new = int(batch.query_starts[index + 1] - batch.query_starts[index])
        blocks = batch.block_tables[index, : -(-context // size)]
        history = self._pool.reshape(-1, size)[blocks].reshape(-1)[:context]
        require(bool((history != _EMPTY).all()), "a position of the context was never written")
        sums: _UInt64Array = np.cumsum(history * self._weights[:context], dtype=np.uint64)  # wraps around intentionally
        return mix(sums[context - num_new :])

    def check(self, batch: ForwardBatch) -> None:
        """Raise EngineError for an invalid batch."""
        starts, context, tables = batch.query_starts, batch.context_lens, batch.block_tables
        counts = np.diff(starts)
        require(0 < batch.num_tokens <= self._max_batch_tokens, f"{batch.num_tokens} tokens in one batch")
        require(starts[0] == 0 and starts[-1] == batch.num_tokens, "query_starts do not span the tokens")
        require(bool((counts > 0).all()) and len(counts) == len(context) == len(tables), "a sequence has no tokens")
        require(bool((context <= self._model.context_tokens).all()), "a sequence is longer than the context")
        expected = np.concatenate([np.arange(c - n, c) for c, n in zip(context, counts, strict=True)])
        require(np.array_equal(batch.position_ids, expected), "positions do not end at the context's length")
        require(within(batch.input_ids, self._model.vocab_size), "a token id is outside the vocabulary")
        require(within(batch.logits_indices, batch.num_tokens), "a logits row is outside the batch")
        require(bool((np.diff(batch.logits_indices) > 0).all()), "logits_indices do not ascend")
        needed = -(-context // self._geometry.block_tokens)  # [S]
        used = tables[np.arange(tables.shape[1]) < needed[:, None]]
        require(int(needed.max()) <= tables.shape[1] and within(used, self._num_blocks), "a block is missing")


def mark(tokens: Int64Array, positions: Int64Array) -> _UInt64Array:
    """Content of a slot for a token at a position; never 0, because `mix` maps only 0 to 0."""
    return mix(((tokens + 1) << 32 | positions).astype(np.uint64))


def mix(values: _UInt64Array) -> _UInt64Array:
    """Scatter 64-bit values one to one (the finalizer of splitmix64, Steele et al. 2014)."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def within(values: NDArray[np.integer], end: int) -> bool:
    """Whether all values are in 0 .. end - 1."""
    return bool(((values >= 0) & (values < end)).all())


def require(holds: bool, message: str) -> None:
    """Raise EngineError unless a condition holds."""
    if not holds:
        raise EngineError(f"the batch violates the executor's contract: {message}")
