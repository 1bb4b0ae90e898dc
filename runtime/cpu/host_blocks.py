"""KV blocks in host memory for the CPU engine: an arena of its own, filled and read by one thread.

The pool is host memory too, but the arena may be larger than what steps use, and a disk store reads and writes its
slots while steps change the pool. One thread copies: it takes no core from a step for long, and numpy releases the
interpreter's lock while it does.
"""

import mmap
from functools import partial

import numpy as np

from ingot.errors import EngineError
from ingot.runtime.cpu.kv_pool import KVPool, physical_bytes
from ingot.runtime.cpu.state_pool import StatePool
from ingot.runtime.kv.transfers import Bytes, Task, Workers
from ingot.sizes import format_bytes


class ArenaBlocks:
    """`num_slots` slots, each of the size of a block of the pool. Implements `ingot.runtime.kv.transfers.HostBlocks`.

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
        self._workers = Workers("ingot-kv-copy", 1)

    def save(self, block: int, slot: int) -> Task:
        """Queue a copy of a block to a slot."""
        return self._workers.submit(partial(np.copyto, self._slots[slot], self._pool[block]))

    def restore(self, slot: int, block: int) -> Task:
        """Queue a copy of a slot to a block."""
        return self._workers.submit(partial(np.copyto, self._pool[block], self._slots[slot]))

    def view(self, slot: int) -> Bytes:
        """The slot's bytes [block_bytes], writable."""
        view: Bytes = self._slots[slot]
        return view

    def check(self) -> None:
        """Raise EngineError if the thread that copies has died."""
        self._workers.check()

    def close(self) -> None:
        """Copy what is queued, end the thread and free the memory. Idempotent."""
        self._workers.close()
        self._pool = self._slots = np.empty((0, 0), np.uint8)
