"""Blocks by number, whose content is a function of their key, so that no wrong byte goes unnoticed."""

from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ingot.runtime.kv.disk.slot import slot_bytes
from ingot.runtime.kv.disk.store import DiskStore
from ingot.runtime.kv.keys import BlockContent, block_hash, root_hash

ROOT = root_hash("an artifact", "float32")
OTHER_ROOT = root_hash("another artifact of the same name", "float32")
BLOCK_BYTES = 64 << 10
TOKENS = 16
SLOT_BYTES = slot_bytes(TOKENS * 8, BLOCK_BYTES)

Bytes = NDArray[np.uint8]


def content_of(number: int, root: bytes = ROOT) -> BlockContent:
    """Key of block `number`: first of a chain if even, else it follows the block before it."""
    tokens = np.arange(number * TOKENS, (number + 1) * TOKENS, dtype=np.int64).tobytes()
    parent = content_of(number - 1, root).hash if number % 2 else root
    return BlockContent(block_hash(parent, tokens), parent, tokens)


@lru_cache(maxsize=64)
def bytes_of(content: BlockContent, size: int = BLOCK_BYTES) -> Bytes:
    """The bytes of a block, which depend on its whole key."""
    seed = int.from_bytes(sha256(b"bytes" + content.hash).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def open_store(folder: Path, *, num_blocks: int, root: bytes = ROOT) -> DiskStore:
    """A store that holds `num_blocks` blocks."""
    return DiskStore.open(folder, max_bytes=num_blocks * (SLOT_BYTES + 1024), block_bytes=BLOCK_BYTES, root=root)
