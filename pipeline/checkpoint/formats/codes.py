"""Packed codes: small integers in 32-bit words and bytes, least significant bit first; small floats.

A row of n codes of b bits is one stream of n * b bits; bit k of the stream is bit k % 32 of word k // 32. With 2, 4 and
8 bits no code crosses a word; with 3 bits they do (32 codes in 3 words).

e4m3, e2m1, e8m0 (OCP MX specification 1.0) and bfloat16 convert to float32 exactly.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

ByteArray = NDArray[np.uint8]
FloatArray = NDArray[np.float32]
WORD_BITS = 32


def num_words(count: int, bits: int) -> int:
    """Return the words that `count` codes take; the last one may be partly used."""
    return -(-count * bits // WORD_BITS)


def unpack_words(words: NDArray[Any], bits: int, count: int) -> ByteArray:
    """Return the first `count` codes of every row, [rows, count] uint8, from words [rows, num_words(count, bits)]."""
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
    """Invert unpack_words: pack codes [rows, count] below 2 ** bits in int32 [rows, num_words(count, bits)]."""
    rows, count = codes.shape
    if bits in (2, 4, 8):
        return _pack_in_bytes(codes, bits)
    single = np.unpackbits(codes.astype(np.uint8)[:, :, None], axis=2, count=bits, bitorder="little")
    padded = np.zeros((rows, num_words(count, bits) * WORD_BITS), np.uint8)
    padded[:, : count * bits] = single.reshape(rows, -1)
    words: NDArray[np.int32] = np.packbits(padded, axis=1, bitorder="little").view("<i4").astype(np.int32, copy=False)
    return words


def _pack_in_bytes(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Pack codes of 2, 4 or 8 bits, which cross no byte."""
    rows, count = codes.shape
    per_byte = 8 // bits
    stream = np.zeros((rows, num_words(count, bits) * WORD_BITS // 8), np.uint8)
    for place in range(per_byte):
        part = codes[:, place::per_byte].astype(np.uint8)
        stream[:, : part.shape[1]] |= part << np.uint8(bits * place)
    words: NDArray[np.int32] = stream.view("<i4").astype(np.int32, copy=False)
    return words


def unpack_nibbles(packed: ByteArray) -> ByteArray:
    """Return codes [rows, 2 * n] from bytes [rows, n], the low half of a byte first."""
    both = np.stack([packed & np.uint8(0x0F), packed >> np.uint8(4)], axis=-1)
    return both.reshape(*packed.shape[:-1], -1)


def _e4m3_table() -> FloatArray:
    """Return the 256 values of float8_e4m3fn: no infinities, 0x7F and 0xFF are NaN, exponent 0 is subnormal."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude = np.where(codes & 127 == 127, np.nan, magnitude)
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)


_E4M3 = _e4m3_table()
_E4M3_BITS = _E4M3.view(np.uint32)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# 2 ** (code - 127); 255 is NaN. Code 0, 2 ** -127, is subnormal in float32.
_E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.nan).astype(np.float32)


def from_e4m3(codes: ByteArray) -> FloatArray:
    """Return float8_e4m3fn bytes as float32."""
    return _E4M3[codes]


def from_e2m1(codes: ByteArray) -> FloatArray:
    """Return 4-bit codes, one to a byte, as float32."""
    return _E2M1[codes]


def from_e8m0(codes: ByteArray) -> FloatArray:
    """Return exponent bytes as float32 powers of two."""
    return _E8M0[codes]


def to_e4m3(values: FloatArray) -> ByteArray:
    """Return the bytes of float32 numbers, which must be exact in float8_e4m3fn; zeros keep their sign."""
    order = np.argsort(_E4M3_BITS)
    places = np.searchsorted(_E4M3_BITS, values.view(np.uint32), sorter=order).clip(0, 255)
    found: ByteArray = order[places].astype(np.uint8)
    assert np.array_equal(_E4M3_BITS[found], values.view(np.uint32))
    return found
