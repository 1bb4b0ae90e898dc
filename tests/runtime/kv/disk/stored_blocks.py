"""Blocks for the tests of the disk store, whose bytes are a function of their key."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ingot.runtime.kv.disk.block_file import file_bytes, file_name
from ingot.runtime.kv.disk.store import BlockUnavailable, DiskStore
from ingot.runtime.kv.keys import BlockContent, block_hash, root_hash

ROOT = root_hash("an artifact", "float32")
BLOCK_BYTES = 4096
TOKENS = 4
FILE_BYTES = file_bytes(TOKENS * 8, BLOCK_BYTES)


def content_of(number: int, parent: bytes = ROOT) -> BlockContent:
    """Key of a block with tokens of its own."""
    tokens = np.arange(number * TOKENS, (number + 1) * TOKENS, dtype=np.int64).tobytes()
    return BlockContent(block_hash(parent, tokens), parent, tokens)


def chain_of(length: int, first: int = 0) -> list[BlockContent]:
    """Keys of a prompt's blocks."""
    chain = [content_of(first)]
    while len(chain) < length:
        chain.append(content_of(first + len(chain), chain[-1].hash))
    return chain


def bytes_of(content: BlockContent) -> NDArray[np.uint8]:
    """The right bytes of a block."""
    seed = int.from_bytes(content.hash[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8)


def open_store(folder: Path, *, num_blocks: int = 100, root: bytes = ROOT) -> DiskStore:
    """A store with room for `num_blocks`."""
    return DiskStore.open(folder, max_bytes=num_blocks * FILE_BYTES, block_bytes=BLOCK_BYTES, root=root)


def put(store: DiskStore, *contents: BlockContent) -> None:
    """Store blocks; fails if one is not stored."""
    for content in contents:
        assert store.write(content, bytes_of(content))


def has(store: DiskStore, content: BlockContent) -> bool:
    """Whether a block can be read; fails if it has other bytes than its own."""
    buffer = np.empty(BLOCK_BYTES, np.uint8)
    try:
        store.read_into(content, buffer)
    except BlockUnavailable:
        return False
    assert np.array_equal(buffer, bytes_of(content))
    return True


def path_of(folder: Path, content: BlockContent) -> Path:
    """The file of a block."""
    name = file_name(content.hash)
    return folder / name[0] / name
