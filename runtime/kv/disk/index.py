"""The index of a disk store in this process: the block in each slot, times of last use, free slots.

Numbers only; `DiskSegment` has the files. All methods are thread-safe, and none holds the lock for long: the engine's
step looks blocks up here. Places are kept as integers, because Python's collector visits every tuple of a large index.
"""

import threading
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import islice
from math import ceil
from typing import NamedTuple

import numpy as np

from ingot.runtime.kv.disk.segment import DiskSegment, SegmentEntry

_OLDEST_SHARE = 16  # 1 / 16 of the slots of a size can be evicted before they are sorted again
_LEAD_NS = 10**9  # by which the blocks before a used one are newer than it
_SLOT_BITS = 32  # of a place as an integer; its segment's number is above them


class DiskPlace(NamedTuple):
    """A slot of a segment."""

    segment: DiskSegment
    slot: int


class ReplaceableSlot(NamedTuple):
    """A slot to take. `entry` is what it should still hold."""

    place: DiskPlace
    entry: SegmentEntry


class _Table:
    """A segment's table in memory, by slot: key and time of last use; without a key, whether it is free to be taken.

    A slot that is about to be written has no key and is not free, and so is one whose block was forgotten.
    """

    __slots__ = ("first", "is_free", "is_used", "keys", "segment", "stamps")

    def __init__(self, segment: DiskSegment, number: int) -> None:
        self.segment = segment
        self.first = number << _SLOT_BITS  # its first slot's place as an integer
        self.keys: list[bytes | None] = [None] * segment.num_slots
        self.stamps = array("q", bytes(8 * segment.num_slots))
        self.is_used = bytearray(segment.num_slots)  # whether there is a key; numpy reads this and the stamps in place
        self.is_free = bytearray(segment.num_slots)


