"""Dequantizes a weight of 4 or 8 bits to 16 bits, for matmuls of so many rows that arithmetic dominates.

    W[n, k] = (code[n, k] - zero_point[n, k // GROUP]) * scale[n, k // GROUP]

Codes are in spans as in matmul_nbits.py, and W is rounded as that kernel rounds it in registers. Written once a step
into the arena and read by matmul.py: for 2048 rows writing costs a few per cent of the matmul, and it runs in slices
that stay in the GPU's cache.
"""

import triton
import triton.language as tl

from ingot.kernels.common import wait_for_inputs
from ingot.kernels.matmul_nbits import codes_of, scale_and_zero


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
    DEPENDENT: tl.constexpr = False,
):
    """Grid (ceil(count / TILE), SPANS). Rows first .. first + count - 1 of W [N, COLUMNS] to out [count, COLUMNS]."""
    wait_for_inputs(DEPENDENT)
    SPAN: tl.constexpr = 512 // BITS
    WIDTH: tl.constexpr = SPAN if GROUP % SPAN == 0 else 32
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < count
    n = first + row
    place = codes + n.to(tl.int64) * (SPANS * 64)
    for piece in tl.static_range(SPAN // WIDTH):
        column = tl.program_id(1) * SPAN + piece * WIDTH
        scale, zero = scale_and_zero(scales, zero_points, n, column, inside, N, BITS, GROUP, GROUPS, HAS_ZERO_POINTS)
        code = codes_of(place, inside, column, WIDTH, BITS)
        weight = (code.to(tl.float32) - zero[:, None]) * scale[:, None]
        at = column + tl.arange(0, WIDTH)
        target = out + row.to(tl.int64)[:, None] * COLUMNS + at[None, :]
        tl.store(target, weight.to(out.dtype.element_ty), mask=inside[:, None] & (at < COLUMNS)[None, :])
