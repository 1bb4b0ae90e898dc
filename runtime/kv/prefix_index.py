"""The prefix index: finds a full, computed block of the pool by its key; see `keys`."""

from collections import defaultdict
from collections.abc import Collection, Iterator

from ingot.errors import EngineError
from ingot.runtime.kv.keys import BlockContent, Tree, block_hash


class PrefixIndex:
    """Maps keys to blocks and back. A hash collision raises EngineError; it never gives a wrong hit."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self.contents: dict[int, BlockContent] = {}
        self._tree_of: dict[int, Tree] = {}
        self._trees: defaultdict[bytes, set[int]] = defaultdict(set)  # blocks by the key of their tree's first one

    def __len__(self) -> int:
        return len(self._block_of)

    def __iter__(self) -> Iterator[int]:
        return iter(self.contents)

    def __contains__(self, block: int) -> bool:
        return block in self.contents

    @property
    def hashes(self) -> Collection[bytes]:
        """Keys of all blocks."""
        return self._block_of.keys()

    def content(self, block: int) -> BlockContent:
        """Content of an indexed block."""
        return self.contents[block]

    def tree(self, block: int) -> Tree:
        """The tree that an indexed block belongs to."""
        return self._tree_of[block]

    def block(self, key: bytes) -> int:
        """The indexed block with this key."""
        return self._block_of[key]

    def find(self, content: BlockContent) -> int | None:
        """Block with exactly this content, or None."""
        block = self._block_of.get(content.hash)
        if block is not None and self.contents[block] != content:
            raise EngineError(f"two contents have the block hash {content.hash.hex()}; turn off the prefix cache")
        return block

    def insert(self, block: int, content: BlockContent, tree: Tree) -> bool:
        """Add a full, computed block.

        False when another block with the same content is in the index already.
        """
        if self.find(content) is not None:
            return False
        self._block_of[content.hash] = block
        self.contents[block] = content
        self._tree_of[block] = tree
        self._trees[tree.first].add(block)
        return True

    def move(self, block: int, to: int) -> BlockContent:
        """Let another block have the content of an indexed one; returns the content."""
        content, tree = self.contents[block], self._tree_of[block]
        self.remove(block)
        self.insert(to, content, tree)
        return content

    def remove(self, block: int) -> BlockContent:
        """Remove a block and return its content."""
        content = self.contents.pop(block)
        del self._block_of[content.hash]
        first = self._tree_of.pop(block).first
        self._trees[first].remove(block)
        if not self._trees[first]:
            del self._trees[first]
        return content

    def remove_tree(self, first: bytes) -> dict[int, BlockContent]:
        """Remove all blocks of the tree whose first block has this key, and return them."""
        return {block: self.remove(block) for block in [*self._trees.get(first, ())]}

    def check(self) -> None:
        """Assert that both directions agree and that every key is that of its content."""
        assert {content.hash: block for block, content in self.contents.items()} == self._block_of
        assert self._tree_of.keys() == self.contents.keys()
        assert all(self._trees.values()), "an empty tree was kept"
        firsts = {block: first for first, blocks in self._trees.items() for block in blocks}
        assert firsts == {block: tree.first for block, tree in self._tree_of.items()}
        for content in self.contents.values():
            assert content.hash == block_hash(content.parent, content.tokens)
