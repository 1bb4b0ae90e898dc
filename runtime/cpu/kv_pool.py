"""The KV pool of the CPU: one float32 array [blocks, layer, k|v, kv head, token, dim].

A block holds all layers contiguously, so that moving it is one copy. The operating system allocates pages on their
first write: a large pool uses no memory until it is filled.
"""

import mmap
import os
from contextlib import suppress

import numpy as np

from ingot.artifact import KVGeometry
from ingot.errors import EngineError
from ingot.runtime.steps.batch import FloatArray
from ingot.sizes import format_bytes

_REMEDY = "ask for fewer blocks (kv_blocks or kv_bytes) or build for a shorter context"


def physical_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class KVPool:
    """Memory for `num_blocks` blocks of keys and values, zeroed, page-aligned.

    Raises EngineError when the machine has too little memory.
    """

    def __init__(self, geometry: KVGeometry, num_blocks: int) -> None:
        assert num_blocks > 0
        self.geometry = geometry
        self.num_blocks = num_blocks
        _refuse_more_than_memory(self)
        memory = _map(self)
        self.blocks: FloatArray = np.frombuffer(memory, np.float32).reshape(num_blocks, *geometry.block_shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of address space; what is resident depends on the blocks written so far."""
        return self.num_blocks * self.geometry.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into the pool."""
        return self.num_blocks * self.geometry.block_tokens

    def copy_block(self, source: int, target: int) -> None:
        """Copy all layers of block `source` over block `target`."""
        self.blocks[target] = self.blocks[source]


def _map(pool: KVPool) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, pool.num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise EngineError(f"{_description(pool)}, and the operating system refused it ({error}); {_REMEDY}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: only a little slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _refuse_more_than_memory(pool: KVPool) -> None:
    """Raise EngineError: the system would grant more address space than memory, and kill the process later."""
    physical = physical_bytes()
    if pool.num_bytes > physical:
        raise EngineError(f"{_description(pool)}, and this machine has {format_bytes(physical)}; {_REMEDY}")


def _description(pool: KVPool) -> str:
    return f"a KV pool of {pool.num_blocks} blocks ({pool.num_tokens} tokens) needs {format_bytes(pool.num_bytes)}"
