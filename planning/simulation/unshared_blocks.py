"""KV blocks of sequences of which no two begin alike: what a block holds follows from its sequence and its place.

So nothing is hashed, compared or copied. Which blocks are free, idle, evicted or found again by a sequence that was
preempted is as with hashes.
"""

from typing import Any

from ingot.runtime.kv.blocks import SHARED, Admission, BlockCopy, BlockManager, BlockMove, BlockTable, TokenArray
from ingot.runtime.kv.keys import PrefixScope


class UnsharedBlocks(BlockManager):
    """Blocks whose sequences each have a scope with a root of their own.

    received   tokens by root whose keys and values come with the sequence, from another engine, when it is admitted
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        super().__init__(num_blocks, block_tokens)
        self.received: dict[bytes, int] = {}
        self._num_full: dict[int, int] = {}  # computed full blocks of each sequence
        self._owners = [b""] * num_blocks  # the root that an idle block belongs to
        self._left: dict[bytes, TokenArray] = {}  # idle blocks by root: its first ones, the last is evicted first

    @property
    def num_cached(self) -> int:
        """Idle blocks, each of which a sequence could find again."""
        return len(self._idle)

    def admit(self, sequence_id: int, tokens: TokenArray, **options: Any) -> Admission | None:
        """Allocate blocks; see `BlockManager.admit`."""
        admission = super().admit(sequence_id, tokens, **options)
        if admission is None:
            return None
        root = self.tables[sequence_id].scope.root
        self._num_full[sequence_id] = len(self._left.pop(root, ()))
        if self.received:
            num_received = self.received.pop(root, 0)
            return admission._replace(cached_tokens=max(num_received, admission.cached_tokens))
        return admission

    def reserve(
        self, sequence_id: int, start: int, end: int, *, spare_blocks: int = 0, tiers: object = None
    ) -> tuple[BlockCopy, ...] | None:
        """Make positions writable; see `BlockManager.reserve`. A sequence has its blocks for itself."""
        table = self.tables[sequence_id]
        num_blocks = -(-end // self.block_tokens)
        missing = num_blocks - len(table.blocks)
        if missing > 0:
            if missing + spare_blocks > self.num_available:
                return None
            self._extend(table, num_blocks)
        return ()

    def commit(self, sequence_id: int, tokens: TokenArray, num_computed: int) -> None:
        """Record how many blocks are full."""
        self._num_full[sequence_id] = num_computed // self.block_tokens

    def release(self, sequence_id: int) -> None:
        """Free a sequence's blocks; full ones become idle, and the last of them is evicted first."""
        table = self.tables.pop(sequence_id)
        blocks, root, num_full = table.blocks, table.scope.root, self._num_full.pop(sequence_id)
        self._free.extend(reversed(blocks[num_full:]))
        if num_full:
            full = self._left[root] = blocks[:num_full]
            for block in reversed(full):
                self._idle[block] = None
                self._owners[block] = root

    def forget(self, tokens: TokenArray, scope: PrefixScope = SHARED) -> None:
        """Free the idle blocks of a scope."""
        for block in self._left.pop(scope.root, ()):
            del self._idle[block]
            self._free.append(block)

    def check(self) -> None:
        """Assert that no block is leaked or in two states, and that idle blocks have owners."""
        in_use = [block for table in self.tables.values() for block in table.blocks]
        assert sorted([*in_use, *self._idle, *self._free]) == list(range(self.num_blocks))
        assert {block: root for root, blocks in self._left.items() for block in blocks} == {
            block: self._owners[block] for block in self._idle
        }
        assert self._num_full.keys() == self.tables.keys()

    def _extend(self, table: BlockTable, num_blocks: int) -> tuple[BlockMove, ...]:
        free, missing = self._free, num_blocks - len(table.blocks)
        if missing > len(free):
            return super()._extend(table, num_blocks)
        if missing > 0:
            table.blocks.extend(free[: -missing - 1 : -1])
            del free[-missing:]
        return ()

    def _match(self, root: bytes, tokens: TokenArray) -> tuple[list[int], list[bytes]]:
        return list(self._left.get(root, ())), []

    def _evict(self, block: int) -> None:
        del self._idle[block]
        root = self._owners[block]
        left = self._left[root]
        last = left.pop()
        assert last == block, "a block was evicted before one that continues it"
        if not left:
            del self._left[root]
        self.num_evicted += 1
