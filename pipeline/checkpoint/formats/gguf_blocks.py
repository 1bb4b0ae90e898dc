"""GGUF's block types: decode the bytes of rows; encode Q4_0, Q4_1 and Q8_0.

A row is a sequence of blocks of 32 values (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0) or super-blocks of 256 (K-quants), whose
scales are 6-bit (Q6_K: 8-bit) codes times one float16. (Source: ggml/src/ggml-common.h, ggml-quants.c.)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.pipeline.checkpoint.formats.codes import ByteArray, FloatArray
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight


@dataclass(frozen=True)
class BlockType:
    """A block type. `decode` takes blocks [n, num_bytes] and returns codes [n, values], scales [n, values / group],
    and offsets as scales or None."""

    name: str
    values: int
    num_bytes: int
    group: int
    decode: Callable[[ByteArray], tuple[NDArray[Any], FloatArray, FloatArray | None]]


def decode_rows(raw: ByteArray, kind: BlockType, rows: int, columns: int) -> DecodedWeight:
    """Decode the bytes of a whole tensor [rows, columns]; columns is a multiple of the block's values."""
    codes, scales, offsets = kind.decode(raw.reshape(-1, kind.num_bytes))
    groups = columns // kind.group
    return DecodedWeight(
        codes=codes.reshape(rows, columns),
        scales=scales.reshape(rows, groups),
        group_size=kind.group,
        offsets=None if offsets is None else offsets.reshape(rows, groups),
        bits=int(kind.name[1]),
    )


def encode_rows(weight: DecodedWeight, name: str) -> ByteArray:
    """Encode as Q4_0, Q4_1 or Q8_0, [rows, bytes of a row]; scales and offsets must be exact in float16."""
    codes = weight.codes.reshape(-1, 32)  # [blocks, 32]
    parts = [_float16_bytes(weight.scales)]
    if name == "Q8_0":
        parts.append(codes.astype(np.int8).view(np.uint8))
    else:
        if name == "Q4_1":
            assert weight.offsets is not None
            parts.append(_float16_bytes(weight.offsets))
        unsigned = (codes + np.int8(8)).astype(np.uint8) if name == "Q4_0" else codes.astype(np.uint8)
        parts.append(unsigned[:, :16] | (unsigned[:, 16:] << np.uint8(4)))
    return np.concatenate(parts, axis=1).reshape(len(weight.codes), -1)


def _float16_bytes(values: FloatArray) -> ByteArray:
    return values.astype("<f2").reshape(-1, 1).view(np.uint8)


def _float16(block: ByteArray) -> FloatArray:
    """Return float16 bytes [n, 2] as float32 [n, 1]."""
    return np.ascontiguousarray(block).view("<f2").astype(np.float32)


