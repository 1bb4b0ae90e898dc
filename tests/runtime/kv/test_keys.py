"""Keys of blocks: everything that the bytes of a block depend on changes them, and nothing else does."""

from itertools import combinations

from ingot.runtime.kv.keys import block_hash, prefix_scope, root_hash

PARTS = {"identity": "a", "layout": "float32", "kernels": "1"}


def test_every_part_changes_the_root() -> None:
    roots = [root_hash(**PARTS), *(root_hash(**{**PARTS, name: f"{value}2"}) for name, value in PARTS.items())]
    assert len(set(roots)) == len(roots)
    assert root_hash(**PARTS) == roots[0]


def test_text_that_moves_from_one_part_to_the_next_changes_the_root() -> None:
    assert root_hash("ab", "c") != root_hash("a", "bc")
    assert prefix_scope(b"r", cache_salt="ab", adapter="c") != prefix_scope(b"r", cache_salt="a", adapter="bc")


def test_salt_and_adapter_change_the_scope_and_a_private_one_is_never_equal_to_another() -> None:
    scopes = [
        prefix_scope(b"root"),
        prefix_scope(b"other"),
        prefix_scope(b"root", cache_salt="x"),
        prefix_scope(b"root", adapter="x"),
        prefix_scope(b"root", cache_salt="x", adapter="x"),
        prefix_scope(b"root", shared=False),
        prefix_scope(b"root", shared=False),
    ]
    assert all(one != other for one, other in combinations(scopes, 2))
    assert [scope.private for scope in scopes] == [False] * 5 + [True] * 2


def test_a_block_key_depends_on_history_and_tokens() -> None:
    root = root_hash(**PARTS)
    assert len({block_hash(root, b"one"), block_hash(root, b"two"), block_hash(block_hash(root, b"one"), b"two")}) == 3


def test_a_salt_of_any_text_has_a_key() -> None:
    assert prefix_scope(b"root", cache_salt="\ud800") != prefix_scope(b"root", cache_salt="?")
