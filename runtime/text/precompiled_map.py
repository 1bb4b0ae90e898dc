"""The normalization map of a `Precompiled` normalizer, checked before the tokenizers package walks it.

The map is SentencePiece's: the size of a double-array trie (as in darts-clone), the trie's units of 4 bytes, and then
replacements, each ended by a zero byte. The package follows the trie's offsets unchecked, so an offset that leaves it
ends in a panic in the middle of a text.
"""

import base64
import binascii

import numpy as np

_LEAF = np.uint32(1 << 31)  # a unit that holds a value: where a replacement begins
_HAS_LEAF = np.uint32(1 << 8)
_WIDE = np.uint32(1 << 9)  # the offset is in units of 256


def longest_replacement(encoded: str) -> int:
    """Characters of the longest replacement. Raises ValueError, with the problem, for a map that is damaged."""
    try:
        content = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"it is not base64 ({error})") from None
    size = int.from_bytes(content[:4], "little")
    if len(content) < 8 or size % 4 or not 4 <= size <= len(content) - 4:
        raise ValueError(f"its trie of {size} bytes does not fit its {len(content)} bytes")
    replacements = content[4 + size :]
    _check_trie(np.frombuffer(content, np.dtype("<u4"), size // 4, 4), replacements)
    return max(map(len, replacements.decode().split("\0")), default=0)


def _check_trie(units: np.ndarray, replacements: bytes) -> None:
    """ValueError unless every offset stays in the trie, and every value begins a replacement."""
    positions = np.arange(len(units), dtype=np.int64)
    offsets = (units >> np.uint32(10)).astype(np.int64) << np.where(units & _WIDE, 8, 0)
    targets = positions ^ offsets
    inner = (units & _LEAF) == 0
    inner[0] = True  # every walk begins here
    if np.any((targets[inner] | 0xFF) >= len(units)):  # and then a byte of the text is added by exclusive or
        raise ValueError("an offset of its trie leaves the trie")
    leaves = targets[inner & ((units & _HAS_LEAF) != 0)]
    values = (units[leaves] & ~_LEAF).astype(np.int64)
    if replacements[-1:] not in (b"", b"\0") or np.any(values >= len(replacements)):
        raise ValueError("a value of its trie leaves the replacements")
    text = np.frombuffer(replacements, np.uint8)
    if np.any((text[values] & 0xC0) == 0x80):
        raise ValueError("a value of its trie is in the middle of a character")
