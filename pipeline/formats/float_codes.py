"""Small float formats as float32, exactly: e4m3, e2m1, e8m0 (OCP MX specification 1.0) and bfloat16."""

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
ByteArray = NDArray[np.uint8]


def _e4m3_table() -> FloatArray:
    """All 256 values of float8_e4m3fn: no infinities, 0x7F and 0xFF are NaN, exponent 0 is subnormal."""
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
    """float8_e4m3fn bytes as float32."""
    return _E4M3[codes]


def from_e2m1(codes: ByteArray) -> FloatArray:
    """4-bit codes (one to a byte) as float32."""
    return _E2M1[codes]


def from_e8m0(codes: ByteArray) -> FloatArray:
    """Exponent bytes as float32 powers of two."""
    return _E8M0[codes]


def from_bfloat16(bits: NDArray[np.uint16]) -> FloatArray:
    """The upper half of a float32's bits as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_e4m3(values: FloatArray) -> ByteArray:
    """float32 numbers that float8_e4m3fn holds as its bytes, zeros with their sign; others are a programming error."""
    order = np.argsort(_E4M3_BITS)
    places = np.searchsorted(_E4M3_BITS, values.view(np.uint32), sorter=order).clip(0, 255)
    found: ByteArray = order[places].astype(np.uint8)
    assert np.array_equal(_E4M3_BITS[found], values.view(np.uint32))
    return found
