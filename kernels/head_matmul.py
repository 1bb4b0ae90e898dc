"""Matmuls of each head by a weight of its own, in one launch: the two matrices of latent attention.

    y[row, head] = x[row, head] @ W[head]^T

head_matmul          a weight of 16 or 32 bits    matmul.py's arithmetic
head_matmul_nbits    of 4 or 8 bits               matmul_nbits.py's

A head's columns of x need not be aligned, nor follow those of the head before. Sums are whole (no split-K): heads fill
a GPU, and a row's bits are the same for any number of rows with the same tile.
"""

import triton
import triton.language as tl

from ingot.kernels.common import wait_for_inputs
from ingot.kernels.kv_precision import FLOAT
from ingot.kernels.matmul import partial_sums as floats_partial
from ingot.kernels.matmul_nbits import partial_sums as nbits_partial


@triton.jit
def head_matmul(
    x,
    weight,
    out,
    rows,
    x_offset,
    x_stride,
    out_stride,
    HEAD_STRIDE: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (ceil(rows / TILE_ROWS), ceil(N / TILE), heads). weight [heads, N, COLUMNS]; out [rows, heads * N].

    x_offset       elements from x to the first column of head 0 in row 0
    HEAD_STRIDE    elements from a head's columns to the next head's
    """
    wait_for_inputs(DEPENDENT)
    head = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    n, k = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, TILE_COLUMNS)
    row_mask, inside = m < rows, n < N
    left = x + x_offset + head * HEAD_STRIDE + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    right = weight + head * (N * COLUMNS) + n.to(tl.int64)[:, None] * COLUMNS + k[None, :]
    result = floats_partial(
        left, right, x, x, m, n, k, row_mask, inside, 0, COLUMNS, 1, TILE_ROWS, TILE, TILE_COLUMNS, FLOAT, False
    )
    target = out + m.to(tl.int64)[:, None] * out_stride + head * N + n[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=row_mask[:, None] & inside[None, :])


@triton.jit
def head_matmul_nbits(
    x,
    codes,
    scales,
    zero_points,
    out,
    rows,
    x_offset,
    x_stride,
    out_stride,
    HEAD_STRIDE: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPANS_AT_ONCE: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    DTYPE: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """The same as head_matmul. codes [heads, N, SPANS * 64] uint8; scales, zero_points [heads, GROUPS, N]."""
    wait_for_inputs(DEPENDENT)
    head = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row_mask, inside = m < rows, n < N
    place = x + x_offset + head * HEAD_STRIDE + m.to(tl.int64) * x_stride
    place_of_codes = codes + head * (N * SPANS * 64) + n.to(tl.int64) * (SPANS * 64)
    result = nbits_partial(
        place, place_of_codes, scales + head * (GROUPS * N), zero_points + head * (GROUPS * N), n, inside,
        row_mask, 0, N, COLUMNS, SPANS, GROUP, GROUPS, 1, TILE_ROWS, TILE, SPANS_AT_ONCE,
        BITS, HAS_ZERO_POINTS, SCALE_WEIGHTS, DTYPE,
    )  # fmt: skip
    target = out + m.to(tl.int64)[:, None] * out_stride + head * N + n[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=row_mask[:, None] & inside[None, :])
