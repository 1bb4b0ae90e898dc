"""The disk below host memory: threads that read and write a store.

A block is written from its slot when it is one of the next that host memory gives up (`PoolTiers`), and read back into
a slot. Slots are pinned while they are written, so only some are at a time: where the disk is too slow, host memory
gives up blocks that were not written.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

from ingot.errors import EngineError
from ingot.runtime.kv.cost_model import TierName
from ingot.runtime.kv.disk.threads import DiskThreads
from ingot.runtime.kv.host_tier import HostBlock, HostTier, SlotState
from ingot.runtime.kv.keys import BlockContent, Tree
from ingot.runtime.kv.tier_metrics import DiskMetrics
from ingot.runtime.kv.transfers.transfer import Bytes, Cancelled, Transfer

_log = logging.getLogger(__name__)


class BlockStore(Protocol):
    """Blocks on disk. Methods are called from several threads at once."""

    def contains(self, key: bytes) -> bool:
        """Whether the store has this block, as far as it is aware. Never waits for a file system; the others may."""
        ...

    @property
    def refusal(self) -> str | None:
        """Why the store takes no writes now; None if it does. Never waits for a file system."""
        ...

    @property
    def metrics(self) -> DiskMetrics:
        """Contents and counters of the store. Never waits for a file system."""
        ...

    def look(self) -> None:
        """Take note of what other processes stored meanwhile."""
        ...

    def read_into(self, content: BlockContent, buffer: Bytes) -> None:
        """Read exactly this block. Raises an exception when the store does not have it, or has it damaged."""
        ...

    def write(self, content: BlockContent, buffer: Bytes) -> bool:
        """Store a block; False when the store cannot, as on a full disk."""
        ...

    def remove(self, key: bytes) -> None:
        """Remove a block, if it is there."""
        ...

    def close(self) -> None:
        """Release the folder. Idempotent."""
        ...


class _Read(NamedTuple):
    transfer: Transfer
    block: HostBlock


class DiskTier:
    """Moves blocks between the slots of a host tier and a store. Its owner guards it with a lock.

    view             the bytes of a slot
    observe          takes the seconds of each read
    most_in_flight   most blocks that are read, and that are written, at a time

    The threads and the store may serve another pool's tier too; who made them closes them. Only the threads call what
    may wait for the file system. While it hangs, no block is found, reads that have begun count as failed, and none
    begins; a slot that is read or written stays pinned until the call has returned.
    """

    def __init__(
        self,
        store: BlockStore,
        host: HostTier,
        view: Callable[[int], Bytes],
        observe: Callable[[TierName, float], object],
        *,
        most_in_flight: int,
        threads: DiskThreads,
    ) -> None:
        self._store, self._host, self._view, self._observe = store, host, view, observe
        self._most = most_in_flight
        self._threads = threads
        self._reads: list[_Read] = []
        self._writes: dict[HostBlock, Transfer] = {}
        self._removals: dict[bytes, Transfer] = {}
        self._is_closing = False
        self.is_hanging = False
        self.num_read = self.num_written = self.num_failed = 0

    def wrap(self, store: Callable[[BlockStore], BlockStore]) -> None:
        """Put something around the store."""
        self._store = store(self._store)

    @property
    def is_reading(self) -> bool:
        """Whether blocks are being read."""
        return bool(self._reads)

    @property
    def num_writing(self) -> int:
        """Blocks that are being written."""
        return len(self._writes)

    @property
    def writing(self) -> set[bytes]:
        """Keys of the blocks that are being written."""
        return {block.content.hash for block in self._writes}

    @property
    def has_room(self) -> bool:
        """Whether another read may begin."""
        return len(self._reads) < self._most and not self.is_hanging

    @property
    def has_room_to_write(self) -> bool:
        """Whether another write may begin."""
        return len(self._writes) < self._most and self.takes_writes

    @property
    def refusal(self) -> str | None:
        """Why nothing can be written now; None if it can."""
        return "the file system does not answer" if self.is_hanging else self._store.refusal

    @property
    def takes_writes(self) -> bool:
        """Whether blocks can be written at all. If not, the tiers above do as without a disk."""
        return self.refusal is None

    @property
    def metrics(self) -> DiskMetrics:
        """Contents and counters of the store."""
        return replace(self._store.metrics, refusal=self.refusal)

    def check(self) -> None:
        """Raise EngineError if a thread has died."""
        self._threads.check()

    def contains(self, key: bytes) -> bool:
        """Whether the store has a block, as far as it is aware."""
        return key not in self._removals and self._store.contains(key)

    def offers(self, key: bytes) -> bool:
        """Whether a block may be read now."""
        return not self.is_hanging and self.contains(key)

    def read(self, content: BlockContent, tree: Tree) -> HostBlock | None:
        """Begin to read a block into a slot, which is pinned meanwhile; None while there is no spare one."""
        block = self._host.reserve(content, tree, "disk", takes_kept=False)
        if block is None:
            return None
        read = partial(self._read_or_remove, content, self._view(block.slot))
        self._reads.append(_Read(self._threads.readers.submit(read), block))
        return block

    def write(self, block: HostBlock) -> None:
        """Begin to write a block in host memory, unless it is one sequence's own, or the store has or gets it.

        The caller has seen that there is room.
        """
        if block.tree.private or block in self._writes or self.contains(block.content.hash):
            return
        assert block.state is SlotState.READY
        self._host.pin(block)
        store = partial(self._store_block, block.content, self._view(block.slot))
        self._writes[block] = self._threads.writer.submit(store)

    def remove(self, key: bytes) -> None:
        """Begin to remove a block, which is not found from now on."""
        if not self._is_closing:
            self._removals[key] = self._threads.writer.submit(partial(self._remove, key))

    def close(self) -> None:
        """Cancel reads and writes that have not begun, before the threads end."""
        self._is_closing = True
        self._cancel()

    def _cancel(self) -> None:
        for transfer in (*(read.transfer for read in self._reads), *self._writes.values()):
            transfer.cancel()

    def advance(self) -> None:
        """Take note of what has ended."""
        reads, self._reads = self._reads, []
        for read in reads:
            if not read.transfer.done:
                self._reads.append(read)
            else:
                self._end_read(read)
        for block in [block for block, transfer in self._writes.items() if transfer.done]:
            self._end_write(self._writes.pop(block), block)
        for key in [key for key, removal in self._removals.items() if removal.done]:
            del self._removals[key]
        self.is_hanging = self._threads.answers.are_missing
        if self.is_hanging:
            self._give_up()

    def _give_up(self) -> None:
        """Let nothing wait for a file system that hangs."""
        self._cancel()
        for read in self._reads:
            if not read.transfer.done and read.block.state is not SlotState.LOST:
                self.num_failed += 1
                self._host.lose(read.block)

    def _remove(self, key: bytes) -> None:
        with self._threads.answers.awaited():
            self._store.remove(key)

    def _read_or_remove(self, content: BlockContent, buffer: Bytes) -> None:
        """Read a block. One that cannot be read is removed: it would be found, and fail, again and again."""
        with self._threads.answers.awaited():
            try:
                self._store.read_into(content, buffer)
            except Exception:
                self._store.remove(content.hash)
                raise

    def _store_block(self, content: BlockContent, buffer: Bytes) -> None:
        self._threads.admit()
        with self._threads.answers.awaited():
            if not self._store.write(content, buffer):
                raise EngineError("the disk store took no block")

    def _end_read(self, read: _Read) -> None:
        transfer, block = read
        if block.state is SlotState.LOST:  # it was forgotten, or given up because the file system hung
            self._host.unpin(block)
            return
        if transfer.error is None:
            self.num_read += 1
            self._observe("disk", transfer.seconds)
            self._host.fill(block)
            return
        self._note_failure("read from disk, and is computed", transfer.error)
        self._host.lose(block)
        self._host.unpin(block)

    def _end_write(self, transfer: Transfer, block: HostBlock) -> None:
        if block.state is SlotState.LOST:
            self.remove(block.content.hash)  # it was forgotten meanwhile
        self._host.unpin(block)
        if transfer.error is None:
            self.num_written += 1
            return
        self._note_failure("written to disk", transfer.error)

    def _note_failure(self, what: str, error: Exception) -> None:
        if not isinstance(error, Cancelled):
            self.num_failed += 1
            _log.debug("a block was not %s: %s", what, error)
