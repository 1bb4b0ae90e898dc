"""KV blocks in host memory for the CPU engine: an arena of its own, filled and read by one thread.

The pool is host memory too, but the arena may be larger than what steps use, and a disk store reads and writes its
slots while steps change the pool. One thread copies: it takes no core from a step for long. Copies that wait together
are one call of the compiled library, without the interpreter's lock, which the engine's thread needs.
"""

import mmap
import threading
import time
from collections import deque
from collections.abc import Sequence
from ctypes import c_uint64, memmove

import numpy as np

from ingot.errors import EngineError
from ingot.runtime.cpu.kv_pool import KVPool, physical_bytes
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.cpu.state_pool import StatePool
from ingot.runtime.kv.transfers.transfer import Bytes, Cancelled, Workers
from ingot.sizes import format_bytes

_MOST_BYTES = 4 * 2**20  # that are copied in one call: none of its blocks is done before all are


class HostBlockCopy:
    """A copy of a block from one address to another. Implements `ingot.runtime.kv.transfers.transfer.Transfer`."""

    __slots__ = ("_has_begun", "done", "error", "seconds", "source", "target")
    _beginning = threading.Lock()  # held while copies are begun, or one is cancelled

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self._has_begun = self.done = False
        self.error: Exception | None = None
        self.seconds = 0.0

    def cancel(self) -> bool:
        """Drop it if the thread has not begun it."""
        with self._beginning:
            if self._has_begun:
                return False
            self._has_begun = True
        self.error = Cancelled("the copy was cancelled before it began")
        self.done = True
        return True

    @classmethod
    def begin(cls, copies: Sequence["HostBlockCopy"]) -> list["HostBlockCopy"]:
        """Those that were not cancelled, and cannot be any more."""
        with cls._beginning:
            begun = [copy for copy in copies if not copy._has_begun]
            for copy in begun:
                copy._has_begun = True
        return begun

    def end(self, seconds: float, error: Exception | None) -> None:
        """Record how it ended."""
        self.seconds, self.error = seconds, error
        self.done = True


class ArenaBlocks:
    """`num_slots` slots, each of the size of a block of the pool. Implements `kv.transfers.transfer.HostBlocks`.

    Of a pool of side states, a block is a slot.

    Raises EngineError when the machine has too little memory.
    """

    def __init__(self, pool: KVPool | StatePool, num_slots: int) -> None:
        assert num_slots > 0
        block_bytes = pool.blocks.shape[1]
        size = num_slots * block_bytes
        things = "KV blocks" if isinstance(pool, KVPool) else "side states"
        what = f"{num_slots} {things} in host memory need {format_bytes(size)}"
        if size + pool.num_bytes > physical_bytes():
            raise EngineError(
                f"{what}, next to a pool of {format_bytes(pool.num_bytes)}, and this machine has"
                f" {format_bytes(physical_bytes())}; give kv_host_bytes less, or keep blocks on disk (kv_disk_path)"
            )
        try:
            memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise EngineError(f"{what}, and the operating system refused it ({error}); lower kv_host_bytes") from error
        self.num_slots = num_slots
        self._pool = pool.blocks.view(np.uint8).reshape(pool.num_blocks, block_bytes)
        self._slots = np.frombuffer(memory, np.uint8).reshape(num_slots, block_bytes)
        self._pool_at: int = self._pool.ctypes.data
        self._slots_at: int = self._slots.ctypes.data
        self._block_bytes: int = block_bytes
        self._most_at_once = max(1, _MOST_BYTES // block_bytes)
        self._queue: deque[HostBlockCopy] = deque()
        self._is_called = False  # whether the thread will look at the queue
        self._workers = Workers("ingot-kv-copy", 1)

    def save(self, block: int, slot: int) -> HostBlockCopy:
        """Queue a copy of a block to a slot."""
        return self._submit(HostBlockCopy(self._block_at(block), self._slot_at(slot)))

    def restore(self, slot: int, block: int) -> HostBlockCopy:
        """Queue a copy of a slot to a block."""
        return self._submit(HostBlockCopy(self._slot_at(slot), self._block_at(block)))

    def view(self, slot: int) -> Bytes:
        """The slot's bytes [block_bytes], writable."""
        view: Bytes = self._slots[slot]
        return view

    @property
    def threads(self) -> Sequence[threading.Thread]:
        """The thread that copies."""
        return self._workers.threads

    def check(self) -> None:
        """Raise EngineError if the thread that copies has died."""
        self._workers.check()

    def close(self) -> None:
        """Copy what is queued, end the thread and free the memory. Idempotent."""
        self._workers.close()
        self._pool = self._slots = np.empty((0, 0), np.uint8)

    def _block_at(self, block: int) -> int:
        assert 0 <= block < len(self._pool)
        return self._pool_at + block * self._block_bytes

    def _slot_at(self, slot: int) -> int:
        assert 0 <= slot < self.num_slots
        return self._slots_at + slot * self._block_bytes

    def _submit(self, copy: HostBlockCopy) -> HostBlockCopy:
        self._queue.append(copy)
        if not self._is_called:
            self._is_called = True
            self._workers.submit(self._make_queued)
        return copy

    def _make_queued(self) -> None:
        self._is_called = False  # first: what is queued from now on calls again
        while self._queue:
            queued = [self._queue.popleft() for _ in range(min(len(self._queue), self._most_at_once))]
            copies = HostBlockCopy.begin(queued)
            started, error = time.perf_counter(), None
            try:
                copy_blocks([each.source for each in copies], [each.target for each in copies], self._block_bytes)
            except Exception as failure:  # noqa: BLE001 (the owner of each transfer handles it)
                error = failure
            seconds = (time.perf_counter() - started) / max(1, len(copies))
            for copy in copies:
                copy.end(seconds, error)


def copy_blocks(sources: Sequence[int], targets: Sequence[int], block_bytes: int) -> None:
    """Copy blocks between addresses without the interpreter's lock, in one call; in one for each without a library."""
    library = native_library()
    if library is not None:
        count = len(sources)
        array = c_uint64 * count
        library.copy_blocks(array(*sources), array(*targets), count, block_bytes)
        return
    for source, target in zip(sources, targets, strict=True):
        memmove(target, source, block_bytes)
