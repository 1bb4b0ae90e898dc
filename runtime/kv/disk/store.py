"""KV blocks in a folder: they survive restarts and crashes, and any number of processes share them.

A block is one file, named by its hash (`block_file.py`), which appears by a rename when it is whole. The size limit
holds over all processes' files; the least recently used one is removed first. The store is a cache: a file that cannot
be read, or is not exactly the block that the caller describes, is a miss, and trouble with the folder turns parts of
the store off, logged once (`store_health.py`). After `open`, nothing is raised for what the
folder holds or the system reports but BlockUnavailable by `read_into`.
"""

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingot.errors import EngineError, UsageError
from ingot.runtime.kv.disk.block_file import DamagedBlock, file_bytes, read_block, write_block
from ingot.runtime.kv.disk.folder import StoredFile, StoreFolder
from ingot.runtime.kv.disk.health import StoreHealth
from ingot.runtime.kv.disk.index import StoreIndex
from ingot.runtime.kv.disk.read_speed import MOST_FILES, ReadSpeed, measure_stored, measure_written
from ingot.runtime.kv.keys import BlockContent
from ingot.sizes import format_bytes

_TOKEN_BYTES = 8


Bytes = NDArray[np.uint8]


class BlockUnavailable(EngineError):
    """The store does not have the block, or cannot read it, or it is damaged."""


