"""What a disk store holds, as far as this process has seen: sizes, times of last use, and which block goes next.

Numbers only; `StoreFolder` has the files. All methods are thread-safe, and none holds the lock for long: the engine's
step looks blocks up here.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable
from itertools import islice
from math import ceil

import numpy as np

from ingot.runtime.kv.disk.folder import StoredFile

_LISTING_SHARE = 32  # the folder is listed again after max_bytes / 32 were written; see `is_listing_due`
_SAMPLED = 10_000  # entries in which files of a size are looked for
_OLDEST_SHARE = 16  # 1 / 16 of a listing can be evicted before the next one
_LEAD_NS = 10**9  # by which the blocks before a used one are newer than it


class _Entry:
    """A block in the index. `parent` is empty until the block is read or written by this process."""

    __slots__ = ("num_bytes", "parent", "stamp")

    def __init__(self, num_bytes: int, stamp: int, parent: bytes) -> None:
        self.num_bytes = num_bytes
        self.stamp = stamp
        self.parent = parent


class StoreIndex:
    """Blocks by hash. `max_bytes` limits what is stored and what is about to be."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._used = 0
        self._reserved = 0
        self._written = 0  # bytes since the last listing
        self._oldest: deque[StoredFile] = deque()
        self._last_stamp = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    @property
    def used_bytes(self) -> int:
        """Bytes of all blocks."""
        return self._used

    def of_size(self, num_bytes: int, count: int) -> list[bytes]:
        """Keys of up to `count` files of this size, of whichever model, among the first that were listed."""
        with self._lock:
            first = islice(self._entries.items(), _SAMPLED)
            return list(islice((key for key, entry in first if entry.num_bytes == num_bytes), count))

    def add(self, file: StoredFile) -> None:
        """Note a file that was seen or written."""
        with self._lock:
            if file.key not in self._entries:
                self._entries[file.key] = _Entry(file.num_bytes, file.mtime_ns, b"")
                self._used += file.num_bytes

    def drop(self, key: bytes) -> None:
        """Forget a block whose file is gone."""
        with self._lock:
            entry = self._entries.pop(key, None)
            self._used -= entry.num_bytes if entry else 0

    def touch(self, key: bytes, parent: bytes) -> list[tuple[bytes, int]]:
        """Make a block the newest but for the blocks before it in its chain; returns the new times of last use.

        Without the blocks before it a block is worthless, so they must go after it. Ancestors are followed as far as
        they are known and older. They get a time a little ahead, so that a chain which is read or written block by
        block takes about two new times for each of its blocks, not one for each pair.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return []
            entry.parent = parent
            self._last_stamp = max(time.time_ns(), self._last_stamp + 1)
            entry.stamp = now = max(self._last_stamp, entry.stamp)
            older: list[tuple[bytes, _Entry]] = []
            before = self._entries.get(parent)
            while before and before.stamp <= now + len(older) + 1:
                older.append((parent, before))
                parent = before.parent
                before = self._entries.get(parent)
            first = before.stamp - 1 if before else now + _LEAD_NS + len(older)
            for depth, (_, ancestor) in enumerate(reversed(older)):
                ancestor.stamp = first - depth
            return [(key, now), *((each, ancestor.stamp) for each, ancestor in older)]

    def reserve(self, num_bytes: int) -> bool:
        """Take room for a file that is about to be written, if the limit allows it; `release` gives it back."""
        with self._lock:
            if self._used + self._reserved + num_bytes > self.max_bytes:
                return False
            self._reserved += num_bytes
            return True

    def release(self, num_bytes: int, *, written: bool) -> None:
        """Give back room, after a file was written (and added) or not."""
        with self._lock:
            self._reserved -= num_bytes
            self._written += num_bytes * written

    def pop_oldest(self) -> StoredFile | None:
        """The next block to evict, as it was listed; None when the folder must be listed first."""
        with self._lock:
            return self._oldest.popleft() if self._oldest else None

    def is_listing_due(self) -> bool:
        """Whether other processes may have filled the folder; the fuller it is, the more often it is listed.

        So N processes together exceed the limit by at most (N - 1) / 32 of it, until their next listing.
        """
        with self._lock:
            left = (self.max_bytes - self._used) // 4
            return self._written > max(left, self.max_bytes // _LISTING_SHARE)

    def replace(self, files: Iterable[StoredFile]) -> None:
        """Take the result of a listing. The files are read one by one without the lock."""
        listed, entries, used = [], {}, 0
        for file in files:
            known = self._entries.get(file.key)
            stamp = max(file.mtime_ns, known.stamp) if known else file.mtime_ns
            entries[file.key] = _Entry(file.num_bytes, stamp, known.parent if known else b"")
            listed.append(file)
            used += file.num_bytes
        excess = max(0, used - self.max_bytes) / max(1, used)
        oldest = _oldest(listed, ceil(len(listed) * min(1, excess + 1 / _OLDEST_SHARE)))
        with self._lock:
            self._entries, self._used, self._oldest, self._written = entries, used, oldest, 0


def _oldest(files: list[StoredFile], count: int) -> deque[StoredFile]:
    """The `count` least recently used files, oldest first. numpy selects them: it lets other threads run meanwhile."""
    if not count:
        return deque()
    times = np.fromiter((file.mtime_ns for file in files), np.int64, len(files))
    chosen = np.argpartition(times, count - 1)[:count]
    return deque(files[index] for index in chosen[np.argsort(times[chosen])])
