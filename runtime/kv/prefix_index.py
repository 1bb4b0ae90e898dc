"""The prefix index: finds a full, computed block by the hash of its tokens and of all tokens before it.

The hash is SHA-256 over the parent's hash and the block's own tokens. The first parent is the root, which identifies
the artifact and the KV format. So equal hashes mean equal model, equal precision and equal history back to token 0.
"""

from collections import defaultdict
from hashlib import sha256
from typing import NamedTuple

from ingot.errors import EngineError


class BlockContent(NamedTuple):
    """Content of a cached block: `tokens` are its int64 tokens as bytes."""

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
    """Maps hashes to blocks and back. A hash collision raises EngineError; it never gives a wrong hit."""

    def __init__(self, root: bytes) -> None:
        self.root = root
        self._block_of: dict[bytes, int] = {}
        self._content_of: dict[int, BlockContent] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return block in self._content_of

    def content(self, block: int) -> BlockContent:
        """Content of an indexed block."""
        return self._content_of[block]

    def find(self, content: BlockContent) -> int | None:
        """Block with exactly this content, or None."""
        block = self._block_of.get(content.hash)
        if block is not None and self._content_of[block] != content:
            raise EngineError(f"two contents have the block hash {content.hash.hex()}; turn off the prefix cache")
        return block

    def insert(self, block: int, content: BlockContent) -> None:
        """Add a full, computed block, unless another block with the same content is in the index already."""
        if self.find(content) is None:
            self._block_of[content.hash] = block
            self._content_of[block] = content

    def remove(self, block: int) -> BlockContent:
        """Remove a block and return its content."""
        content = self._content_of.pop(block)
        del self._block_of[content.hash]
        return content

    def remove_tree(self, first: bytes) -> set[int]:
        """Remove the block with the hash `first` and all chains that may contain it; returns the removed blocks.

        What remains has its whole chain in the index. Reads all of the index.
        """
        following = defaultdict(list)
        for block, content in self._content_of.items():
            following[content.parent].append((block, content.hash))
        kept: set[int] = set()
        left = [self.root]
        while left:
            children = [child for child in following[left.pop()] if child[1] != first]
            kept.update(block for block, _ in children)
            left += [found for _, found in children]
        removed = self._content_of.keys() - kept
        for block in removed:
            self.remove(block)
        return removed

    def check(self) -> None:
        """Assert that both directions agree and that every hash is the hash of its content."""
        assert {self._content_of[block].hash: block for block in self._content_of} == self._block_of
        for content in self._content_of.values():
            assert content.hash == block_hash(content.parent, content.tokens)
