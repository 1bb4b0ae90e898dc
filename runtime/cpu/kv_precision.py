"""Storage of key and value vectors in the CPU's KV pool, in numpy: the bytes that native/kv_precision.h writes.

    float32
    float16, bfloat16   rounded to nearest, ties to even; float16 makes numbers beyond 65504 infinite
    fp8                 e4m3fn codes of x / scale
    int8, int4          x / scale rounded to nearest, ties to even; int4 has dims 2 j and 2 j + 1 in byte j

A scale is a float16: largest |x| / 448, 127 or 7 of the dims that share it. Codes are made with the rounded scale;
zeros have scale 1. Where a dim is NaN or infinite, or the scale is beyond float16, the scale is NaN and all codes are
0: what is not finite decodes to NaN, never to a number.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.kv_geometry import ElementType
from ingot.runtime.steps.batch import FloatArray

Codes = NDArray[Any]  # of ELEMENT's type
HalfArray = NDArray[np.float16]

KINDS: tuple[ElementType, ...] = ("float32", "float16", "bfloat16", "fp8", "int8", "int4")
"""Numbers of the types in the C kernel."""

ELEMENT: Mapping[ElementType, type[np.generic]] = {
    "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16,
    "fp8": np.uint8, "int8": np.int8, "int4": np.uint8,
}  # fmt: skip
"""numpy's type of a stored element; bfloat16 and fp8 as their bits, int4 as a byte of two dims."""

_LIMITS: Mapping[ElementType, float] = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
_NAN = np.float16(np.nan)  # 0x7e00


def encode(vectors: FloatArray, dtype: ElementType, group: int) -> tuple[Codes, HalfArray | None]:
    """Codes [..., width] and scales [..., dim / group] of vectors [..., dim]; None for types without scales."""
    if dtype == "float32":
        return vectors, None
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return np.where(np.isnan(vectors), _NAN, vectors.astype(np.float16)), None
    if dtype == "bfloat16":
        return _bfloat16(vectors), None
    parts = vectors.reshape(*vectors.shape[:-1], -1, group)  # [..., groups, group]
    scales = _scales(parts, _LIMITS[dtype])
    steps = scales.astype(np.float32)[..., None]
    limit = np.float32(_LIMITS[dtype])
    with np.errstate(invalid="ignore"):
        scaled = np.where(np.isnan(steps), np.float32(0), np.clip(parts / steps, -limit, limit))
    return _codes(scaled.reshape(vectors.shape), dtype), scales


def decode(codes: Codes, scales: HalfArray | None, dtype: ElementType) -> FloatArray:
    """Vectors [..., dim] of codes [..., width] and scales [..., groups]."""
    values = _floats(codes, dtype)
    if scales is None:
        return values
    parts = values.reshape(*scales.shape, -1)
    decoded: FloatArray = (parts * scales.astype(np.float32)[..., None]).reshape(values.shape)
    return decoded


def _scales(parts: FloatArray, limit: float) -> HalfArray:
    """Scales [...] of parts [..., group]."""
    largest = np.abs(parts).max(axis=-1)  # NaN where a dim is
    with np.errstate(over="ignore"):
        scales = (largest / np.float32(limit)).astype(np.float16)
    scales = np.where(np.isfinite(scales), scales, _NAN)
    return np.where(scales == 0, np.float16(1), scales)


def _codes(scaled: FloatArray, dtype: ElementType) -> Codes:
    """Codes of numbers within the type's range."""
    if dtype == "fp8":
        return _e4m3(scaled)
    whole = np.rint(scaled).astype(np.int8)
    if dtype == "int8":
        return whole
    nibbles = whole.view(np.uint8) & 15
    packed: Codes = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return packed


def _floats(codes: Codes, dtype: ElementType) -> FloatArray:
    if dtype == "bfloat16":
        return (codes.astype(np.uint32) << 16).view(np.float32)
    if dtype == "fp8":
        bits = codes.astype(np.uint32)
        magnitudes = ((bits & 0x7F) << 20).view(np.float32) * np.float32(2.0**120)
        return np.where(bits & 0x80, -magnitudes, magnitudes)
    if dtype == "int4":
        nibbles = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:-1], -1)
        return ((nibbles ^ 8).astype(np.int8) - np.int8(8)).astype(np.float32)
    return codes.astype(np.float32)


def _bfloat16(vectors: FloatArray) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(vectors).view(np.uint32)
    with np.errstate(over="ignore"):
        upper = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(vectors), np.uint16(0x7FC0), upper)


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