@dataclass(frozen=True)
class DiskStats:
    """Counts since the store was opened, and what the folder holds as far as this process has seen."""

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

    def __init__(self, folder: StoreFolder, *, max_bytes: int, root: bytes, durable: bool) -> None:
        self._folder = folder
        self._root = root
        self._durable = durable
        self._index = StoreIndex(max_bytes)
        self._health = StoreHealth(folder.path)
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._num_active = 0
        self._is_closed = False
        self._listing = threading.Lock()
        self._num_listings = 0
        self._counts: Counter[str] = Counter()
        self._read_seconds = 0.0
        self._write_seconds = 0.0

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], *, max_bytes: int, block_bytes: int, root: bytes, durable: bool = False
    ) -> "DiskStore":
        """Open a folder, or make it; its blocks count as stored from now on.

        max_bytes    limit of all files, those of other processes and models included
        block_bytes  size of a block, at least one of which must fit; side states have another size
        root         32 bytes that identify artifact, engine and KV format (`root_hash`)
        durable      flush every block to the disk before it appears. Otherwise a power failure, unlike the end of a
                     process, can leave damaged files; they are found by their checksum when they are read.

        Raises UsageError when the folder must not or cannot be used, or the limit is smaller than a block.
        """
        assert block_bytes > 0
        if max_bytes < block_bytes + file_bytes(_TOKEN_BYTES, 0):
            raise UsageError(
                f"a KV folder of {format_bytes(max_bytes)} cannot hold one block of {format_bytes(block_bytes)}; "
                "raise kv_disk_bytes, or leave out kv_disk_path to keep no blocks on disk"
            )
        opened = StoreFolder(folder)
        store = cls(opened, max_bytes=max_bytes, root=root, durable=durable)
        with store._operation("listing the folder"):
            opened.clean()
            store._list()
            store._make_room(0)
            store._compare_with_free_space()
        return store

    @property
    def failure(self) -> str | None:
        """Why the store is off: every block is a miss, and nothing is stored. None while it works."""
        return self._health.failure

    @property
    def stats(self) -> DiskStats:
        """Counts until now."""
        with self._lock:
            return DiskStats(
                num_blocks=len(self._index),
                num_bytes=self._index.used_bytes,
                read_seconds=self._read_seconds,
                write_seconds=self._write_seconds,
                **self._counts,
            )

    def __len__(self) -> int:
        return len(self._index)

    def contains(self, key: bytes) -> bool:
        """Whether the block was stored when last seen, by this process or another; reading it may still fail."""
        if key in self._index or not self._health.looks_for_others:
            return self._health.failure is None and key in self._index
        with self._operation("looking for a block") as works:
            return works and self._find(key)
        return False

    def read_into(self, content: BlockContent, buffer: Bytes) -> None:
        """Read exactly this block, or this side state, into a buffer of its size.

        Raises BlockUnavailable, after which the buffer's bytes are undefined. A file that is not this block is removed.
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
        if content.hash in self._index and self._touch(content):
            return True
        started, done = time.perf_counter(), False
        if self._health.can_write:
            with self._operation("storing a block") as works:
                done = works and self._write(content, buffer.data)
        self._count(writes=int(done), refused_writes=int(not done), bytes_written=buffer.nbytes * done)
        with self._lock:
            self._write_seconds += (time.perf_counter() - started) * done
        return done

    def measure(self, buffer: Bytes, block_tokens: int) -> ReadSpeed:
        """Measure how long reads take, in some 20 ms, with a buffer of a block's size; empty after an error."""
        token_bytes, speed = block_tokens * _TOKEN_BYTES, ReadSpeed()
        with self._operation("measuring reads") as works, suppress(DamagedBlock):
            stored = self._index.of_size(file_bytes(token_bytes, buffer.nbytes), MOST_FILES)
            if works and stored:
                speed = measure_stored(self._folder, stored, buffer, token_bytes)
            elif works and self._health.can_write:
                speed = measure_written(self._folder, buffer, token_bytes)
        return speed

    def remove(self, key: bytes) -> None:
        """Remove a block, such as one whose bytes may be wrong; no process serves it afterwards."""
        self._index.drop(key)
        with self._operation("removing a block") as works:
            if works:
                self._folder.remove(key)

    def close(self) -> None:
        """Wait for running calls, then close the folder; blocks stay. Later calls find and store nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._health.failure = self._health.failure or "the store is closed"
            self._idle.wait_for(lambda: self._num_active == 0)
        self._folder.close()

    def _read(self, content: BlockContent, buffer: memoryview) -> bool:
        judged = None
        try:
            with self._folder.reading(content.hash) as file:
                judged = os.fstat(file)
                read_block(file, content, self._root, buffer)
        except FileNotFoundError:
            self._index.drop(content.hash)
            return False
        except DamagedBlock as reason:
            self._remove_damaged(content.hash, judged, str(reason))
            return False
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            self._remove_damaged(content.hash, None, "a symbolic link")
            return False
        self._health.note_success()
        self._index.add(StoredFile(content.hash, judged.st_size, judged.st_mtime_ns))
        self._touch(content)
        return True

    def _write(self, content: BlockContent, buffer: memoryview) -> bool:
        size, done = file_bytes(len(content.tokens), buffer.nbytes), False
        if not self._make_room(size):
            return False
        try:
            with self._folder.adding(content.hash) as file:
                write_block(file, content, self._root, buffer)
                if self._durable:
                    os.fsync(file)
            self._index.add(StoredFile(content.hash, size, 0))
            done = True
        finally:
            self._index.release(size, written=done)
        self._health.note_success()
        self._touch(content)
        return True

    def _touch(self, content: BlockContent) -> bool:
        """Make the block and those before it the newest; False if its file is gone."""
        stamps = self._index.touch(content.hash, content.parent)
        with self._operation("marking a block as used") as works:
            for key, stamp in stamps if works else ():
                try:
                    self._folder.stamp(key, stamp)
                except FileNotFoundError:
                    self._index.drop(key)
        return self._health.failure is None and content.hash in self._index

    def _find(self, key: bytes) -> bool:
        started = time.perf_counter()
        found = self._folder.exists(key)
        self._health.note_look(time.perf_counter() - started)
        if found:
            self._index.add(found)
        return found is not None

    def _list(self) -> None:
        """Read which blocks are in the folder, unless another thread did so while this one waited."""
        listing = self._num_listings
        with self._listing:
            if self._num_listings == listing:
                self._index.replace(self._folder.listing())
                self._num_listings += 1

    def _make_room(self, size: int) -> bool:
        """Reserve `size` bytes, after removing the oldest blocks if necessary."""
        if self._index.is_listing_due():
            self._list()
        if self._evict_for(size):
            return True
        self._list()
        return self._evict_for(size)

    def _evict_for(self, size: int) -> bool:
        while not self._index.reserve(size):
            oldest = self._index.pop_oldest()
            if oldest is None:
                return False
            self._evict(oldest)
        return True

    def _evict(self, listed: StoredFile) -> None:
        """Remove a block, unless a process used it since the listing."""
        found = self._folder.exists(listed.key)
        if found and found.mtime_ns != listed.mtime_ns:
            return
        if found and self._folder.remove(listed.key):
            self._count(evictions=1)
        self._index.drop(listed.key)

    def _remove_damaged(self, key: bytes, judged: os.stat_result | None, reason: str) -> None:
        self._index.drop(key)
        self._count(damaged=1)
        self._health.warn_once("damaged", "holds a damaged block (%s): it was removed and is computed again", reason)
        self._folder.remove_damaged(key, judged)

    def _compare_with_free_space(self) -> None:
        room = self._folder.free_bytes + self._index.used_bytes
        if room < self._index.max_bytes:
            sizes = format_bytes(room), format_bytes(self._index.max_bytes)
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
        if key is not None and not maybe_sound:
            self._index.drop(key)

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)
