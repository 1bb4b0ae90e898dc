"""The space of a folder: its segments, as many as the limit allows, and which slot a new block gets.

In this order: a free slot, a slot of a new segment, the slot of the least recently used block. Where other blocks need
slots of another size and all of the space is taken, whole segments change hands: one is deleted if half of its blocks
were used less recently than any in slots of the size that is needed.
"""

import errno
import os
import threading
from contextlib import suppress

from ingot.runtime.kv.disk.folder import FULL, StoreFolder
from ingot.runtime.kv.disk.health import StoreHealth
from ingot.runtime.kv.disk.index import DiskPlace, ReplaceableSlot, StoreIndex
from ingot.runtime.kv.disk.journal import Journal, JournalNote
from ingot.runtime.kv.disk.segment import FREE, DiskSegment, Geometry, geometry_for

_SEGMENT_BYTES = 64 << 20
_LEAST_SEGMENTS = 16  # in a full folder, so that one which is deleted is a small share of it
_MOST_SEGMENTS = 256  # each needs a descriptor


class Space:
    """Segments of an open folder, of at most `max_bytes` with those of other processes and models.

    `allocate`, `shrink` and `load` are for one thread at a time, which the caller sees to; the rest is thread-safe.
    All raise OSError.
    """

    def __init__(self, folder: StoreFolder, index: StoreIndex, health: StoreHealth, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.num_evicted = 0
        self._folder, self._index, self._health = folder, index, health
        self._journal = _open_journal(folder)
        self._segment_bytes = max(min(_SEGMENT_BYTES, max_bytes // _LEAST_SEGMENTS), max_bytes // _MOST_SEGMENTS)
        self._listing = threading.Lock()

    def load(self) -> None:
        """Read the tables of all segments."""
        known = self._list()
        for segment in known:
            self._index.refresh(segment, segment.table())

    def shrink(self) -> None:
        """Delete the segments that were used least recently until the limit holds."""
        while self.used_bytes > self.max_bytes and (found := self._index.stalest()):
            self._delete(found[0])

    def look(self) -> None:
        """Take note of what other processes stored since the last look."""
        news = self._journal.news()
        if not news:
            return
        by_id = {segment.id: segment for segment in self._index.segments}
        if any(note.segment_id not in by_id for note in news):
            self._list()
            by_id = {segment.id: segment for segment in self._index.segments}
        for note in news:
            segment = by_id.get(note.segment_id)
            if segment is not None and note.slot < segment.num_slots:
                self._index.put(DiskPlace(segment, note.slot), segment.entry(note.slot))

    def announce(self, place: DiskPlace) -> None:
        """Let other processes find what was written to a slot."""
        self._journal.add(JournalNote(place.segment.id, place.slot))

    def allocate(self, slot_bytes: int) -> DiskPlace | None:
        """A free slot of this size, whose segment is locked until the caller unlocks it; None if it cannot be had."""
        for _ in range(2):
            place = self._take_free(slot_bytes) or self._take_new(slot_bytes) or self._take_oldest(slot_bytes)
            if place:
                return place
            self.load()
        return None

    def drop_removed(self, segment: DiskSegment) -> None:
        """Forget a segment that was deleted. Raises FileNotFoundError if the folder was, too."""
        self._index.drop(segment)
        self._folder.check()

    def close(self) -> None:
        """Close the journal, and the segments once no thread uses them."""
        self._index.clear()
        self._journal.close()

    def _take_free(self, slot_bytes: int) -> DiskPlace | None:
        busy: list[DiskPlace] = []
        try:
            while place := self._index.take_free(slot_bytes):
                if not place.segment.lock():
                    busy.append(place)
                elif self._claim(ReplaceableSlot(place, FREE)):
                    return place
            return None
        finally:
            for place in busy:
                self._index.release(place)

    def _take_oldest(self, slot_bytes: int) -> DiskPlace | None:
        place = self._pop_oldest(slot_bytes)
        if place:
            return place
        self._list()
        self.shrink()
        place = self._take_free(slot_bytes)  # of a segment that another process added
        if place:
            return place
        if self._displace(slot_bytes):
            return self._take_new(slot_bytes)
        self._index.sort(slot_bytes)
        return self._pop_oldest(slot_bytes)

    def _pop_oldest(self, slot_bytes: int) -> DiskPlace | None:
        while candidate := self._index.pop_oldest(slot_bytes):
            if not candidate.place.segment.lock():
                continue
            if self._claim(candidate):
                self.num_evicted += 1
                return candidate.place
            if place := self._take_free(slot_bytes):  # the one that it could not claim, as another process freed it
                return place
        return None

    def _claim(self, candidate: ReplaceableSlot) -> bool:
        """Free a slot of a locked segment if it holds what is expected and was not used since; else unlock it."""
        place, expected = candidate
        segment, slot = place
        claimed = False
        try:
            if segment.is_removed:
                self.drop_removed(segment)
                return False
            found = segment.entry(slot)
            claimed = found.key == expected.key and found.used_ns <= expected.used_ns
            if not claimed:
                self._index.put(place, found)  # another process was faster, or used the block
            elif found.key:
                segment.clear(slot)
                self._index.forget(place)
            return claimed
        finally:
            if not claimed:
                segment.unlock()

    def _take_new(self, slot_bytes: int) -> DiskPlace | None:
        """A slot of a new segment, if the limit and the disk have room."""
        if not self._health.can_grow or not self._room_for(slot_bytes):
            return None
        with self._folder.locked():
            self._list()
            geometry = self._room_for(slot_bytes)
            if geometry:
                self._add(geometry)
        return self._take_free(slot_bytes)

    def _room_for(self, slot_bytes: int) -> Geometry | None:
        """The largest segment that the limit has room for; None if it does not have room for one slot."""
        room = self.max_bytes - self.used_bytes
        geometry = geometry_for(slot_bytes, min(room, self._segment_bytes))
        return geometry if geometry.file_bytes <= room else None

    def _add(self, geometry: Geometry) -> None:
        """Make a segment; on a disk that is almost full, a smaller one or none."""
        while True:
            try:
                with self._listing:  # or another thread lists the new file, and opens it too
                    segment = self._folder.add_segment(geometry)
                    self._index.refresh(segment, [FREE] * segment.num_slots)
                    self.used_bytes += geometry.file_bytes
                return
            except OSError as error:
                if error.errno not in (*FULL, errno.EFBIG):  # this, where the process's files are limited
                    raise
                if geometry.num_slots == 1:
                    self._health.note_full()
                    return
                geometry = Geometry(geometry.slot_bytes, geometry.num_slots // 2)

    def _displace(self, slot_bytes: int) -> bool:
        """Delete segments of other slots, for one of these, if their blocks are less worth keeping."""
        is_displaced = False
        while not self._room_for(slot_bytes):
            stalest, oldest = self._index.stalest(except_for=slot_bytes), self._index.oldest_use(slot_bytes)
            if stalest is None or (oldest is not None and stalest[1] >= oldest):
                break
            self._delete(stalest[0])
            is_displaced = True
        return is_displaced

    def _delete(self, segment: DiskSegment) -> None:
        self.num_evicted += sum(entry.key is not None for entry in segment.table())
        self._folder.remove_segment(segment.name)
        self._index.drop(segment)
        self.used_bytes -= self._counted(segment.geometry, segment.num_bytes)

    def _list(self) -> list[DiskSegment]:
        """Open segments that were added, and forget those that were deleted; returns those that were known."""
        with self._listing:
            found = {(file.name, file.inode): file for file in self._folder.listing()}
            known = {(segment.name, segment.inode): segment for segment in self._index.segments}
            for gone in sorted(known.keys() - found.keys()):
                self._index.drop(known.pop(gone))
            for name, _ in sorted(found.keys() - known.keys()):
                self._open(name)
            for segment in self._index.segments:
                with suppress(OSError):  # as on a file system that is read-only by now
                    segment.trim()
            self.used_bytes = sum(self._counted(file.geometry, file.num_bytes) for file in found.values())
            return list(known.values())

    def _open(self, name: str) -> None:
        try:
            with suppress(FileNotFoundError):
                segment = self._folder.segment(name)
                if segment.geometry.file_bytes <= self.max_bytes:
                    with suppress(OSError):  # as on a full disk
                        segment.restore()
                self._index.refresh(segment, segment.table())
        except OSError as error:
            self._health.warn_once(
                "segment", "has a segment that cannot be opened (%s): it is not used", error.strerror
            )

    def _counted(self, geometry: Geometry, num_bytes: int) -> int:
        """Bytes of a segment that count towards the limit: all, also of one that was cut and gets its size again.

        One that is larger than the limit is from before this was lowered, or has a wrong name: it counts as it is.
        """
        return geometry.file_bytes if geometry.file_bytes <= self.max_bytes else num_bytes


def _open_journal(folder: StoreFolder) -> Journal:
    file = folder.journal()
    try:
        return Journal(file)
    except BaseException:
        os.close(file)
        raise
