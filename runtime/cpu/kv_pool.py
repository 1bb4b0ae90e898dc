"""The KV pool of the CPU: bytes [blocks, block bytes], laid out as the geometry says.

A block holds all layers contiguously, so that moving it is one copy. The operating system allocates pages on their
first write: a large pool uses no memory until it is filled.

Within a block, a head's keys are stored by dim, [width, token], its values by token, [token, width], and their scales
as [scale, token] and [token, scale]: the kernel multiplies many tokens by one dim of the query, and many dims of a
value by one probability, and reads vectors both times.
"""

import math
import mmap
import os
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ingot.artifact import KVGeometry
from ingot.artifact.kv_geometry import KeyOrder
from ingot.errors import EngineError
from ingot.runtime.cpu.kv_precision import ELEMENT, KVCodes
from ingot.sizes import format_bytes

_REMEDY = "ask for fewer blocks (kv_blocks or kv_bytes) or build for a shorter context"


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
    """Memory for `num_blocks` blocks of keys and values, zeroed, page-aligned.

    Raises EngineError when the machine has too little memory.
    """

    key_order: ClassVar[KeyOrder] = "by-dim"

    def __init__(self, geometry: KVGeometry, num_blocks: int) -> None:
        assert num_blocks > 0
        self.geometry = geometry
        self.num_blocks = num_blocks
        memory = map_zeros(self.num_bytes, f"a KV pool of {num_blocks} blocks ({self.num_tokens} tokens)", _REMEDY)
        self.blocks: NDArray[np.uint8] = np.frombuffer(memory, np.uint8).reshape(num_blocks, geometry.block_bytes)

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
    def num_tokens(self) -> int:
        """Tokens that fit into the pool."""
        return self.num_blocks * self.geometry.block_tokens

    def copy_block(self, source: int, target: int) -> None:
        """Copy all layers of block `source` over block `target`."""
        self.blocks[target] = self.blocks[source]


def map_zeros(num_bytes: int, what: str, remedy: str) -> mmap.mmap:
    """Memory from the system, zeroed when it is first used. EngineError, which names it, for more than there is."""
    needs, physical = f"{what} needs {format_bytes(num_bytes)}", physical_bytes()
    if num_bytes > physical:  # the system would grant the address space, and kill the process later
        raise EngineError(f"{needs}, and this machine has {format_bytes(physical)}; {remedy}")
    try:
        memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise EngineError(f"{needs}, and the operating system refused it ({error}); {remedy}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: only a little slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
