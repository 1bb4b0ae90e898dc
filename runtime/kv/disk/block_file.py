"""The file of one KV block, or of the side state after one: a header with its key in full, then its bytes.

See docs/kv-files.md. The file of a state is that of a block without tokens (`keys.state_content`).

A file is read only if every field equals what the caller expects and the checksum over header and content matches, so
a damaged, renamed, foreign or planted file counts as damaged and never as a block.
"""

import os
import stat
import struct

import xxhash

from ingot.runtime.kv.keys import BlockContent

MAGIC = b"INGOT-KV"
VERSION = 1
SUFFIX = ".kv"

_KEY_BYTES = 32
_FIELDS = struct.Struct("<8sIIQ32s32s32s")  # magic, version, token bytes, content bytes, root, parent, hash
_CHECKSUM_BYTES = 16
_NAMES = ("magic", "format version", "size of the tokens", "size of the content", "root", "parent", "hash")


class DamagedBlock(Exception):
    """A file that is not the block of its name; the message says what differs."""


def file_name(key: bytes) -> str:
    """Name of the file of a block with this hash."""
    return key.hex() + SUFFIX


def key_of(name: str) -> bytes | None:
    """The hash that a file's name states; None if it is not a block's name."""
    if len(name) != 2 * _KEY_BYTES + len(SUFFIX) or not name.endswith(SUFFIX):
        return None
    try:
        key = bytes.fromhex(name[: -len(SUFFIX)])
    except ValueError:
        return None
    return key if file_name(key) == name else None


def file_bytes(token_bytes: int, content_bytes: int) -> int:
    """Size of a block's file."""
    return _FIELDS.size + _CHECKSUM_BYTES + token_bytes + content_bytes


def write_block(file: int, content: BlockContent, root: bytes, buffer: memoryview) -> None:
    """Write a block to an empty file. Raises OSError."""
    view = buffer.cast("B")
    fields = _pack(content, root, len(view))
    checksum = _checksum(fields, content.tokens, view)
    left = [memoryview(fields + checksum + content.tokens), view]
    while left:
        written = os.writev(file, left)
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]


def read_block(file: int, content: BlockContent, root: bytes, buffer: memoryview) -> None:
    """Read the block into the buffer, which has exactly its size; what the buffer holds after an error is undefined.

    Raises DamagedBlock if the file is anything but this block, OSError if it cannot be read.
    """
    view = buffer.cast("B")
    head = bytearray(_FIELDS.size + _CHECKSUM_BYTES + len(content.tokens))
    _check_size(file, len(head) + len(view))
    _read_exactly(file, memoryview(head), view)
    expected = _pack(content, root, len(view))
    fields, tokens = bytes(head[: len(expected)]), bytes(head[len(expected) + _CHECKSUM_BYTES :])
    if fields != expected:
        pairs = zip(_NAMES, _FIELDS.unpack(fields), _FIELDS.unpack(expected), strict=True)
        raise DamagedBlock("another " + next(name for name, found, wanted in pairs if found != wanted))
    if tokens != content.tokens:
        raise DamagedBlock("other tokens")
    if head[len(expected) : len(expected) + _CHECKSUM_BYTES] != _checksum(fields, tokens, view):
        raise DamagedBlock("a wrong checksum")


def scan_block(file: int, token_bytes: int, buffer: memoryview) -> None:
    """Do the work of `read_block` for a file of this size, whichever block it is: to measure how long it takes.

    Raises DamagedBlock if the file has another size, OSError if it cannot be read.
    """
    view = buffer.cast("B")
    head = bytearray(_FIELDS.size + _CHECKSUM_BYTES + token_bytes)
    _check_size(file, len(head) + len(view))
    _read_exactly(file, memoryview(head), view)
    _checksum(bytes(head[: _FIELDS.size]), bytes(head[_FIELDS.size + _CHECKSUM_BYTES :]), view)


def _pack(content: BlockContent, root: bytes, content_bytes: int) -> bytes:
    assert len(root) == len(content.parent) == len(content.hash) == _KEY_BYTES
    sizes = len(content.tokens), content_bytes
    return _FIELDS.pack(MAGIC, VERSION, *sizes, root, content.parent, content.hash)


def _checksum(fields: bytes, tokens: bytes, view: memoryview) -> bytes:
    digest = xxhash.xxh3_128(fields)
    digest.update(tokens)
    digest.update(view)
    return digest.digest()


def _check_size(file: int, wanted: int) -> None:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise DamagedBlock("not a regular file")
    if status.st_size != wanted:
        raise DamagedBlock(f"{status.st_size:,} bytes instead of {wanted:,}")


def _read_exactly(file: int, head: memoryview, view: memoryview) -> None:
    """Fill both; the file may be cut while it is read."""
    done, size = 0, len(head) + len(view)
    while done < size:
        into = [head[done:], view] if done < len(head) else [view[done - len(head) :]]
        count = os.preadv(file, into, done)
        if not count:
            raise DamagedBlock(f"cut after {done:,} of {size:,} bytes")
        done += count
