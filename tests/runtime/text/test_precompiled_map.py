"""Maps of Precompiled normalizers: a small one that the package follows, and damage that is found before it does."""

import base64
import struct

import pytest
from tokenizers.normalizers import Precompiled

from ingot.runtime.text.precompiled_map import longest_replacement
from tests.each_case import each_case

LEAF, HAS_LEAF = 1 << 31, 1 << 8
OFFSET = 1 << 10  # the unit of an offset


def encoded(units: dict[int, int], replacements: bytes = b"xyz\0\xc3\xa9\0", size: int = 512) -> str:
    """A map: units by position, all others zero."""
    trie = struct.pack(f"<{size}I", *(units.get(position, 0) for position in range(size)))
    return base64.b64encode(struct.pack("<I", len(trie)) + trie + replacements).decode()


A = ord("a")
# The root is at 0 with offset 256; "a" is at 256 ^ 97, whose value is at that position with its offset.
ROOT, NODE = {0: 256 * OFFSET}, 256 ^ A
LETTER = {**ROOT, NODE: 1 * OFFSET | HAS_LEAF | A, NODE ^ 1: LEAF | 0}


def test_the_package_follows_a_map_and_the_longest_replacement_is_found() -> None:
    content = encoded(LETTER)
    assert longest_replacement(content) == 3
    assert Precompiled(base64.b64decode(content)).normalize_str("bab") == "bxyzb"


@each_case(
    ("content", "problem"),
    [
        ("no base64!", "it is not base64"),
        ("", "does not fit its 0 bytes"),
        ("AAAA", "does not fit its 3 bytes"),
        (
            base64.b64encode(struct.pack("<I", 1 << 30) + b"\0" * 64).decode(),
            "its trie of 1073741824 bytes does not fit",
        ),
        (base64.b64encode(struct.pack("<I", 6) + b"\0" * 64).decode(), "its trie of 6 bytes does not fit"),
        ("BAAAAP////9hAGIA", "an offset of its trie leaves the trie"),
        (encoded({0: 1 << 30}), "an offset of its trie leaves the trie"),
        (encoded({**LETTER, NODE ^ 1: LEAF | 99}), "a value of its trie leaves the replacements"),
        (encoded(LETTER, b"xyz"), "a value of its trie leaves the replacements"),
        (encoded({**LETTER, NODE ^ 1: LEAF | 5}), "a value of its trie is in the middle of a character"),
        (encoded(LETTER, b"x\xff\0"), "utf-8"),
    ],
    ids=lambda value: value[:30],
)
def test_a_damaged_map_is_refused(content: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        longest_replacement(content)
