"""Dequantizes a weight of 4 or 8 bits to 16 bits, for matmuls of so many rows that arithmetic dominates.

    W[n, k] = (code[n, k] - zero_point[n, k // GROUP]) * scale[n, k // GROUP]

Codes are in spans as in matmul_nbits.py, and W is rounded as that kernel rounds it in registers. Written once a step
into the arena and read by matmul.py: for 2048 rows writing costs a few per cent of the matmul, and it runs in slices
that stay in the GPU's cache.
"""

import triton
import triton.language as tl

from ingot.kernels.matmul_nbits import scale_and_zero


@triton.jit
def dequantize_nbits(
    codes,
    scales,
    zero_points,
    out,
    first,
    count,
    N: tl.constexpr,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
):
    """Grid (ceil(count / TILE), SPANS). Rows first .. first + count - 1 of W [N, COLUMNS] to out [count, COLUMNS]."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    span = tl.program_id(1)
    inside = row < count
    n = first + row
    at = tl.arange(0, 32)
    place = codes + (n.to(tl.int64)[:, None] * SPANS + span) * (8 * BITS) + at[None, :]
    low = tl.load(place, mask=inside[:, None], other=0)
    if BITS == 4:
        low, high = low & 15, low >> 4
    else:
        high = tl.load(place + 32, mask=inside[:, None], other=0)
    target = out + row.to(tl.int64)[:, None] * COLUMNS + span * 64 + at[None, :]
    scale, zero = scale_and_zero(scales, zero_points, n, span * 64, inside, N, BITS, GROUP, GROUPS, HAS_ZERO_POINTS)
    weight = (low.to(tl.float32) - zero[:, None]) * scale[:, None]
    tl.store(target, weight.to(out.dtype.element_ty), mask=inside[:, None] & (span * 64 + at < COLUMNS)[None, :])
    if GROUP % 64:
        scale, zero = scale_and_zero(
            scales, zero_points, n, span * 64 + 32, inside, N, BITS, GROUP, GROUPS, HAS_ZERO_POINTS
        )
    weight = (high.to(tl.float32) - zero[:, None]) * scale[:, None]
    known = (span * 64 + 32 + at < COLUMNS)[None, :]
    tl.store(target + 32, weight.to(out.dtype.element_ty), mask=inside[:, None] & known)
