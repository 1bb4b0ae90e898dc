"""Storage of key and value vectors in the KV pool: 16 bits, or 8 or 4 bits with a float16 scale per vector.

    FLOAT    the pool's own floats                                      no scale
    FP8      e4m3fn, value / scale                                      scale = max|value| / 448
    INT8     -127..127, value / scale rounded to the nearest            scale = max|value| / 127
    INT4     -7..7, two to a byte: dim 2 j in the low half of byte j    scale = max|value| / 7

Each token and head has a vector. The scale is rounded to float16 first, and the codes use the rounded scale; a vector
of zeros has scale 1. (One scale per token as in KIVI's value cache, arXiv:2402.02750, which also has groups.)
"""

import triton
import triton.language as tl

FLOAT, FP8, INT8, INT4 = (tl.constexpr(kind) for kind in range(4))


@triton.jit
def round_to_nearest(x):
    """Ties to even, for |x| < 2^22: adding 1.5 * 2^23 removes all fractional bits."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def vector_scale(largest, KIND: tl.constexpr):
    """The scale of a vector with this largest magnitude, rounded to float16, in float32."""
    if KIND == FP8:
        scale = largest / 448.0
    elif KIND == INT8:
        scale = largest / 127.0
    else:
        scale = largest / 7.0
    scale = tl.minimum(scale, 65504.0).to(tl.float16).to(tl.float32)
    return tl.where(scale > 0.0, scale, 1.0)


@triton.jit
def round_to_e4m3(x):
    """Nearest number of e4m3fn, ties to even, as float32, for |x| up to 448: the cast to eight bits is then exact.

    Uses integers because casts differ: Triton's interpreter truncates where the GPU rounds.
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)  # 3 bits of mantissa
    return tl.where(tl.abs(x) < 0.015625, round_to_nearest(x * 512.0) / 512.0, normal)  # below 2^-6: steps of 2^-9


@triton.jit
def encode(x, scale, KIND: tl.constexpr):
    """Codes of values as float32: the values that FP8 is cast from, or whole numbers."""
    if KIND == FP8:
        return round_to_e4m3(tl.minimum(tl.maximum(x / scale, -448.0), 448.0))
    limit: tl.constexpr = 127.0 if KIND == INT8 else 7.0
    return tl.minimum(tl.maximum(round_to_nearest(x / scale), -limit), limit)


@triton.jit
def load_vectors(
    pool,
    scales,
    rows,
    scale_rows,
    inside,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Vectors [tokens, BLOCK_DIM] as DTYPE, zeros where not inside and beyond DIM.

    rows, scale_rows [tokens] int64    where each vector begins, in elements of the pool (bytes for INT4), and its scale
    """
    at = tl.arange(0, BLOCK_DIM)
    if KIND == INT4:
        half = tl.arange(0, BLOCK_DIM // 2)
        mask = inside[:, None] & (half < DIM // 2)[None, :]
        packed = tl.load(pool + rows[:, None] + half[None, :], mask=mask, other=0).to(tl.int32)
        low = ((packed & 15) ^ 8) - 8  # two's complement of 4 bits
        high = ((packed >> 4) ^ 8) - 8
        values = tl.interleave(low, high)
    else:
        mask = inside[:, None] & (at < DIM)[None, :]
        values = tl.load(pool + rows[:, None] + at[None, :], mask=mask, other=0.0)
    if KIND != FLOAT:
        factor = tl.load(scales + scale_rows, mask=inside, other=0.0).to(tl.float32)
        values = values.to(tl.float32) * factor[:, None]
    return values.to(DTYPE)
