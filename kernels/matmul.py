"""Products of rows with a weight of 16 bits, or with one of 8 bits where both sides are quantized.

    FLOAT    y = x @ W^T + b
    FP8      y = (x @ W^T) * x_scale[row] * w_scale[n] + b         x, W e4m3fn, sums float32
    INT8     y = (x @ W^T) * x_scale[row] * w_scale[n] + b         x, W int8, sums int32: exact

quantize_rows makes x and x_scale of 16-bit rows: each row by its own largest value, so that it does not depend on the
rows beside it.
"""

import triton
import triton.language as tl

from ingot.kernels.kv_precision import FLOAT, FP8, INT8, encode


@triton.jit
def matmul(
    x,
    weight,
    x_scales,
    weight_scales,
    bias,
    out,
    rows,
    x_stride,
    out_stride,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (ceil(N / TILE) * ceil(rows / TILE_ROWS),). x [rows, COLUMNS], weight [N, COLUMNS]; scales [rows] and [N].

    BAND      row tiles that are visited together, for the cache
    UPCAST    multiply in float32: for the interpreter, whose bfloat16 and eight-bit products are not the card's
    """
    row_tiles, tiles = tl.cdiv(rows, TILE_ROWS), tl.cdiv(N, TILE)
    program = tl.program_id(0)
    band = program // (BAND * tiles)
    height = tl.minimum(row_tiles - band * BAND, BAND)
    inner = program - band * BAND * tiles
    m = (band * BAND + inner % height) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    n = (inner // height) * TILE + tl.arange(0, TILE)
    k = tl.arange(0, TILE_COLUMNS)
    row_mask, inside = m < rows, n < N
    left = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    right = weight + n.to(tl.int64)[:, None] * COLUMNS + k[None, :]
    SUM: tl.constexpr = tl.float32 if KIND != INT8 or UPCAST else tl.int32
    total = tl.zeros([TILE_ROWS, TILE], SUM)
    for column in range(0, COLUMNS, TILE_COLUMNS):
        known = (column + k < COLUMNS)[None, :]
        a = tl.load(left + column, mask=row_mask[:, None] & known, other=0.0)
        b = tl.load(right + column, mask=inside[:, None] & known, other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, tl.trans(b), total, out_dtype=SUM)
    result = total.to(tl.float32)
    if KIND != FLOAT:
        result *= tl.load(x_scales + m, mask=row_mask, other=0.0)[:, None]
        result *= tl.load(weight_scales + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    target = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=row_mask[:, None] & inside[None, :])


@triton.jit
def quantize_rows(x, codes, scales, x_stride, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """Grid (rows,). codes [rows, COLUMNS] e4m3fn or int8, scales [rows] float32: max|x| / 448 or / 127; 1 for zeros."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < COLUMNS
    values = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values))
    scale = tl.where(largest > 0.0, largest / (448.0 if KIND == FP8 else 127.0), 1.0)
    tl.store(codes + row * COLUMNS + at, encode(values, scale, KIND).to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)
