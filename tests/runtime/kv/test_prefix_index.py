"""The prefix index: collisions, trees of chains."""

import pytest

from ingot.errors import EngineError
from ingot.runtime.kv.keys import BlockContent, Tree, block_hash
from ingot.runtime.kv.prefix_index import PrefixIndex


def content(parent: bytes, tokens: bytes) -> BlockContent:
    return BlockContent(block_hash(parent, tokens), parent, tokens)


def test_a_hash_collision_is_an_error() -> None:
    index = PrefixIndex()
    index.insert(0, BlockContent(b"same", b"root", b"one"), Tree(b"same", private=False))
    with pytest.raises(EngineError, match="two contents have the block hash"):
        index.find(BlockContent(b"same", b"root", b"two"))


def test_a_content_is_indexed_once() -> None:
    index, one = PrefixIndex(), content(b"root", b"one")
    assert index.insert(0, one, Tree(one.hash, private=False))
    assert not index.insert(1, one, Tree(one.hash, private=False))
    assert index.find(one) == 0
    assert 1 not in index


def test_a_tree_is_removed_as_a_whole_even_where_its_chains_are_incomplete() -> None:
    index = PrefixIndex()
    first, other = content(b"root", b"one"), content(b"root", b"two")
    second = content(first.hash, b"three")
    third = content(second.hash, b"four")
    for block, (each, start) in enumerate([(first, first), (third, first), (other, other)]):
        index.insert(block, each, Tree(start.hash, private=False))
    index.remove(0)
    index.check()
    assert index.remove_tree(first.hash) == {1: third}
    assert index.remove_tree(first.hash) == {}
    assert len(index) == 1
    index.check()
