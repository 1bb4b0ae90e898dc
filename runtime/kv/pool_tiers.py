"""Host memory and disk below one pool of the device: that of the KV blocks, or that of side states.

A place is a block of the pool, or a slot of side state. What a transfer uses is pinned until it has ended: the place
here, the slot in host memory by `HostTier`. A transfer that fails moves nothing; it is counted, and logged once.
"""

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from ingot.runtime.kv.cost_model import TierName
from ingot.runtime.kv.disk.tier import BlockStore, DiskTier
from ingot.runtime.kv.host_tier import HostBlock, HostTier, SlotState
from ingot.runtime.kv.keys import BlockContent, Tree
from ingot.runtime.kv.tier_metrics import PoolCounters
from ingot.runtime.kv.transfers.background import GoesOn, always
from ingot.runtime.kv.transfers.transfer import Cancelled, HostBlocks, Transfer

_log = logging.getLogger(__name__)
IN_FLIGHT_BYTES = 128 * 2**20  # that are saved, that are written to disk, and that are read from it at a time
_WRITTEN_SHARE = 8  # 1 / 8 of the slots is given up next, and on disk before that
_LEAST_AT_ONCE = 16  # writes that are begun together if more are due: each takes a step some 10 us


class Pinned(Protocol):
    """Bookkeeping of a pool's places."""

    def pin(self, place: int, /) -> None:
        """Keep a place and its content while a transfer uses it."""
        ...

    def unpin(self, place: int, /) -> None:
        """Undo one `pin`."""
        ...


class Saved(NamedTuple):
    """What a place of a pool holds, as the tiers file it."""

    place: int
    content: BlockContent
    tree: Tree


class _Save(NamedTuple):
    transfer: Transfer
    place: int
    target: HostBlock
    through: bool  # to the disk


