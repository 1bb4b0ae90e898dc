"""The KV pool of the CPU: bytes [blocks, block bytes], laid out as the geometry says, in one range of addresses.

A block holds all layers contiguously, so that moving it is one copy. The operating system allocates pages on their
first write: a large pool uses no memory until it is filled. A pool may have a slow part, whose blocks follow the fast
ones: a file, which is mapped after them, or more memory. Kernels read both alike, so where a block is changes no bit.

Within a block, a head's keys are stored by dim, [width, token], its values by token, [token, width], and their scales
as [scale, token] and [token, scale]: the kernel multiplies many tokens by one dim of the query, and many dims of a
value by one probability, and reads vectors both times.
"""

import math
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ingot.artifact import KVGeometry
from ingot.artifact.kv_geometry import KeyOrder
from ingot.errors import EngineError
from ingot.runtime.cpu.kv_precision import ELEMENT, KVCodes
from ingot.runtime.cpu.weight_pages import checked_address, libc
from ingot.runtime.slow_part import NO_SLOW_PART, SlowFile, SlowPart
from ingot.sizes import format_bytes, round_up

_PAGE_BYTES = mmap.PAGESIZE
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE
_FIXED = 0x10  # MAP_FIXED
_REMEDY = "ask for fewer blocks (kv_blocks or kv_bytes) or build for a shorter context"
_SLOW_REMEDY = "lower kv_offload, or kv_blocks or kv_bytes"


def physical_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class LayerViews(NamedTuple):
    """One layer of all blocks: codes [blocks, kv heads, token, width], scales [blocks, kv heads, token, scale].

    Views of the pool, of any strides. Scales are None for types without them.
    """

    keys: KVCodes
    values: KVCodes
    key_scales: NDArray[np.float16] | None
    value_scales: NDArray[np.float16] | None


class KVPool:
    """Memory for blocks of keys and values, zeroed, page-aligned: `num_fast` blocks, and those of the slow part.

    shared   the memory, where processes share it; with a slow part in memory, that too

    Raises EngineError when the machine has too little memory, or the disk too little space.
    """

    key_order: ClassVar[KeyOrder] = "by-dim"

    def __init__(
        self,
        geometry: KVGeometry,
        num_fast: int,
        slow: SlowPart = NO_SLOW_PART,
        shared: mmap.mmap | None = None,
    ) -> None:
        assert num_fast > 0
        self.geometry, self.num_fast = geometry, num_fast
        self.num_blocks = num_fast + slow.num_blocks
        self.slow_bytes_per_second = math.inf
        what = f"a KV pool of {self.num_blocks} blocks ({self.num_tokens} tokens)"
        self._is_in_memory = not slow.num_blocks or slow.folder is None
        if shared is not None:
            assert self._is_in_memory
            memory = shared
        elif slow.num_blocks and slow.folder is not None:
            memory = self._map_with_file(slow.folder, what)
        else:
            memory = map_zeros(self.num_bytes, what, _REMEDY if not slow.num_blocks else _SLOW_REMEDY)
        shape = self.num_blocks, geometry.block_bytes
        self.blocks: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)[: math.prod(shape)].reshape(shape)

    def _map_with_file(self, folder: Path, what: str) -> mmap.mmap:
        fast_bytes = round_up(self.num_fast * self.geometry.block_bytes, _PAGE_BYTES)
        file_bytes = round_up(max(1, self.num_bytes - fast_bytes), _PAGE_BYTES)
        refuse_more_than_memory(fast_bytes, what, _REMEDY)
        file = SlowFile(folder, file_bytes)
        try:
            memory = map_zeros(fast_bytes + file_bytes, what, _REMEDY, is_replaced=True)
            map_file(memory, fast_bytes, file.handle, file_bytes)
        except OSError as error:
            raise EngineError(f"{what}: its slow part cannot be mapped ({error}); {_SLOW_REMEDY}") from error
        finally:
            file.close()
        self.slow_bytes_per_second = file.bytes_per_second
        return memory

    def layer(self, index: int) -> "LayerViews":
        """Views of the keys and values that a layer reads, in all blocks."""
        layer, tokens = self.geometry.layers[index], self.geometry.block_tokens
        key, value = np.dtype(ELEMENT[layer.key_type]), np.dtype(ELEMENT[layer.value_type])

        def view(at: int, kind: np.dtype[Any], *shape: int) -> NDArray[Any]:
            size = layer.num_kv_heads * math.prod(shape) * kind.itemsize
            return self.blocks[:, at : at + size].view(kind).reshape(self.num_blocks, layer.num_kv_heads, *shape)

        half = np.dtype(np.float16)
        of_key, of_value = layer.scales_of_key, layer.scales_of_value
        return LayerViews(
            view(layer.keys, key, layer.key_bytes // key.itemsize, tokens).swapaxes(2, 3),
            view(layer.values, value, tokens, layer.value_bytes // value.itemsize),
            view(layer.key_scales, half, of_key, tokens).swapaxes(2, 3) if of_key else None,
            view(layer.value_scales, half, tokens, of_value) if of_value else None,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of address space; what is resident depends on the blocks written so far."""
        return self.num_blocks * self.geometry.block_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory: without a slow part that is in a file."""
        return self.num_bytes if self._is_in_memory else self.num_fast * self.geometry.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into the pool."""
        return self.num_blocks * self.geometry.block_tokens

    def copy_block(self, source: int, target: int) -> None:
        """Copy all layers of block `source` over block `target`."""
        self.blocks[target] = self.blocks[source]


def refuse_more_than_memory(num_bytes: int, what: str, remedy: str) -> None:
    """Raise EngineError for more than the memory: the system would grant the addresses, and kill the process later."""
    physical = physical_bytes()
    if num_bytes > physical:
        raise EngineError(
            f"{what} needs {format_bytes(num_bytes)}, and this machine has {format_bytes(physical)}; {remedy}"
        )


def map_zeros(num_bytes: int, what: str, remedy: str, *, is_replaced: bool = False) -> mmap.mmap:
    """Memory from the system, zeroed when it is first used. EngineError, which names it, for more than exists.

    is_replaced   part of the addresses get something else: they may be more than the memory
    """
    if not is_replaced:
        refuse_more_than_memory(num_bytes, what, remedy)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NO_RESERVE if is_replaced else 0)
    try:
        memory = mmap.mmap(-1, num_bytes, flags)
    except (OSError, ValueError, OverflowError) as error:
        needs = f"{what} needs {format_bytes(num_bytes)}"
        raise EngineError(f"{needs}, and the operating system refused it ({error}); {remedy}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: only a little slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def map_file(memory: mmap.mmap, start: int, handle: int, num_bytes: int) -> None:
    """Map a file in place of the pages of `memory` from `start` on. They are unmapped with it. OSError if refused."""
    address = np.frombuffer(memory, np.uint8).ctypes.data + start
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED
    checked_address(libc().mmap(address, num_bytes, protection, flags, handle, 0))
