"""The disk below host memory: threads that read and write a store, and what is queued for them.

A block is written from its slot as soon as it is in host memory, so that giving up the slot is free, and read back into
a slot. Slots are pinned until they are written, as long as only half of them are; beyond that, host memory has more use
of them than a disk that is too slow: a block that it gives up before it was written is not written.
"""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from ingot.errors import EngineError
from ingot.runtime.kv.cost_model import TierName
from ingot.runtime.kv.host_tier import HostBlock, HostTier, SlotState
from ingot.runtime.kv.keys import BlockContent, Tree
from ingot.runtime.kv.transfers import Bytes, TaskQueue, Transfer

_log = logging.getLogger(__name__)


class BlockStore(Protocol):
    """Blocks on disk. Methods are called from several threads at once."""

    def contains(self, key: bytes) -> bool:
        """Whether the store has a file for this key, as far as it is aware; reads nothing."""
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


class _Move(NamedTuple):
    transfer: Transfer
    block: HostBlock


class _Queued(NamedTuple):
    block: HostBlock
    is_pinned: bool


class DiskTier:
    """Moves blocks between the slots of a host tier and a store. Its owner guards it with a lock.

    view             the bytes of a slot
    observe          takes the seconds of each read
    most_in_flight   most blocks that are read, and that are written, at a time

    The threads and the store may serve another pool's tier too; who made them closes them.
    """

    def __init__(
        self,
        store: BlockStore,
        host: HostTier,
        view: Callable[[int], Bytes],
        observe: Callable[[TierName, float], object],
        *,
        most_in_flight: int,
        readers: TaskQueue,
        writer: TaskQueue,
    ) -> None:
        self._store, self._host, self._view, self._observe = store, host, view, observe
        self._most = most_in_flight
        self._readers, self._writer = readers, writer
        self._reads: list[_Move] = []
        self._writes: list[_Move] = []
        self._to_write: deque[_Queued] = deque()
        self.num_read = self.num_written = self.num_failed = 0

    def wrap(self, store: Callable[[BlockStore], BlockStore]) -> None:
        """Put something around the store."""
        self._store = store(self._store)

    @property
    def is_reading(self) -> bool:
        """Whether blocks are being read."""
        return bool(self._reads)

    @property
    def is_writing(self) -> bool:
        """Whether blocks are being written, or are queued for it."""
        return bool(self._writes or self._to_write)

    @property
    def has_room(self) -> bool:
        """Whether another read may begin."""
        return len(self._reads) < self._most

    @property
    def has_room_to_write(self) -> bool:
        """Whether a block that is offered keeps its slot until it is written."""
        return len(self._writes) + len(self._to_write) < self._most

    def check(self) -> None:
        """Raise EngineError if a thread has died."""
        self._readers.check()
        self._writer.check()

    def contains(self, content: BlockContent) -> bool:
        """Whether the store may have a block."""
        return self._store.contains(content.hash)

    def read(self, content: BlockContent, tree: Tree) -> HostBlock | None:
        """Begin to read a block into a slot, which is pinned meanwhile; None while no slot is free."""
        block = self._host.reserve(content, tree, "disk")
        if block is None:
            return None
        read = partial(self._store.read_into, content, self._view(block.slot))
        self._reads.append(_Move(self._readers.submit(read), block))
        return block

    def offer(self, block: HostBlock) -> None:
        """Queue a block in host memory to be written, unless it is one sequence's own or the store has it."""
        if block.tree.private or self.contains(block.content):
            return
        is_pinned = self.has_room_to_write
        if is_pinned:
            self._host.pin(block)
        self._to_write.append(_Queued(block, is_pinned))

    def advance(self) -> None:
        """Take note of what has ended, and begin what is queued."""
        reads, self._reads = self._reads, []
        for move in reads:
            if not move.transfer.done:
                self._reads.append(move)
            else:
                self._end_read(move)
        writes, self._writes = self._writes, []
        for move in writes:
            if not move.transfer.done:
                self._writes.append(move)
            else:
                self._end_write(move)
        while self._to_write and len(self._writes) < self._most:
            self._write(self._to_write.popleft())

    def drop_queued(self) -> None:
        """Forget what is queued to be written."""
        for queued in self._to_write:
            if queued.is_pinned:
                self._host.unpin(queued.block)
        self._to_write.clear()

    def _write(self, queued: "_Queued") -> None:
        block = queued.block
        if not queued.is_pinned:
            self._host.pin(block)
        if block.state is SlotState.READY and not self.contains(block.content):
            store = partial(self._store_block, block.content, self._view(block.slot))
            self._writes.append(_Move(self._writer.submit(store), block))
        else:
            self._host.unpin(block)

    def _store_block(self, content: BlockContent, buffer: Bytes) -> None:
        if not self._store.write(content, buffer):
            raise EngineError("the disk store took no block")

    def _end_read(self, move: _Move) -> None:
        transfer, block = move
        if transfer.error is None:
            self.num_read += 1
            self._observe("disk", transfer.seconds)
            self._host.fill(block)
            return
        self.num_failed += 1
        _log.debug("a block was not read from disk, and is computed: %s", transfer.error)
        self._host.lose(block)
        self._host.unpin(block)

    def _end_write(self, move: _Move) -> None:
        transfer, block = move
        self._host.unpin(block)
        if transfer.error is None:
            self.num_written += 1
            return
        self.num_failed += 1
        _log.debug("a block was not written to disk: %s", transfer.error)
