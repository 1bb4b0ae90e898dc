"""Which block holds which tokens: an index of full, computed blocks by the hash of everything that made them.

A block's hash is SHA-256 over its parent's hash and its own tokens; the first parent is the root, which names the
artifact and the KV format. Equal hashes so mean equal model, equal precision and equal history back to token 0.
"""

from hashlib import sha256
from typing import NamedTuple

from ingot.errors import EngineError


class BlockContent(NamedTuple):
    """What a cached block holds: `tokens` are its int64 tokens as bytes."""

    hash: bytes
    parent: bytes
    tokens: bytes


def root_hash(identity: str, kv_format: str) -> bytes:
    """Hash from which every chain of one artifact and one KV format starts."""
    return sha256(f"ingot kv\0{identity}\0{kv_format}".encode()).digest()


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """Hash of a block: 32 bytes. The parent's length is fixed, so the two parts cannot be confused."""
    return sha256(parent + tokens).digest()


class PrefixIndex:
    """hash -> block, and back. A hash stands for one content only: a collision is an error, never a wrong hit."""

    def __init__(self, root: bytes) -> None:
        self.root = root
        self._block_of: dict[bytes, int] = {}
        self._content_of: dict[int, BlockContent] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return block in self._content_of

    def content(self, block: int) -> BlockContent:
        """What an indexed block holds."""
        return self._content_of[block]

    def find(self, content: BlockContent) -> int | None:
        """Block with exactly this content, or None."""
        block = self._block_of.get(content.hash)
        if block is not None and self._content_of[block] != content:
            raise EngineError(f"two contents have the block hash {content.hash.hex()}; turn the prefix cache off")
        return block

    def insert(self, block: int, content: BlockContent) -> None:
        """Enter a full, computed block. A second block of equal content stays outside: the first one serves."""
        if self.find(content) is None:
            self._block_of[content.hash] = block
            self._content_of[block] = content

    def remove(self, block: int) -> BlockContent:
        """Take a block out and return what it held."""
        content = self._content_of.pop(block)
        del self._block_of[content.hash]
        return content

    def check(self) -> None:
        """Assert that both directions agree and that every hash is the hash of its content."""
        assert {self._content_of[block].hash: block for block in self._content_of} == self._block_of
        for content in self._content_of.values():
            assert content.hash == block_hash(content.parent, content.tokens)
