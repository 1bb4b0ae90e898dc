"""KV blocks in host memory for the CPU engine: an arena of its own, filled and read by one thread.

The pool is host memory too, but the arena may be larger than what steps use, and a disk store reads and writes its
slots while steps change the pool. One thread copies: it takes no core from a step for long. Copies that wait together
are one call of the compiled library, without the interpreter's lock, which the engine's thread needs.
"""

import math
import mmap
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from ctypes import c_uint64, memmove
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.kv_geometry import BlockRun
from ingot.errors import EngineError
from ingot.runtime.cpu.kv_pool import KVPool, physical_bytes
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.cpu.state_pool import StatePool
from ingot.runtime.kv.transfers.transfer import Bytes, Cancelled, Workers
from ingot.sizes import format_bytes

_MOST_BYTES = 4 * 2**20  # the most of one call, which ends all its blocks at once


class PoolPart(NamedTuple):
    """A device's part of a pool: its blocks, uint8 [blocks, bytes], and where their bytes are in a whole block.

    memory_bytes            bytes of memory: without a slow part that is in a file
    slow_bytes_per_second   of its slow part; infinite without
    """

    blocks: NDArray[np.uint8]
    runs: tuple[BlockRun, ...]
    memory_bytes: int
    slow_bytes_per_second: float = math.inf


class DividedPool:
    """A pool of KV blocks, or of side states, that is divided among devices: part i of a block is on device i.

    things        name of its blocks in messages
    block_bytes   of a whole block
    """

    def __init__(self, things: str, parts: Sequence[PoolPart], block_bytes: int) -> None:
        self.things, self.parts, self.block_bytes = things, tuple(parts), block_bytes
        self.num_blocks = len(self.parts[0].blocks)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory: without slow parts that are in files."""
        return sum(part.memory_bytes for part in self.parts)

    @property
    def slow_bytes_per_second(self) -> float:
        """Bytes of whole blocks a second that are read from slow parts, one part after the other."""
        shares = [part.blocks.shape[1] / self.block_bytes / part.slow_bytes_per_second for part in self.parts]
        return 1 / sum(shares) if sum(shares) else math.inf

    def copy(self, source: int, target: int) -> None:
        """Copy all parts of block `source` over block `target`."""
        for part in self.parts:
            part.blocks[target] = part.blocks[source]

    copy_block = copy


class HostBlockCopy:
    """A copy of a block, run by run. Implements `ingot.runtime.kv.transfers.transfer.Transfer`.

    moves   source address, target address and bytes of each run
    """

    __slots__ = ("_has_begun", "done", "error", "moves", "seconds")
    _beginning = threading.Lock()  # held while copies are begun, or one is cancelled

    def __init__(self, moves: Sequence[tuple[int, int, int]]) -> None:
        self.moves = moves
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

    Of a pool of side states, a block is a slot. A slot has the layout of a whole block, however the pool is divided.

    slots   memory of the caller for them, [num_slots, block bytes]; None: of its own

    Raises EngineError when the machine has too little memory.
    """

    def __init__(
        self, pool: KVPool | StatePool | DividedPool, num_slots: int, slots: NDArray[np.uint8] | None = None
    ) -> None:
        assert num_slots > 0
        pool = pool if isinstance(pool, DividedPool) else _undivided(pool)
        self.num_slots = num_slots
        self._pool: DividedPool | None = pool
        self._slots = _allocate(pool, num_slots) if slots is None else slots
        self._slots_at: int = self._slots.ctypes.data
        self._block_bytes: int = pool.block_bytes
        self._most_at_once = max(1, _MOST_BYTES // pool.block_bytes)
        self._queue: deque[HostBlockCopy] = deque()
        self._is_called = False  # whether the thread will look at the queue
        self._workers = Workers("ingot-kv-copy", 1)

    def save(self, block: int, slot: int) -> HostBlockCopy:
        """Queue a copy of a block to a slot."""
        return self._submit(HostBlockCopy(list(self._runs(block, slot))))

    def restore(self, slot: int, block: int) -> HostBlockCopy:
        """Queue a copy of a slot to a block."""
        return self._submit(HostBlockCopy([(at, to, size) for to, at, size in self._runs(block, slot)]))

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
        self._pool, self._slots = None, np.empty((0, 0), np.uint8)

    def _runs(self, block: int, slot: int) -> Iterator[tuple[int, int, int]]:
        """The runs of a block: address in the pool, address in the slot, bytes."""
        assert self._pool is not None
        assert 0 <= block < self._pool.num_blocks
        assert 0 <= slot < self.num_slots
        slot_at = self._slots_at + slot * self._block_bytes
        for part in self._pool.parts:
            block_at = int(part.blocks.ctypes.data) + block * part.blocks.shape[1]
            for run in part.runs:
                yield block_at + run.part, slot_at + run.whole, run.bytes

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
            moves: dict[int, list[tuple[int, int]]] = {}  # bytes -> addresses of runs of that size
            for source, target, size in (move for copy in copies for move in copy.moves):
                moves.setdefault(size, []).append((source, target))
            started, error = time.perf_counter(), None
            try:
                for size, pairs in moves.items():
                    copy_blocks([source for source, _ in pairs], [target for _, target in pairs], size)
            except Exception as failure:  # noqa: BLE001 (the owner of each transfer handles it)
                error = failure
            seconds = (time.perf_counter() - started) / max(1, len(copies))
            for copy in copies:
                copy.end(seconds, error)


def _allocate(pool: DividedPool, num_slots: int) -> NDArray[np.uint8]:
    """Memory for slots [slots, block bytes], zeroed when it is first used."""
    size = num_slots * pool.block_bytes
    what = f"{num_slots} {pool.things} in host memory need {format_bytes(size)}"
    if size + pool.memory_bytes > physical_bytes():
        raise EngineError(
            f"{what}, next to a pool of {format_bytes(pool.memory_bytes)}, and this machine has"
            f" {format_bytes(physical_bytes())}; give kv_host_bytes less, or keep blocks on disk (kv_disk_path)"
        )
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise EngineError(f"{what}, and the operating system refused it ({error}); lower kv_host_bytes") from error
    return np.frombuffer(memory, np.uint8).reshape(num_slots, pool.block_bytes)


def _undivided(pool: KVPool | StatePool) -> DividedPool:
    whole = BlockRun(0, 0, pool.blocks.shape[1])
    things = "KV blocks" if isinstance(pool, KVPool) else "side states"
    return DividedPool(things, [PoolPart(pool.blocks, (whole,), pool.memory_bytes)], whole.bytes)


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
