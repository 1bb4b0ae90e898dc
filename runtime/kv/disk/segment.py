"""A segment: one file with a table of contents and slots of one size.

    ID-SLOTBYTES-NUMSLOTS.kvs       the name has the geometry, so that no damage inside the file moves a slot
    table                           64 bytes for each slot: the block's key, its last use; padded to whole pages
    slots                           one block each (`slot.py`)

The table is a hint: it says where to look, and what a slot holds is compared in full when it is read. A slot's entry is
cleared before the slot is overwritten and written after it, so a writer that is killed leaves a free slot. Writers lock
the file while they take a slot; correctness does not depend on it, because two blocks in one slot are damage, which the
checksum finds.
"""

import errno
import fcntl
import os
import re
import secrets
import struct
import time
from contextlib import suppress
from typing import NamedTuple

from ingot.runtime.kv.disk.slot import PAGE, erase_slot

KEY_BYTES = 32
ID_BYTES = 8
_ENTRY = struct.Struct("<32sq24x")  # key, time of last use in ns; no key: the slot is free
_STAMP = struct.Struct("<q")
_NOTHING = bytes(_ENTRY.size)
_NO_KEY = bytes(KEY_BYTES)
_AHEAD_NS = 3600 * 10**9  # a time of last use later than this is damage, or of a wrong clock, and counts as never
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_NAME = re.compile(r"([0-9a-f]{16})-([1-9][0-9]{3,14})-([1-9][0-9]{0,8})\.kvs")


class SegmentEntry(NamedTuple):
    """A line of a segment's table: the block in a slot (None: free) and when it was last used."""

    key: bytes | None
    used_ns: int


FREE = SegmentEntry(None, 0)


class Geometry(NamedTuple):
    """Sizes of a segment."""

    slot_bytes: int
    num_slots: int

    @property
    def table_bytes(self) -> int:
        """Size of the table, and offset of the first slot."""
        return -(-_ENTRY.size * self.num_slots // PAGE) * PAGE

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self.table_bytes + self.num_slots * self.slot_bytes


def geometry_for(slot_bytes: int, most_bytes: int) -> Geometry:
    """The largest segment within `most_bytes`, with at least one slot."""
    num_slots = max(1, (most_bytes - PAGE) // (slot_bytes + _ENTRY.size))
    while Geometry(slot_bytes, num_slots + 1).file_bytes <= most_bytes:  # the table's last page may have room
        num_slots += 1
    return Geometry(slot_bytes, num_slots)


def new_name(geometry: Geometry) -> str:
    """Name of a new segment."""
    return f"{secrets.token_hex(ID_BYTES)}-{geometry.slot_bytes}-{geometry.num_slots}.kvs"


def parse_name(name: str) -> tuple[bytes, Geometry] | None:
    """The ID and the geometry that a file's name states; None if it is not a segment's name."""
    found = _NAME.fullmatch(name)
    if not found or int(found[2]) % PAGE:
        return None
    return bytes.fromhex(found[1]), Geometry(int(found[2]), int(found[3]))


class DiskSegment:
    """An open segment. The descriptor is closed with the last reference, because threads may still be reading.

    `num_slots` counts the slots that are in the file: one that was cut has fewer than its name states.
    All methods raise OSError.
    """

    def __init__(self, name: str, file: int) -> None:
        """Takes over the descriptor `file`, of a segment with this name."""
        self.file = file
        parsed = parse_name(name)
        assert parsed
        self.name = name
        self.id, self.geometry = parsed
        self.inode = os.fstat(file).st_ino
        in_file = (self.num_bytes - self.geometry.table_bytes) // self.geometry.slot_bytes
        self.num_slots = max(0, min(self.geometry.num_slots, in_file))

    def __del__(self) -> None:
        os.close(self.file)

    @property
    def is_removed(self) -> bool:
        """Whether the file was deleted, by whichever process."""
        return os.fstat(self.file).st_nlink == 0

    @property
    def num_bytes(self) -> int:
        """Size of the file now."""
        return os.fstat(self.file).st_size

    def offset(self, slot: int) -> int:
        """Where a slot starts in the file."""
        return self.geometry.table_bytes + slot * self.geometry.slot_bytes

    def table(self) -> list[SegmentEntry]:
        """Entries of the table, by slot."""
        size = self.num_slots * _ENTRY.size
        data = os.pread(self.file, size, 0)
        return [_entry(key, used_ns) for key, used_ns in _ENTRY.iter_unpack(data.ljust(size, b"\0"))]

    def entry(self, slot: int) -> SegmentEntry:
        """What a slot holds now."""
        data = os.pread(self.file, _ENTRY.size, slot * _ENTRY.size)
        return _entry(*_ENTRY.unpack(data.ljust(_ENTRY.size, b"\0")))

    def publish(self, slot: int, entry: SegmentEntry) -> None:
        """Record that the slot holds a block, once it does."""
        assert entry.key
        os.pwrite(self.file, _ENTRY.pack(entry.key, entry.used_ns), slot * _ENTRY.size)

    def stamp(self, slot: int, used_ns: int) -> None:
        """Set the time of last use, by which all processes evict."""
        os.pwrite(self.file, _STAMP.pack(used_ns), slot * _ENTRY.size + KEY_BYTES)

    def clear(self, slot: int) -> None:
        """Record that the slot is free."""
        os.pwrite(self.file, _NOTHING, slot * _ENTRY.size)

    def erase(self, slot: int) -> None:
        """Free the slot, and make sure that a process which still looks for its block there does not find it."""
        self.clear(slot)
        erase_slot(self.file, self.offset(slot))

    def restore(self) -> None:
        """Give a file that was cut its size again.

        What it lost is zeros: free slots, or damage that is found when it is read.
        """
        if self.num_slots < self.geometry.num_slots:
            allocate(self.file, self.geometry.file_bytes)
            self.num_slots = self.geometry.num_slots

    def trim(self) -> None:
        """Remove what is after the last slot."""
        if self.num_bytes > self.geometry.file_bytes:
            os.ftruncate(self.file, self.geometry.file_bytes)

    def lock(self) -> bool:
        """Lock the file against other writers; False if another process, or store, has it. `unlock` ends it."""
        return try_lock(self.file) is not False  # a file system without locks does without

    def unlock(self) -> None:
        """Let other writers take slots."""
        with suppress(OSError):  # no locks, as when it was locked
            fcntl.flock(self.file, fcntl.LOCK_UN)


def allocate(file: int, num_bytes: int) -> None:
    """Give a file its size and, where the file system can, its space. Raises OSError."""
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise
        os.truncate(file, num_bytes)


def try_lock(file: int) -> bool | None:
    """Lock a file until it is closed: False if another process has it, None if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _entry(key: bytes, used_ns: int) -> SegmentEntry:
    if key == _NO_KEY:
        return FREE
    return SegmentEntry(key, used_ns if 0 <= used_ns < time.time_ns() + _AHEAD_NS else 0)
