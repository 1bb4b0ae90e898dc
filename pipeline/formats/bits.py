"""Streams of small integers in 32-bit words and bytes: least significant bit first, row by row.

A row of n codes of b bits is one stream of n * b bits; bit k of the stream is bit k % 32 of word k // 32. With 2, 4 and
8 bits no code crosses a word; with 3 bits they do (32 codes in 3 words).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

ByteArray = NDArray[np.uint8]
WORD_BITS = 32


def num_words(count: int, bits: int) -> int:
    """Words that `count` codes take, the last one perhaps in part."""
    return -(-count * bits // WORD_BITS)


def unpack_words(words: NDArray[Any], bits: int, count: int) -> ByteArray:
    """[rows, num_words(count, bits)] int32 -> the first `count` codes of every row, [rows, count] uint8."""
    stream = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)  # [rows, 4 * words]
    if bits == 8:
        return np.ascontiguousarray(stream[:, :count])
    if bits in (2, 4):
        per_byte, mask = 8 // bits, np.uint8((1 << bits) - 1)
        codes = np.empty((len(words), stream.shape[1] * per_byte), np.uint8)
        for place in range(per_byte):
            codes[:, place::per_byte] = (stream >> np.uint8(bits * place)) & mask
        return codes[:, :count]
    single = np.unpackbits(stream, axis=1, count=count * bits, bitorder="little").reshape(len(words), count, bits)
    return np.packbits(single, axis=2, bitorder="little")[:, :, 0]


def pack_words(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Inverse of unpack_words: [rows, count] codes below 2 ** bits -> [rows, num_words(count, bits)] int32."""
    rows, count = codes.shape
    if bits in (2, 4, 8):
        return _pack_in_bytes(codes, bits)
    single = np.unpackbits(codes.astype(np.uint8)[:, :, None], axis=2, count=bits, bitorder="little")
    padded = np.zeros((rows, num_words(count, bits) * WORD_BITS), np.uint8)
    padded[:, : count * bits] = single.reshape(rows, -1)
    words: NDArray[np.int32] = np.packbits(padded, axis=1, bitorder="little").view("<i4").astype(np.int32, copy=False)
    return words


def _pack_in_bytes(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """pack_words where no code crosses a byte."""
    rows, count = codes.shape
    per_byte = 8 // bits
    stream = np.zeros((rows, num_words(count, bits) * WORD_BITS // 8), np.uint8)
    for place in range(per_byte):
        part = codes[:, place::per_byte].astype(np.uint8)
        stream[:, : part.shape[1]] |= part << np.uint8(bits * place)
    words: NDArray[np.int32] = stream.view("<i4").astype(np.int32, copy=False)
    return words


def unpack_nibbles(packed: ByteArray) -> ByteArray:
    """[rows, n] bytes -> [rows, 2 * n] codes, the low half of a byte first."""
    both = np.stack([packed & np.uint8(0x0F), packed >> np.uint8(4)], axis=-1)
    return both.reshape(*packed.shape[:-1], -1)
