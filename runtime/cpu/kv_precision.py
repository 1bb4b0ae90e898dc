"""Storage of key and value vectors in the CPU's KV pool, in numpy: the bytes that native/kv_precision.h writes.

    float32
    float16, bfloat16   rounded to nearest, ties to even; float16 makes numbers beyond 65504 infinite
    fp8                 e4m3fn codes of x / scale
    int8, int4          x / scale rounded to nearest, ties to even; int4 has dims 2 j and 2 j + 1 in byte j
    grouped int4        0 .. 15 for each group of dims: (x - minimum) / scale rounded likewise

A vector's scale is a float16, largest |x| / 448, 127 or 7. A group's is (largest x - minimum) / 15, followed by its
minimum; the last group may have fewer dims. Codes are made with the rounded numbers; scale 0 becomes 1. Where a dim is
NaN or infinite, or the scale or the minimum is beyond float16, the scale is NaN and all codes are 0: what is not finite
decodes to NaN, never to a number.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.kv_geometry import ElementType
from ingot.artifact.safetensors import to_bfloat16
from ingot.runtime.forward_batch import FloatArray

KVCodes = NDArray[Any]  # of ELEMENT's type
HalfArray = NDArray[np.float16]

KINDS = ("float32", "float16", "bfloat16", "fp8", "int8", "int4", "grouped int4")
"""Numbers of the types in the C kernel."""

ELEMENT: Mapping[ElementType, type[np.generic]] = {
    "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16,
    "fp8": np.uint8, "int8": np.int8, "int4": np.uint8,
}  # fmt: skip
"""numpy's type of a stored element; bfloat16 and fp8 as their bits, int4 as a byte of two dims."""

_LIMITS: Mapping[ElementType, float] = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
_NAN = np.float16(np.nan)  # 0x7e00


def kind_of(dtype: ElementType, int4_group: int) -> int:
    """The type's number in the C kernel."""
    return KINDS.index("grouped int4" if dtype == "int4" and int4_group else dtype)


def encode(vectors: FloatArray, dtype: ElementType, int4_group: int = 0) -> tuple[KVCodes, HalfArray | None]:
    """Codes [..., width] and scales [..., scales] of vectors [..., dim]; None for types without scales.

    int4_group    dims of int4 that share a scale and a minimum; 0: one scale for the vector
    """
    if dtype == "float32":
        return vectors, None
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return np.where(np.isnan(vectors), _NAN, vectors.astype(np.float16)), None
    if dtype == "bfloat16":
        return to_bfloat16(vectors), None
    if dtype == "int4" and int4_group:
        return _encode_groups(vectors, int4_group)
    limit = np.float32(_LIMITS[dtype])
    scales = _scales(np.abs(vectors).max(axis=-1, keepdims=True) / limit)  # NaN where a dim is
    steps = scales.astype(np.float32)
    with np.errstate(invalid="ignore"):
        scaled = np.where(np.isnan(steps), np.float32(0), np.clip(vectors / steps, -limit, limit))
    return _codes(scaled, dtype), scales


def decode(codes: KVCodes, scales: HalfArray | None, dtype: ElementType, int4_group: int = 0) -> FloatArray:
    """Vectors [..., dim] of codes [..., width] and scales [..., scales]."""
    if scales is None:
        return _floats(codes, dtype)
    factors = scales.astype(np.float32)
    if dtype == "int4" and int4_group:
        nibbles = _nibbles(codes).astype(np.float32)
        steps, minima = (_of_dims(factors[..., i::2], int4_group, nibbles.shape[-1]) for i in (0, 1))
        decoded: FloatArray = nibbles * steps + minima
        return decoded
    return _floats(codes, dtype) * factors


def _encode_groups(vectors: FloatArray, group: int) -> tuple[KVCodes, HalfArray]:
    """Codes and scales, minima [..., 2 * groups] of vectors [..., dim]."""
    dim = vectors.shape[-1]
    missing = [(0, 0)] * (vectors.ndim - 1) + [(0, -dim % group)]
    parts = np.pad(vectors, missing, mode="edge").reshape(*vectors.shape[:-1], -1, group)  # [..., groups, group]
    with np.errstate(over="ignore", invalid="ignore"):
        minima = (parts.min(axis=-1) + np.float32(0)).astype(np.float16)
        ranges = np.maximum(parts.max(axis=-1) - minima.astype(np.float32), np.float32(0))
        steps = _scales(ranges / np.float32(15))
        is_number = np.isfinite(parts).all(axis=-1) & np.isfinite(minima) & ~np.isnan(steps)
        steps, minima = np.where(is_number, steps, _NAN), np.where(is_number, minima, np.float16(0))
        each, base = (_of_dims(x.astype(np.float32), group, dim) for x in (steps, minima))
        scaled = np.where(np.isnan(each), np.float32(0), np.clip((vectors - base) / each, 0, 15))
    scales = np.stack((steps, minima), axis=-1).reshape(*vectors.shape[:-1], -1)
    return _packed(np.rint(scaled).astype(np.uint8)), scales


def _of_dims(of_groups: FloatArray, group: int, dim: int) -> FloatArray:
    """The group's number for each dim: [..., dim] of [..., groups]."""
    return np.repeat(of_groups, group, axis=-1)[..., :dim]


def _scales(steps: FloatArray) -> HalfArray:
    """Steps as float16: NaN where they are not finite there, 1 for 0."""
    with np.errstate(over="ignore"):
        scales = steps.astype(np.float16)
    scales = np.where(np.isfinite(scales), scales, _NAN)
    return np.where(scales == 0, np.float16(1), scales)


def _codes(scaled: FloatArray, dtype: ElementType) -> KVCodes:
    """Codes of numbers within the type's range."""
    if dtype == "fp8":
        return _e4m3(scaled)
    whole = np.rint(scaled).astype(np.int8)
    if dtype == "int8":
        return whole
    return _packed(whole.view(np.uint8) & np.uint8(15))


def _packed(nibbles: NDArray[np.uint8]) -> KVCodes:
    """Two dims in a byte: [..., dim / 2] of [..., dim]."""
    packed: KVCodes = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return packed


def _nibbles(codes: KVCodes) -> NDArray[np.uint8]:
    """The inverse of `_packed`."""
    return np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:-1], -1)


def _floats(codes: KVCodes, dtype: ElementType) -> FloatArray:
    if dtype == "bfloat16":
        return (codes.astype(np.uint32) << 16).view(np.float32)
    if dtype == "fp8":
        bits = codes.astype(np.uint32)
        magnitudes = ((bits & 0x7F) << 20).view(np.float32) * np.float32(2.0**120)
        return np.where(bits & 0x80, -magnitudes, magnitudes)
    if dtype == "int4":
        return ((_nibbles(codes) ^ 8).astype(np.int8) - np.int8(8)).astype(np.float32)
    return codes.astype(np.float32)


def _e4m3(scaled: FloatArray) -> NDArray[np.uint8]:
    """Nearest codes, ties to even, for numbers up to 448; integers, as numpy has no such type."""
    bits = np.ascontiguousarray(scaled).view(np.uint32)
    magnitudes = bits & 0x7FFFFFFF
    normal = ((magnitudes + 0x7FFFF + ((magnitudes >> 20) & 1)) >> 20) - 0x3C0
    small = np.rint(np.abs(scaled) * np.float32(512)).astype(np.uint32)  # below 2^-6: steps of 2^-9
    codes: NDArray[np.uint8] = (((bits >> 24) & 0x80) | np.where(magnitudes < 0x3C800000, small, normal)).astype(
        np.uint8
    )
    return codes