class StoreIndex:
    """Blocks by key, and slots by what is in them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[DiskSegment, _Table] = {}
        self._numbered: dict[int, _Table] = {}  # the same tables
        self._num_added = 0  # tables
        self._places: dict[bytes, int] = {}
        self._twins: dict[bytes, list[int]] = {}  # further slots with a block, that two processes wrote at once
        self._parents: dict[bytes, bytes] = {}  # of blocks that this process has read or written
        self._free: dict[int, deque[int]] = defaultdict(deque)  # by slot size; those of the newest segment last
        self._oldest: dict[int, deque[tuple[DiskSegment, int, int]]] = defaultdict(deque)  # with the time of last use
        self._last_stamp = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    @property
    def has_segments(self) -> bool:
        """Whether there are any slots."""
        return bool(self._tables)

    @property
    def segments(self) -> list[DiskSegment]:
        """All segments."""
        with self._lock:
            return list(self._tables)

    def place(self, key: bytes) -> DiskPlace | None:
        """A slot with this block."""
        with self._lock:
            found = self._places.get(key)
            return None if found is None else self._place(found)

    def places(self, key: bytes) -> list[DiskPlace]:
        """All slots with this block."""
        with self._lock:
            found = [self._places[key], *self._twins.get(key, ())] if key in self._places else []
            return [self._place(each) for each in found]

    def in_slots_of(self, slot_bytes: int, count: int) -> list[DiskPlace]:
        """Up to `count` slots of this size that hold a block, of whichever model."""
        with self._lock:
            used = (
                DiskPlace(table.segment, slot)
                for table in self._of_size(slot_bytes)
                for slot, key in enumerate(table.keys)
                if key
            )
            return list(islice(used, count))

    def refresh(self, segment: DiskSegment, entries: Sequence[SegmentEntry]) -> None:
        """Take what a segment's table holds now; a segment that is new to the index is added."""
        with self._lock:
            table = self._tables.get(segment)
            if table is None:
                table = self._add(segment)
                for slot in range(segment.num_slots - 1, -1, -1):
                    if not entries[slot].key:
                        self._give_back(table, slot)
            for slot, (known, found) in enumerate(zip(table.keys, entries, strict=True)):
                if known != found.key:
                    self._replace(table, slot, found.key)
                if found.key:
                    table.stamps[slot] = max(table.stamps[slot], found.used_ns)

    def put(self, place: DiskPlace, entry: SegmentEntry) -> None:
        """Note what a slot holds that was written or looked at."""
        with self._lock:
            table = self._tables.get(place.segment)
            if table is not None:
                self._replace(table, place.slot, entry.key)
                table.stamps[place.slot] = entry.used_ns

    def forget(self, place: DiskPlace) -> None:
        """Forget the block in a slot that this process cannot use now."""
        with self._lock:
            table = self._tables.get(place.segment)
            if table is not None:
                self._remove_key(table, place.slot)

    def drop(self, segment: DiskSegment) -> None:
        """Forget a segment and all its blocks."""
        with self._lock:
            table = self._tables.get(segment)
            if table is None:
                return
            for slot in range(segment.num_slots):
                self._remove_key(table, slot)
            del self._tables[segment], self._numbered[table.first >> _SLOT_BITS]

    def clear(self) -> None:
        """Forget everything."""
        for segment in self.segments:
            self.drop(segment)
        self._free.clear()
        self._oldest.clear()

    def take_free(self, slot_bytes: int) -> DiskPlace | None:
        """A free slot of this size, which no other thread gets until it is released or written and evicted."""
        with self._lock:
            free = self._free[slot_bytes]
            while free:
                number, slot = _split(free.pop())
                table = self._numbered.get(number)
                if table is not None and table.is_free[slot]:
                    table.is_free[slot] = False
                    return DiskPlace(table.segment, slot)
            return None

    def release(self, place: DiskPlace) -> None:
        """Give back a slot that was taken and holds nothing."""
        with self._lock:
            if place.segment in self._tables:
                self._give_back(self._tables[place.segment], place.slot)

    def pop_oldest(self, slot_bytes: int) -> ReplaceableSlot | None:
        """The next slot of this size to evict; None when they must be sorted first."""
        with self._lock:
            oldest = self._oldest[slot_bytes]
            while oldest:
                segment, slot, stamp = oldest.popleft()
                table = self._tables.get(segment)
                if table is not None and table.is_used[slot] and table.stamps[slot] == stamp:
                    return ReplaceableSlot(DiskPlace(segment, slot), SegmentEntry(table.keys[slot], stamp))
            return None

    def sort(self, slot_bytes: int) -> None:
        """Choose the slots of this size that are evicted next: 1/16 of them, the least recently used first."""
        with self._lock:
            tables = self._of_size(slot_bytes)
            if not any(any(table.is_used) for table in tables):
                return
            stamps = [np.frombuffer(table.stamps, np.int64) for table in tables]
            used = [np.frombuffer(table.is_used, bool) for table in tables]
            owners = np.repeat(np.arange(len(tables)), [len(each) for each in stamps])
            slots = np.concatenate([np.arange(len(each)) for each in stamps])
            chosen = np.flatnonzero(np.concatenate(used))
            times = np.concatenate(stamps)[chosen]
            count = ceil(len(chosen) / _OLDEST_SHARE)
            first = np.argpartition(times, count - 1)[:count]
            first = first[np.argsort(times[first], kind="stable")]
            segments = [tables[owner].segment for owner in owners[chosen[first]].tolist()]
            found = zip(segments, slots[chosen[first]].tolist(), times[first].tolist(), strict=True)
            self._oldest[slot_bytes] = deque(found)

    def oldest_use(self, slot_bytes: int) -> int | None:
        """When the least recently used block in slots of this size was used; None without any."""
        with self._lock:
            tables = self._of_size(slot_bytes)
            stamps = [stamp for table in tables for key, stamp in zip(table.keys, table.stamps, strict=True) if key]
            return min(stamps, default=None)

    def stalest(self, *, except_for: int | None = None) -> tuple[DiskSegment, int] | None:
        """The segment, of slots of another size than `except_for`, whose blocks were used least recently.

        With it comes the median of their times of last use. Free slots count as never used.
        """
        with self._lock:
            medians = [
                (table.segment, int(np.median(table.stamps)) if table.stamps else 0)
                for table in self._tables.values()
                if table.segment.geometry.slot_bytes != except_for
            ]
        return min(medians, key=lambda each: each[1], default=None)

    def touch(self, key: bytes, parent: bytes) -> list[ReplaceableSlot]:
        """Make a block the newest but for the blocks before it in its chain; returns the new times of last use.

        Without the blocks before it a block is worthless, so they must go after it. Ancestors are followed as far as
        they are known and older. They get a time a little ahead, so that a chain which is read or written block by
        block takes about two new times for each of its blocks, not one for each pair.
        """
        with self._lock:
            if key not in self._places:
                return []
            self._parents[key] = parent
            self._last_stamp = max(time.time_ns(), self._last_stamp + 1)
            now = max(self._last_stamp, self._stamp(key))
            older: list[bytes] = []
            while parent in self._places and self._stamp(parent) <= now + len(older) + 1:
                older.append(parent)
                parent = self._parents.get(parent, b"")
            first = self._stamp(parent) - 1 if parent in self._places else now + _LEAD_NS + len(older)
            stamps = [now, *range(first - len(older) + 1, first + 1)]
            return [self._set_stamp(each, stamp) for each, stamp in zip([key, *older], stamps, strict=True)]

    def _add(self, segment: DiskSegment) -> _Table:
        table = self._tables[segment] = self._numbered[self._num_added] = _Table(segment, self._num_added)
        self._num_added += 1
        return table

    def _place(self, place: int) -> DiskPlace:
        number, slot = _split(place)
        return DiskPlace(self._numbered[number].segment, slot)

    def _of_size(self, slot_bytes: int) -> list[_Table]:
        return [table for table in self._tables.values() if table.segment.geometry.slot_bytes == slot_bytes]

    def _stamp(self, key: bytes) -> int:
        number, slot = _split(self._places[key])
        return self._numbered[number].stamps[slot]

    def _set_stamp(self, key: bytes, stamp: int) -> ReplaceableSlot:
        number, slot = _split(self._places[key])
        table = self._numbered[number]
        table.stamps[slot] = stamp
        return ReplaceableSlot(DiskPlace(table.segment, slot), SegmentEntry(key, stamp))

    def _replace(self, table: _Table, slot: int, key: bytes | None) -> None:
        """Note that a slot holds this block, and no other."""
        if table.keys[slot] == key:
            return
        self._remove_key(table, slot)
        if key is None:
            self._give_back(table, slot)
            return
        place = table.first + slot
        table.keys[slot], table.is_used[slot], table.is_free[slot] = key, True, False
        if self._places.setdefault(key, place) != place:
            self._twins.setdefault(key, []).append(place)

    def _give_back(self, table: _Table, slot: int) -> None:
        table.is_free[slot] = True
        self._free[table.segment.geometry.slot_bytes].append(table.first + slot)

    def _remove_key(self, table: _Table, slot: int) -> None:
        key, table.keys[slot], table.stamps[slot], table.is_used[slot] = table.keys[slot], None, 0, False
        if key is None:
            return
        place, twins = table.first + slot, self._twins.get(key, [])
        if place in twins:
            twins.remove(place)
        if self._places[key] == place and twins:
            self._places[key] = twins.pop()
        elif self._places[key] == place:
            del self._places[key]
            self._parents.pop(key, None)
        if not twins:
            self._twins.pop(key, None)


def _split(place: int) -> tuple[int, int]:
    """The number of a place's segment, and its slot."""
    return place >> _SLOT_BITS, place & (1 << _SLOT_BITS) - 1
