"""A block's file is read only if it is that block, byte for byte; the layout is the documented one."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash

from ingot.runtime.kv.disk.block_file import DamagedBlock, file_bytes, file_name, key_of, read_block, write_block
from ingot.runtime.kv.keys import BlockContent, root_hash
from tests.runtime.kv.disk.stored_blocks import BLOCK_BYTES, FILE_BYTES, ROOT, bytes_of, content_of

CONTENT = content_of(3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a block."""
    path = tmp_path / "block"
    with path.open("wb") as file:
        write_block(file.fileno(), CONTENT, ROOT, bytes_of(CONTENT).data)
    return path


def read(path: Path, content: BlockContent = CONTENT, root: bytes = ROOT) -> bytes:
    buffer = bytearray(BLOCK_BYTES)
    with path.open("rb") as file:
        read_block(file.fileno(), content, root, memoryview(buffer))
    return bytes(buffer)


def test_what_was_written_is_read(path: Path) -> None:
    assert read(path) == bytes_of(CONTENT).tobytes()


def test_the_layout_is_that_of_the_documentation(path: Path) -> None:
    data = path.read_bytes()
    assert len(data) == FILE_BYTES == file_bytes(32, BLOCK_BYTES)
    magic, version, token_bytes, content_bytes = struct.unpack_from("<8sIIQ", data)
    assert (magic, version, token_bytes, content_bytes) == (b"INGOT-KV", 1, 32, BLOCK_BYTES)
    assert data[24:120] == ROOT + CONTENT.parent + CONTENT.hash
    assert data[120:136] == xxhash.xxh3_128_digest(data[:120] + data[136:])
    assert data[136:168] == CONTENT.tokens
    assert data[168:] == bytes_of(CONTENT).tobytes()


@pytest.mark.parametrize("offset", [*range(169), 1000, FILE_BYTES - 1])
def test_every_byte_is_covered(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(DamagedBlock):
        read(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], "4,263 bytes instead of 4,264"),
        (lambda data: data + b"x", "4,265 bytes instead of 4,264"),
        (lambda data: b"", "0 bytes instead of"),
        (lambda data: b"X" + data[1:], "another magic"),
        (lambda data: data[:8] + struct.pack("<I", 2) + data[12:], "another format version"),
        (lambda data: data[:16] + struct.pack("<Q", 4095) + data[24:], "another size of the content"),
        (lambda data: data[:136] + bytes(32) + data[168:], "other tokens"),
        (lambda data: data[:120] + bytes(16) + data[136:], "a wrong checksum"),
    ],
)
def test_the_error_says_what_differs(path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DamagedBlock, match=message):
        read(path)


def test_a_sound_file_of_another_key_is_refused_whatever_its_hash(path: Path) -> None:
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


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(DamagedBlock, match="not a regular file"):
            read_block(folder, CONTENT, ROOT, memoryview(bytearray(BLOCK_BYTES)))
    finally:
        os.close(folder)


def test_short_writes_and_reads_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = path.read_bytes()
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda file, views: writev(file, [views[0][:100]]))
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: preadv(file, [views[0][:100]], offset))
    with path.open("wb") as file:
        write_block(file.fileno(), CONTENT, ROOT, bytes_of(CONTENT).data)
    assert path.read_bytes() == whole
    assert read(path) == bytes_of(CONTENT).tobytes()


def test_a_file_that_is_cut_while_it_is_read_is_damaged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def cut(file: int, views: list[memoryview], offset: int) -> int:
        os.truncate(path, 1000)
        return preadv(file, views, offset)

    monkeypatch.setattr(os, "preadv", cut)
    with pytest.raises(DamagedBlock, match="cut after 1,000 of 4,264 bytes"):
        read(path)


def test_names_and_keys_match_one_to_one() -> None:
    assert key_of(file_name(CONTENT.hash)) == CONTENT.hash
    name = CONTENT.hash.hex()
    for bad in (
        "",
        name,
        name + ".KV",
        name.upper() + ".kv",
        name[:-1] + ".kv",
        "../" + name[3:] + ".kv",
        " " * 64 + ".kv",
    ):
        assert key_of(bad) is None


def test_content_of_several_dimensions_is_stored(tmp_path: Path) -> None:
    values = np.arange(BLOCK_BYTES // 4, dtype=np.float32).reshape(2, 2, -1)
    path = tmp_path / "block"
    with path.open("wb") as file:
        write_block(file.fileno(), CONTENT, ROOT, values.data)
    assert read(path) == values.tobytes()