class PoolTiers:
    """Copies what a pool holds to host memory and back. Its owner guards it with a lock, and closes `copies`.

    pool        bookkeeping of its places
    copies      makes the copies; has the slots in host memory
    num_bytes   size of a place
    observe     takes the tier and the seconds of each copy that was measured
    """

    def __init__(
        self,
        pool: Pinned,
        copies: HostBlocks,
        host: HostTier,
        *,
        num_bytes: int,
        observe: Callable[[TierName, float], object],
    ) -> None:
        self.copies, self.host, self.num_bytes = copies, host, num_bytes
        self.observe = observe
        self.disk: DiskTier | None = None
        self.counters = PoolCounters()
        self.most_in_flight = max(1, min(IN_FLIGHT_BYTES // num_bytes, copies.num_slots // 2))
        self._num_ahead = max(1, min(self.most_in_flight, copies.num_slots // _WRITTEN_SHARE))
        self._pool = pool
        self._saves: list[_Save] = []
        self._unpinned: list[int] = []  # by transfers that have ended, until the engine's thread unpins them
        self._was_failure_logged = False

    def wrap(self, copies: Callable[[HostBlocks], HostBlocks], store: Callable[[BlockStore], BlockStore]) -> None:
        """Put something around copies and store, to make them fail: that is not logged."""
        self._was_failure_logged = True
        self.copies = copies(self.copies)
        if self.disk:
            self.disk.wrap(store)

    @property
    def is_saving(self) -> bool:
        """Whether any save is in flight."""
        return bool(self._saves)

    @property
    def is_moving(self) -> bool:
        """Whether anything is being saved, read or written."""
        return self.is_moving_down or (self.disk is not None and self.disk.is_reading)

    @property
    def has_ended(self) -> bool:
        """Whether transfers have ended whose places are still pinned."""
        return bool(self._unpinned)

    @property
    def is_moving_down(self) -> bool:
        """Whether anything is being saved or written."""
        return bool(self._saves) or (self.disk is not None and self.disk.num_writing > 0)

    @property
    def moving_down(self) -> set[bytes]:
        """Keys of what is being saved or written."""
        return {save.target.content.hash for save in self._saves} | (self.disk.writing if self.disk else set())

    @property
    def num_ended(self) -> int:
        """Transfers that have ended."""
        ended = self.counters.saved + self.counters.restored + self.num_failed
        return ended + (self.disk.num_read + self.disk.num_written if self.disk else 0)

    @property
    def num_failed(self) -> int:
        """Transfers that failed."""
        return self.counters.failed + (self.disk.num_failed if self.disk else 0)

    def check_threads(self) -> None:
        """Raise EngineError if a thread that moves blocks has died."""
        self.copies.check()
        if self.disk:
            self.disk.check()

    @property
    def writes_to_disk(self) -> bool:
        """Whether there is a disk that takes writes."""
        return self.disk is not None and self.disk.takes_writes

    @property
    def disk_refusal(self) -> str | None:
        """Why the disk takes no writes; None if it does, and without a disk."""
        return self.disk.refusal if self.disk else None

    def find(self, content: BlockContent) -> TierName | None:
        """The tier that this content can be had from."""
        held = self.host.find(content)
        if held:
            return held.origin
        return "disk" if self.disk and self.disk.offers(content.hash) else None

    def has(self, key: bytes, *, keeps: bool) -> bool:
        """Whether a tier has this content, in host memory as one that it `keeps`, if so."""
        is_in_host = self.host.keep(key) if keeps else key in self.host
        return is_in_host or (self.disk is not None and self.disk.contains(key))

    @property
    def has_room_to_save(self) -> bool:
        """Whether another save may begin."""
        return len(self._saves) < self.most_in_flight

    def note_gone(self, key: bytes) -> None:
        """Take note of content that has left the device: host memory keeps it now, if it has it."""
        if not self.has(key, keeps=True):
            self.counters.dropped_saves += 1

    def save(self, saved: Saved, *, keeps: bool, through: bool = False) -> bool:
        """Begin to save a place whose content host memory does not have; False while there is no room for it.

        keeps    whether host memory keeps it, because the device is about to give it up, or has it as a spare
        through  whether it is written to disk once it is saved

        Host memory gives up what it keeps only where that is written to disk first, unless the disk is too slow.
        """
        if not self.has_room_to_save:
            return False
        may_drop = keeps and not (self.disk and self.disk.has_room_to_write)
        target = self.host.reserve(saved.content, saved.tree, "host", keeps=keeps, takes_kept=may_drop)
        if target is None:
            return False
        self._pool.pin(saved.place)
        self._saves.append(_Save(self.copies.save(saved.place, target.slot), saved.place, target, through))
        return True

    def pass_on(self, goes_on: GoesOn = always) -> None:
        """Take note of saves and disk transfers that have ended, and write what host memory will give up."""
        if self.disk:
            self.disk.advance()
        num_kept = self._end_saves()
        if self.disk:
            self._write_ahead(self.disk, _LEAST_AT_ONCE + num_kept, goes_on)

    def _end_saves(self) -> int:
        """Take note of saves that have ended, and write those to disk that go through host memory.

        Returns how many of those that have ended stay in host memory.
        """
        saves, self._saves = self._saves, []
        num_kept = 0
        for save in saves:
            if not save.transfer.done:
                self._saves.append(save)
                continue
            self._unpinned.append(save.place)
            if save.transfer.error:
                self._note_failure(save.transfer.error)
                self.host.lose(save.target)
                self.host.unpin(save.target)
                continue
            self.counters.saved += 1
            self.host.fill(save.target)
            if save.through and self.disk and save.target.state is SlotState.READY:
                self.disk.write(save.target)
            num_kept += not save.through
        return num_kept

    def write(self, block: HostBlock) -> bool:
        """Have a block in host memory written to disk; False while there is no room for it."""
        assert self.disk
        if not self.disk.has_room_to_write or block.state is SlotState.FILLING:
            return False
        if block.state is SlotState.READY:
            self.disk.write(block)
        return True

    def _write_ahead(self, disk: DiskTier, most: int, goes_on: GoesOn) -> None:
        """Write the blocks that host memory gives up next, at most so many, so that it can do so at once."""
        for _ in range(most):
            if self.host.num_spare - disk.num_writing >= self._num_ahead or not disk.has_room_to_write:
                return
            if not goes_on():
                return
            block = self.host.demote()
            if block is None:
                return
            disk.write(block)

    def drop_saves(self) -> None:
        """Cancel saves that have not begun: a step needs their places."""
        for save in self._saves:
            save.transfer.cancel()
        self._end_saves()
        self.unpin()

    def forget(self, first: bytes, named: Iterable[bytes]) -> None:
        """Remove a tree from host memory, and it and what is named by its key from disk."""
        lost = self.host.lose_tree(first)
        if self.disk:
            for key in {*(content.hash for content in lost), *named}:
                self.disk.remove(key)

    def cancel(self) -> None:
        """Cancel saves, reads and writes that have not begun, before the threads end."""
        if self.disk:
            self.disk.close()
        self.drop_saves()

    def take(self, content: BlockContent, tree: Tree, *, may_read: bool) -> tuple[HostBlock, TierName] | None:
        """Content in host memory, pinned, and the tier that it is from; `may_read` it from disk, if it has room."""
        source = self.host.find(content)
        if source is None and may_read and self.disk and self.disk.has_room and self.disk.offers(content.hash):
            source = self.disk.read(content, tree)
        if source is None:
            return None
        self.host.pin(source)
        self.host.touch(content.hash)
        tier, source.origin = source.origin, "host"
        return source, tier

    def read_ahead(self, content: BlockContent, tree: Tree) -> None:
        """Begin to read content that will be needed from disk, if there is room for it."""
        if self.disk and self.disk.has_room and self.host.find(content) is None and self.disk.offers(content.hash):
            self.disk.read(content, tree)

    def pin(self, place: int) -> None:
        """Keep a place while something is restored to it."""
        self._pool.pin(place)

    def restore(self, source: HostBlock, place: int) -> Transfer:
        """Queue the copy to a place that is pinned."""
        return self.copies.restore(source.slot, place)

    def end_restore(self, source: HostBlock, transfer: Transfer) -> bool:
        """Take note of a restore that has ended; returns whether it worked."""
        if transfer.error is None:
            self.counters.restored += 1
            self.observe("host", transfer.seconds)
        else:
            self._note_failure(transfer.error)
            if not isinstance(transfer.error, Cancelled):
                self.host.lose(source)
        self.host.unpin(source)
        return transfer.error is None

    def unpin_later(self, place: int) -> None:
        """Unpin a place when the engine's thread next does so."""
        self._unpinned.append(place)

    def unpin(self) -> None:
        """Unpin what transfers that have ended used. In the engine's thread."""
        unpinned, self._unpinned = self._unpinned, []
        for place in unpinned:
            self._pool.unpin(place)

    @property
    def pinned(self) -> set[int]:
        """Places that saves, and transfers that have ended, keep."""
        return {*(save.place for save in self._saves), *self._unpinned}

    def _note_failure(self, error: Exception) -> None:
        if isinstance(error, Cancelled):
            return
        self.counters.failed += 1
        if not self._was_failure_logged:
            self._was_failure_logged = True
            _log.warning("a KV block was not copied, and is computed instead (%s); more of these are counted", error)
