"""A slot's content: one KV block, or the side state after one, with its key in full before its bytes.

See docs/kv-files.md. A state is stored like a block without tokens (`keys.state_content`).

A slot is read only if every field equals what the caller expects and the checksum over header and content matches, so
a damaged, reused, misplaced, foreign or planted slot counts as damaged and never as the block.
"""

import os
import struct

import xxhash

from ingot.runtime.kv.keys import BlockContent

MAGIC = b"INGOT-KV"
VERSION = 2
PAGE = 4096  # a slot is a number of whole pages, so that writing one never reads half a page from the disk first

_KEY_BYTES = 32
_FIELDS = struct.Struct("<8sIIQ32s32s32s")  # magic, version, token bytes, content bytes, root, parent, hash
_CHECKSUM_BYTES = 16
_NAMES = ("magic", "format version", "size of the tokens", "size of the content", "root", "parent", "hash")
_NO_HEADER = bytes(_FIELDS.size + _CHECKSUM_BYTES)
_PADDING = bytes(PAGE)


class DamagedBlock(Exception):
    """A slot that does not hold the block; the message says what differs."""


def record_bytes(token_bytes: int, content_bytes: int) -> int:
    """Bytes of a block with its header."""
    return len(_NO_HEADER) + token_bytes + content_bytes


def slot_bytes(token_bytes: int, content_bytes: int) -> int:
    """Size of the slot that a block needs: a number of whole pages."""
    return -(-record_bytes(token_bytes, content_bytes) // PAGE) * PAGE


def write_slot(file: int, offset: int, content: BlockContent, root: bytes, buffer: memoryview) -> None:
    """Write a block to its slot, which starts at `offset`. Raises OSError."""
    view = buffer.cast("B")
    fields = _pack(content, root, len(view))
    head = b"".join((fields, _checksum(fields, content.tokens, view), content.tokens))
    size = len(head) + len(view)
    left = [memoryview(head), view, memoryview(_PADDING)[: -size % PAGE]]
    written = os.pwritev(file, left, offset)
    while written < sum(map(len, left)):  # a write that was cut short
        left = _after(left, written)
        offset += written
        written = os.pwritev(file, left, offset)


def read_slot(file: int, offset: int, content: BlockContent, root: bytes, buffer: memoryview) -> None:
    """Read the block into the buffer, which has exactly its size; what the buffer holds after an error is undefined.

    Raises DamagedBlock if the slot holds anything but this block, OSError if it cannot be read.
    """
    view = buffer.cast("B")
    head = bytearray(len(_NO_HEADER) + len(content.tokens))
    _read_exactly(file, offset, memoryview(head), view)
    expected = _pack(content, root, len(view))
    fields, tokens = bytes(head[: len(expected)]), bytes(head[len(_NO_HEADER) :])
    if fields != expected:
        pairs = zip(_NAMES, _FIELDS.unpack(fields), _FIELDS.unpack(expected), strict=True)
        raise DamagedBlock("another " + next(name for name, found, wanted in pairs if found != wanted))
    if tokens != content.tokens:
        raise DamagedBlock("other tokens")
    if head[len(expected) : len(_NO_HEADER)] != _checksum(fields, tokens, view):
        raise DamagedBlock("a wrong checksum")


def scan_slot(file: int, offset: int, token_bytes: int, buffer: memoryview) -> None:
    """Do the work of `read_slot` for a block of this size, whichever it is: to measure how long it takes.

    Raises DamagedBlock if the file ends before the block, OSError if it cannot be read.
    """
    view = buffer.cast("B")
    head = bytearray(len(_NO_HEADER) + token_bytes)
    _read_exactly(file, offset, memoryview(head), view)
    _checksum(bytes(head[: _FIELDS.size]), bytes(head[len(_NO_HEADER) :]), view)


def erase_slot(file: int, offset: int) -> None:
    """Overwrite a slot's header, so that no process serves the block any more. Raises OSError."""
    os.pwrite(file, _NO_HEADER, offset)


def _pack(content: BlockContent, root: bytes, content_bytes: int) -> bytes:
    assert len(root) == len(content.parent) == len(content.hash) == _KEY_BYTES
    sizes = len(content.tokens), content_bytes
    return _FIELDS.pack(MAGIC, VERSION, *sizes, root, content.parent, content.hash)


def _checksum(fields: bytes, tokens: bytes, view: memoryview) -> bytes:
    digest = xxhash.xxh3_128(fields)
    digest.update(tokens)
    digest.update(view)
    return digest.digest()


def _read_exactly(file: int, offset: int, head: memoryview, view: memoryview) -> None:
    """Fill both; the file may be cut while it is read."""
    done, left = 0, [head, view]
    size = len(head) + len(view)
    while done < size:
        count = os.preadv(file, left, offset + done)
        if not count:
            raise DamagedBlock(f"cut after {done:,} of {size:,} bytes")
        done += count
        if done < size:
            left = _after(left, count)


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the views after their first `count` bytes."""
    left = list(views)
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    return [left[0][count:], *left[1:]] if left else []
