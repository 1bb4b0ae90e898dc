"""KV blocks in a folder: they survive restarts and crashes, and any number of processes share them.

A block is in a slot (`slot.py`) of a larger file (`segment.py`). The size limit holds over all processes' files; the
least recently used block gives up its slot first (`space.py`). The store is a cache: a slot that cannot be read, or
does not hold exactly the block that the caller describes, is a miss, and trouble with the folder turns parts of the
store off, logged once (`health.py`). After `open`, nothing is raised for what the folder holds or the system reports
but BlockUnavailable by `read_into`.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingot.errors import EngineError, UsageError
from ingot.runtime.kv.disk.folder import StoreFolder
from ingot.runtime.kv.disk.health import StoreHealth
from ingot.runtime.kv.disk.index import DiskPlace, StoreIndex
from ingot.runtime.kv.disk.read_speed import MOST_SLOTS, ReadSpeed, measure_stored, measure_written
from ingot.runtime.kv.disk.segment import FREE, SegmentEntry, geometry_for
from ingot.runtime.kv.disk.slot import DamagedBlock, read_slot, slot_bytes, write_slot
from ingot.runtime.kv.disk.space import Space
from ingot.runtime.kv.keys import BlockContent
from ingot.runtime.kv.tier_metrics import DiskMetrics
from ingot.sizes import format_bytes

_TOKEN_BYTES = 8


Bytes = NDArray[np.uint8]


class BlockUnavailable(EngineError):
    """The store does not have the block, or cannot read it, or it is damaged."""


@dataclass(frozen=True)
class DiskStats:
    """Counts since the store was opened, and what the folder holds as far as this process has seen.

    num_bytes   of all segments, their free slots included
    """

    num_blocks: int = 0
    num_bytes: int = 0
    hits: int = 0
    misses: int = 0
    damaged: int = 0
    writes: int = 0
    refused_writes: int = 0
    evictions: int = 0
    errors: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0


class DiskStore:
    """Blocks of one artifact and KV format (`root`) in a folder that others may share. All methods are thread-safe."""

    def __init__(
        self, folder: StoreFolder, *, max_bytes: int, root: bytes, durable: bool, give_way: Callable[[], object]
    ) -> None:
        self._folder = folder
        self._root = root
        self._durable = durable
        self._index = StoreIndex()
        self._health = StoreHealth(folder.path)
        self._space = Space(folder, self._index, self._health, max_bytes=max_bytes)
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._num_active = 0
        self._is_closed = False
        self._writing = threading.Lock()  # taken by who chooses and fills a slot
        self._give_way = give_way
        self._counts: Counter[str] = Counter()
        self._read_seconds = 0.0
        self._write_seconds = 0.0

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        max_bytes: int,
        block_bytes: int,
        root: bytes,
        durable: bool = False,
        give_way: Callable[[], object] = lambda: None,
    ) -> "DiskStore":
        """Open a folder, or make it; its blocks count as stored from now on.

        max_bytes    limit of all files, those of other processes and models included
        block_bytes  size of a block, at least one of which must fit; side states have another size
        root         32 bytes that identify artifact, engine and KV format (`root_hash`)
        durable      flush every block to the disk before it appears. Otherwise a power failure, unlike the end of a
                     process, can leave damaged files; they are found by their checksum when they are read.
        give_way     called between calls of the system: other threads may go first

        Raises UsageError when the folder must not or cannot be used, or the limit is smaller than a block.
        """
        assert block_bytes > 0
        if max_bytes < geometry_for(slot_bytes(_TOKEN_BYTES, block_bytes), 0).file_bytes:
            raise UsageError(
                f"a KV folder of {format_bytes(max_bytes)} cannot hold one block of {format_bytes(block_bytes)}; "
                "raise kv_disk_bytes, or leave out kv_disk_path to keep no blocks on disk"
            )
        opened = StoreFolder(folder)
        try:
            store = cls(opened, max_bytes=max_bytes, root=root, durable=durable, give_way=give_way)
        except OSError as error:
            opened.close()
            raise opened.refusal(error) from error
        with store._operation("listing the folder"):
            opened.clean()
            store._space.load()
            store._space.shrink()
            store._compare_with_free_space()
        return store

    @property
    def failure(self) -> str | None:
        """Why the store is off: every block is a miss, and nothing is stored. None while it works."""
        return self._health.failure

    @property
    def refusal(self) -> str | None:
        """Why the store takes no writes now; None if it does. Answers from memory: a step may ask."""
        return self._health.refusal(has_segments=self._index.has_segments)

    @property
    def metrics(self) -> DiskMetrics:
        """Metrics of the store."""
        stats, is_off = self.stats, self.failure is not None  # then it serves nothing
        return DiskMetrics(
            num_blocks=0 if is_off else stats.num_blocks,
            num_bytes=0 if is_off else stats.num_bytes,
            max_bytes=self._space.max_bytes,
            num_damaged=stats.damaged,
            num_evicted=stats.evictions,
            num_errors=stats.errors,
            refusal=self.refusal,
        )

    @property
    def stats(self) -> DiskStats:
        """Counts until now."""
        with self._lock:
            return DiskStats(
                num_blocks=len(self._index),
                num_bytes=self._space.used_bytes,
                evictions=self._space.num_evicted,
                read_seconds=self._read_seconds,
                write_seconds=self._write_seconds,
                **self._counts,
            )

    def __len__(self) -> int:
        return len(self._index)

    def contains(self, key: bytes) -> bool:
        """Whether the block was stored when last seen, by this process or another; reading it may still fail.

        Answers from memory, without a call of the system: a step may ask. See `look`.
        """
        return self._health.failure is None and key in self._index

    def look(self) -> None:
        """Take note of the blocks that other processes stored since the last look."""
        with self._operation("looking for blocks") as works:
            if works:
                self._space.look()

    def read_into(self, content: BlockContent, buffer: Bytes) -> None:
        """Read exactly this block, or this side state, into a buffer of its size.

        Raises BlockUnavailable, after which the buffer's bytes are undefined. A slot with damage is freed.
        """
        started, done = time.perf_counter(), False
        with self._operation("reading a block", content.hash) as works:
            done = works and self._read(content, buffer.data)
        self._count(hits=int(done), misses=int(not done), bytes_read=buffer.nbytes * done)
        with self._lock:
            self._read_seconds += (time.perf_counter() - started) * done
        if not done:
            raise BlockUnavailable(f"the KV folder has no sound block {content.hash.hex()}")

    def write(self, content: BlockContent, buffer: Bytes) -> bool:
        """Store a block; False if that is not possible now. When it returns, every process finds the block."""
        started, done = time.perf_counter(), False
        with self._operation("storing a block") as works:
            if works and self._touch_stored(content):
                return True
            done = works and self._health.can_write and self._write(content, buffer.data)
        self._count(writes=int(done), refused_writes=int(not done), bytes_written=buffer.nbytes * done)
        with self._lock:
            self._write_seconds += (time.perf_counter() - started) * done
        return done

    def measure(self, buffer: Bytes, block_tokens: int) -> ReadSpeed:
        """Measure how long reads take, in some 20 ms, with a buffer of a block's size; empty after an error."""
        token_bytes, speed = block_tokens * _TOKEN_BYTES, ReadSpeed()
        with self._operation("measuring reads") as works, suppress(DamagedBlock):
            stored = self._index.in_slots_of(slot_bytes(token_bytes, buffer.nbytes), MOST_SLOTS)
            if works and stored:
                speed = measure_stored(stored, buffer, token_bytes)
            elif works and self._health.can_write:
                speed = measure_written(self._folder, buffer, token_bytes)
        return speed

    def remove(self, key: bytes) -> None:
        """Remove a block, such as one whose bytes may be wrong; no process serves it afterwards."""
        with self._operation("removing a block") as works:
            if works:
                self._space.look()
                for place in self._index.places(key):
                    self._erase(place, key)

    def close(self) -> None:
        """Wait for running calls, then close the folder; blocks stay. Later calls find and store nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._health.failure = self._health.failure or "the store is closed"
            self._idle.wait_for(lambda: self._num_active == 0)
        self._space.close()
        self._folder.close()

    def _find(self, key: bytes) -> DiskPlace | None:
        """A slot with the block, which another process may have stored since the last look."""
        place = self._index.place(key)
        if place is None:
            self._space.look()
            place = self._index.place(key)
        return place

    def _read(self, content: BlockContent, buffer: memoryview) -> bool:
        if self._find(content.hash) is None:
            return False
        for place in self._index.places(content.hash):
            if self._read_place(place, content, buffer):
                self._health.note_success()
                self._give_way()
                self._touch(content)
                return True
        return False

    def _read_place(self, place: DiskPlace, content: BlockContent, buffer: memoryview) -> bool:
        reason = self._try_to_read(place, content, buffer)
        if reason and self._is_in(place, content.hash):
            reason = self._try_to_read(place, content, buffer)  # another process may have been writing this very block
        if not reason:
            self._give_way()
            return self._exists(place)
        if self._is_in(place, content.hash):
            self._note_damage(reason)
            self._erase(place, content.hash)
        return False

    def _try_to_read(self, place: DiskPlace, content: BlockContent, buffer: memoryview) -> str | None:
        """Read a block; returns what is wrong with it."""
        try:
            read_slot(place.segment.file, place.segment.offset(place.slot), content, self._root, buffer)
        except DamagedBlock as reason:
            return str(reason)
        return None

    def _exists(self, place: DiskPlace) -> bool:
        """Whether the segment was not deleted. Raises FileNotFoundError if the folder was."""
        if place.segment.is_removed:
            self._space.drop_removed(place.segment)
            return False
        return True

    def _is_in(self, place: DiskPlace, key: bytes) -> bool:
        """Whether the slot has this block still, by its segment's table."""
        if not self._exists(place):
            return False
        found = place.segment.entry(place.slot)
        if found.key != key:
            self._index.put(place, found)
        return found.key == key

    def _write(self, content: BlockContent, buffer: memoryview) -> bool:
        with self._writing:
            place = self._space.allocate(slot_bytes(len(content.tokens), buffer.nbytes))
            if place is None:
                return False
            try:
                self._give_way()
                self._fill(place, content, buffer)
            except BaseException:
                self._index.release(place)
                raise
            finally:
                place.segment.unlock()
        self._health.note_success()
        self._give_way()
        self._space.announce(place)
        self._give_way()
        self._touch(content)
        return True

    def _fill(self, place: DiskPlace, content: BlockContent, buffer: memoryview) -> None:
        segment, slot = place
        write_slot(segment.file, segment.offset(slot), content, self._root, buffer)
        self._give_way()
        entry = SegmentEntry(content.hash, time.time_ns())
        segment.publish(slot, entry)
        if self._durable:
            os.fdatasync(segment.file)
        self._index.put(place, entry)

    def _touch_stored(self, content: BlockContent) -> bool:
        """Mark a block as used if it is stored already."""
        place = self._index.place(content.hash)
        if place is None or not self._is_in(place, content.hash):
            return False
        self._touch(content)
        return True

    def _touch(self, content: BlockContent) -> None:
        """Make the block and those before it the newest. Where that fails, as read-only, the block is still served."""
        with self._operation("marking a block as used") as works:
            for (segment, slot), entry in self._index.touch(content.hash, content.parent) if works else ():
                segment.stamp(slot, entry.used_ns)

    def _erase(self, place: DiskPlace, key: bytes) -> None:
        """Free a slot with this block; if another process uses it for another by now, leave it alone."""
        if self._is_in(place, key):
            place.segment.erase(place.slot)
            self._index.put(place, FREE)

    def _note_damage(self, reason: str) -> None:
        self._count(damaged=1)
        self._health.warn_once("damaged", "holds a damaged block (%s): it was removed and is computed again", reason)

    def _compare_with_free_space(self) -> None:
        room = self._folder.free_bytes + self._space.used_bytes
        if room < self._space.max_bytes:
            sizes = format_bytes(room), format_bytes(self._space.max_bytes)
            self._health.warn_once(
                "room", "has room for %s, less than its limit of %s; what does not fit is not stored", *sizes
            )

    @contextmanager
    def _operation(self, doing: str, key: bytes | None = None) -> Iterator[bool]:
        """Keep the folder open during the block; the system's errors end here. Gives False if the store is off.

        `key` is the block that is read: after an error it counts as missing.
        """
        with self._lock:
            works = self._health.failure is None
            self._num_active += works
        try:
            yield works
        except OSError as error:
            self._note(error, doing, key)
        finally:
            with self._lock:
                self._num_active -= works
                self._idle.notify_all()

    def _note(self, error: OSError, doing: str, key: bytes | None) -> None:
        self._count(errors=1)
        is_deleted = self._folder.is_deleted
        maybe_sound = self._health.note_error(error, doing, reading=key is not None, is_deleted=is_deleted)
        place = self._index.place(key) if key else None
        if place and not maybe_sound:
            self._index.forget(place)

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)
