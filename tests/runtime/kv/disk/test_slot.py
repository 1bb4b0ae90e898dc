"""A slot is read only if it holds that block, byte for byte; the layout is the documented one."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash

from ingot.runtime.kv.disk.slot import DamagedBlock, erase_slot, read_slot, record_bytes, slot_bytes, write_slot
from ingot.runtime.kv.keys import BlockContent, root_hash
from tests.each_case import each_case
from tests.runtime.kv.disk.stored_blocks import BLOCK_BYTES, ROOT, SLOT_BYTES, bytes_of, content_of

CONTENT = content_of(3)
OFFSET = 4096
RECORD_BYTES = record_bytes(32, BLOCK_BYTES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with the block in its second page and the next, between other bytes."""
    path = tmp_path / "segment"
    path.write_bytes(b"x" * (OFFSET + SLOT_BYTES + 100))
    with path.open("r+b") as file:
        write_slot(file.fileno(), OFFSET, CONTENT, ROOT, bytes_of(CONTENT).data)
    return path


def read(path: Path, content: BlockContent = CONTENT, root: bytes = ROOT) -> bytes:
    buffer = bytearray(BLOCK_BYTES)
    with path.open("rb") as file:
        read_slot(file.fileno(), OFFSET, content, root, memoryview(buffer))
    return bytes(buffer)


def test_what_was_written_is_read(path: Path) -> None:
    assert read(path) == bytes_of(CONTENT).tobytes()


def test_the_layout_is_that_of_the_documentation(path: Path) -> None:
    whole = path.read_bytes()
    data = whole[OFFSET : OFFSET + SLOT_BYTES]
    assert RECORD_BYTES == 136 + 32 + BLOCK_BYTES
    magic, version, token_bytes, content_bytes = struct.unpack_from("<8sIIQ", data)
    assert (magic, version, token_bytes, content_bytes) == (b"INGOT-KV", 2, 32, BLOCK_BYTES)
    assert data[24:120] == ROOT + CONTENT.parent + CONTENT.hash
    assert data[120:136] == xxhash.xxh3_128_digest(data[:120] + data[136:RECORD_BYTES])
    assert data[136:168] == CONTENT.tokens
    assert data[168:RECORD_BYTES] == bytes_of(CONTENT).tobytes()
    assert data[RECORD_BYTES:] == bytes(SLOT_BYTES - RECORD_BYTES), "the rest of the last page is zeros"
    assert whole[:OFFSET] == b"x" * OFFSET
    assert whole[OFFSET + SLOT_BYTES :] == b"x" * 100, "nothing outside of the slot is written"


@pytest.mark.parametrize(("tokens", "content", "expected"), [(0, 1, 4096), (0, 3960, 4096), (0, 3961, 8192)])
def test_a_slot_is_whole_pages(tokens: int, content: int, expected: int) -> None:
    assert slot_bytes(tokens, content) == expected


@each_case("offset", [*range(169), 1000, RECORD_BYTES - 1])
def test_every_byte_is_covered(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[OFFSET + offset] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(DamagedBlock):
        read(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[: RECORD_BYTES - 1], "cut after 4,263 of 4,264 bytes"),
        (lambda data: b"", "cut after 0 of 4,264 bytes"),
        (lambda data: b"X" + data[1:], "another magic"),
        (lambda data: data[:8] + struct.pack("<I", 1) + data[12:], "another format version"),
        (lambda data: data[:16] + struct.pack("<Q", 4095) + data[24:], "another size of the content"),
        (lambda data: data[:136] + bytes(32) + data[168:], "other tokens"),
        (lambda data: data[:120] + bytes(16) + data[136:], "a wrong checksum"),
    ],
)
def test_the_error_says_what_differs(path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:OFFSET] + change(data[OFFSET : OFFSET + SLOT_BYTES]))
    with pytest.raises(DamagedBlock, match=message):
        read(path)


def test_a_sound_slot_of_another_key_is_refused_whatever_its_hash(path: Path) -> None:
    other = content_of(4)
    cases = [
        (other, ROOT, "another hash"),
        (CONTENT._replace(tokens=other.tokens), ROOT, "other tokens"),
        (CONTENT._replace(parent=other.hash), ROOT, "another parent"),
        (CONTENT, root_hash("another artifact", "float32"), "another root"),
    ]
    for content, root, message in cases:
        with pytest.raises(DamagedBlock, match=message):
            read(path, content, root)


def test_an_erased_slot_is_not_read(path: Path) -> None:
    with path.open("r+b") as file:
        erase_slot(file.fileno(), OFFSET)
    with pytest.raises(DamagedBlock, match="another magic"):
        read(path)


def test_short_writes_and_reads_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = path.read_bytes()
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda file, views, offset: pwritev(file, [views[0][:100]], offset))
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: preadv(file, [views[0][:100]], offset))
    path.write_bytes(b"x" * len(whole))
    with path.open("r+b") as file:
        write_slot(file.fileno(), OFFSET, CONTENT, ROOT, bytes_of(CONTENT).data)
    assert path.read_bytes() == whole
    assert read(path) == bytes_of(CONTENT).tobytes()


def test_a_file_that_is_cut_while_it_is_read_is_damaged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def cut(file: int, views: list[memoryview], offset: int) -> int:
        os.truncate(path, OFFSET + 1000)
        return preadv(file, views, offset)

    monkeypatch.setattr(os, "preadv", cut)
    with pytest.raises(DamagedBlock, match="cut after 1,000 of 4,264 bytes"):
        read(path)


def test_content_of_several_dimensions_is_stored(path: Path) -> None:
    values = np.arange(BLOCK_BYTES // 4, dtype=np.float32).reshape(2, 2, -1)
    with path.open("r+b") as file:
        write_slot(file.fileno(), OFFSET, CONTENT, ROOT, values.data)
    assert read(path) == values.tobytes()
