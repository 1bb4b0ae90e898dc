"""Blocks for the tests of the disk store, whose bytes are a function of their key."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ingot.runtime.kv.disk.segment import parse_name
from ingot.runtime.kv.disk.slot import slot_bytes
from ingot.runtime.kv.disk.store import BlockUnavailable, DiskStore
from ingot.runtime.kv.keys import BlockContent, block_hash, root_hash

ROOT = root_hash("an artifact", "float32")
BLOCK_BYTES = 4096
TOKENS = 4
SLOT_BYTES = slot_bytes(TOKENS * 8, BLOCK_BYTES)
_TABLE_BYTES = 4096  # of a segment of up to 64 slots


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


def room_for(num_blocks: int) -> int:
    """The limit at which exactly this many blocks fit: up to 16 in segments of one slot, else a multiple of 16."""
    assert num_blocks <= 16 or num_blocks % 16 == 0
    return num_blocks * SLOT_BYTES + min(num_blocks, 16) * _TABLE_BYTES


def open_store(folder: Path, *, num_blocks: int = 96, root: bytes = ROOT) -> DiskStore:
    """A store with room for `num_blocks`."""
    return DiskStore.open(folder, max_bytes=room_for(num_blocks), block_bytes=BLOCK_BYTES, root=root)


def put(store: DiskStore, *contents: BlockContent) -> None:
    """Store blocks; fails if one is not stored."""
    for content in contents:
        assert store.write(content, bytes_of(content))


def finds(store: DiskStore, content: BlockContent) -> bool:
    """Whether the store has a block, also one that another process stored meanwhile."""
    store.look()
    return store.contains(content.hash)


def has(store: DiskStore, content: BlockContent) -> bool:
    """Whether a block can be read; fails if it has other bytes than its own."""
    buffer = np.empty(BLOCK_BYTES, np.uint8)
    try:
        store.read_into(content, buffer)
    except BlockUnavailable:
        return False
    assert np.array_equal(buffer, bytes_of(content))
    return True


def segments_of(folder: Path) -> list[Path]:
    """The segments of a folder."""
    return sorted((folder / "segments").iterdir())


def folder_bytes(folder: Path) -> int:
    """Size of all segments."""
    return sum(path.stat().st_size for path in segments_of(folder))


def slot_of(folder: Path, content: BlockContent) -> tuple[Path, int] | None:
    """The segment and the offset of the slot whose header names a block, by a search through all slots."""
    for path in segments_of(folder):
        parsed = parse_name(path.name)
        assert parsed
        data, geometry = path.read_bytes(), parsed[1]
        for slot in range(geometry.num_slots):
            offset = geometry.table_bytes + slot * geometry.slot_bytes
            if data[offset + 88 : offset + 120] == content.hash:
                return path, offset
    return None


def damage(folder: Path, content: BlockContent, *, at: int = -1) -> None:
    """Change a byte of a stored block; by default the last one of its content."""
    found = slot_of(folder, content)
    assert found
    path, offset = found
    place = offset + (at if at >= 0 else 136 + len(content.tokens) + BLOCK_BYTES + at)
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))