def _halves(packed: ByteArray) -> ByteArray:
    """Return the low halves of 16 bytes, then the high halves, [n, 32]."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)


def _fifth_bits(block: ByteArray) -> ByteArray:
    """Return 32 bits [n, 4 bytes] as zeros and sixteens [n, 32]."""
    return np.unpackbits(block, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(block: ByteArray) -> tuple[NDArray[Any], FloatArray, None]:
    return _halves(block[:, 2:]).astype(np.int8) - np.int8(8), _float16(block[:, :2]), None


def _q4_1(block: ByteArray) -> tuple[NDArray[Any], FloatArray, FloatArray]:
    return _halves(block[:, 4:]), _float16(block[:, :2]), _float16(block[:, 2:4])


def _q5_0(block: ByteArray) -> tuple[NDArray[Any], FloatArray, None]:
    codes = _halves(block[:, 6:]) | _fifth_bits(block[:, 2:6])
    return codes.astype(np.int8) - np.int8(16), _float16(block[:, :2]), None


def _q5_1(block: ByteArray) -> tuple[NDArray[Any], FloatArray, FloatArray]:
    return _halves(block[:, 8:]) | _fifth_bits(block[:, 4:8]), _float16(block[:, :2]), _float16(block[:, 2:4])


def _q8_0(block: ByteArray) -> tuple[NDArray[Any], FloatArray, None]:
    return np.ascontiguousarray(block[:, 2:]).view(np.int8), _float16(block[:, :2]), None


def _q3_k(block: ByteArray) -> tuple[NDArray[Any], FloatArray, None]:
    """Decode hmask [32], 2-bit codes [64], 6-bit scales [12], d. An unset bit of the mask subtracts four."""
    high, low, packed, d = block[:, :32], block[:, 32:96], block[:, 96:108], _float16(block[:, 108:])
    codes = _bit_planes(low, (0, 2, 4, 6), 3).astype(np.int8)
    codes -= (_bit_planes(high, tuple(range(8)), 1) ^ np.uint8(1)).astype(np.int8) << np.int8(2)
    low_scales = np.concatenate([packed[:, :8] & np.uint8(15), packed[:, :8] >> np.uint8(4)], axis=1)
    high_scales = np.concatenate([(packed[:, 8:] >> np.uint8(shift)) & np.uint8(3) for shift in (0, 2, 4, 6)], axis=1)
    scales = (low_scales | (high_scales << np.uint8(4))).astype(np.int8) - np.int8(32)  # [n, 16]
    return codes, d * scales.astype(np.float32), None


def _q4_k(block: ByteArray) -> tuple[NDArray[Any], FloatArray, FloatArray]:
    scales, offsets = _scales_and_minima(block)
    return _bit_planes(block[:, 16:], (0, 4), 15), scales, offsets


def _q5_k(block: ByteArray) -> tuple[NDArray[Any], FloatArray, FloatArray]:
    scales, offsets = _scales_and_minima(block)
    codes = _bit_planes(block[:, 48:], (0, 4), 15) | (_bit_planes(block[:, 16:48], tuple(range(8)), 1) << np.uint8(4))
    return codes, scales, offsets


def _q6_k(block: ByteArray) -> tuple[NDArray[Any], FloatArray, None]:
    """Decode lower 4 bits [128], upper 2 bits [64], int8 scales [16], d, in two halves of 128 values."""
    low, high = block[:, :128].reshape(-1, 2, 1, 64), block[:, 128:192].reshape(-1, 2, 1, 32)
    low_codes = np.concatenate([low & np.uint8(15), low >> np.uint8(4)], axis=2).reshape(-1, 2, 4, 32)
    high_codes = (high >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)) & np.uint8(3)  # [n, 2, 4, 32]
    codes = (low_codes | (high_codes << np.uint8(4))).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(block[:, 192:208]).view(np.int8).astype(np.float32)
    return codes.reshape(-1, 256), _float16(block[:, 208:]) * scales, None


def _bit_planes(packed: ByteArray, shifts: tuple[int, ...], mask: int) -> ByteArray:
    """Return [n, 32 * k * len(shifts)]: for every 32 bytes, their values at the first shift, then at the next."""
    runs = packed.reshape(len(packed), -1, 1, 32) >> np.array(shifts, np.uint8).reshape(-1, 1)
    return (runs & np.uint8(mask)).reshape(len(packed), -1)


def _scales_and_minima(block: ByteArray) -> tuple[FloatArray, FloatArray]:
    """Return scales and negated minima [n, 8] from d, dmin and 12 bytes of 6-bit codes, as Q4_K and Q5_K begin."""
    d, dmin, packed = _float16(block[:, :2]), _float16(block[:, 2:4]), block[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    top, low = np.uint8(6), np.uint8(15)
    scales = np.concatenate([first & np.uint8(63), (third & low) | ((first >> top) << np.uint8(4))], axis=1)
    minima = np.concatenate([second & np.uint8(63), (third >> np.uint8(4)) | ((second >> top) << np.uint8(4))], axis=1)
    return d * scales.astype(np.float32), -(dmin * minima.astype(np.float32))


# Number of the type in the file -> the type.
BLOCK_TYPES: Mapping[int, BlockType] = {
    2: BlockType("Q4_0", 32, 18, 32, _q4_0),
    3: BlockType("Q4_1", 32, 20, 32, _q4_1),
    6: BlockType("Q5_0", 32, 22, 32, _q5_0),
    7: BlockType("Q5_1", 32, 24, 32, _q5_1),
    8: BlockType("Q8_0", 32, 34, 32, _q8_0),
    11: BlockType("Q3_K", 256, 110, 16, _q3_k),
    12: BlockType("Q4_K", 256, 144, 32, _q4_k),
    13: BlockType("Q5_K", 256, 176, 32, _q5_k),
    14: BlockType("Q6_K", 256, 210, 16, _q6_k),
}
