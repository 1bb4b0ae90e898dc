"""Products of 16-bit rows with a 4- or 8-bit weight: y = softcap(alpha * x @ W^T + b), dequantized in registers.

    W[n, k] = (code[n, k] - zero_point[n, k // GROUP]) * scale[n, k // GROUP]             GROUP: 32 or a multiple

Codes are stored in spans of 64 columns. With 8 bits a span is 64 bytes, column by column; with 4 bits it is 32 bytes,
and byte j holds column j in its low half and column j + 32 in its high half. So either half of a span is a run of
columns with one scale, and needs no shuffling before the product. Columns are padded to whole spans.

Few rows leave the card waiting for weights: SPLITS programs share the columns of one tile, and who reads the result
adds their parts in order, as matmul.py says. Many rows make it wait for multiplications: then the scale goes into the
weight before the product (SCALE_WEIGHTS), not into every sum behind it.
"""

import triton
import triton.language as tl

from ingot.kernels.matmul import finished


@triton.jit
def _span(
    x,
    column,
    codes,
    zero,
    scale,
    row_mask,
    COLUMNS: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The product of 32 columns: rows of x from `column` on, codes [tile, 32]. x points at each row's beginning."""
    at = column + tl.arange(0, 32)
    if COLUMNS % 64 == 0:
        rows = tl.load(x[:, None] + at[None, :], mask=row_mask[:, None], other=0.0)
    else:
        rows = tl.load(x[:, None] + at[None, :], mask=row_mask[:, None] & (at < COLUMNS)[None, :], other=0.0)
    weight = codes.to(tl.float32) - zero[:, None]
    if SCALE_WEIGHTS:
        return tl.dot(rows.to(DTYPE), tl.trans((weight * scale[:, None]).to(DTYPE)))
    return tl.dot(rows.to(DTYPE), tl.trans(weight.to(DTYPE))) * scale[None, :]


@triton.jit
def _group(
    scales,
    zero_points,
    n,
    group,
    inside,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
):
    """Scale and zero point [tile] of a group; the middle code where a symmetric weight has none."""
    known = inside & (group < GROUPS)
    scale = tl.load(scales + n * GROUPS + group, mask=known, other=0.0).to(tl.float32)
    zero = tl.zeros_like(scale) + (8.0 if BITS == 4 else 128.0)
    if HAS_ZERO_POINTS:
        zero = tl.load(zero_points + n * GROUPS + group, mask=known, other=0).to(tl.float32)
    return scale, zero


@triton.jit
def matmul_nbits(
    x,
    codes,
    scales,
    zero_points,
    bias,
    out,
    rows,
    x_stride,
    out_stride,
    alpha,
    softcap,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Grid (ceil(rows / TILE_ROWS), ceil(N / TILE), SPLITS). x [rows, COLUMNS]; codes [N, SPANS * 8 * BITS] uint8.

    scales, zero_points    [N, GROUPS], any float and uint8
    out                    [rows, N], or [SPLITS, rows, N] float32 when SPLITS is more than 1
    """
    m = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    split = tl.program_id(2)
    inside, row_mask = n < N, m < rows
    place = x + m.to(tl.int64) * x_stride
    total = tl.zeros([TILE_ROWS, TILE], tl.float32)
    for span in range(split * SPANS // SPLITS, (split + 1) * SPANS // SPLITS):
        place_of_codes = codes + (n.to(tl.int64)[:, None] * SPANS + span) * (8 * BITS) + tl.arange(0, 32)[None, :]
        low = tl.load(place_of_codes, mask=inside[:, None], other=0)
        if BITS == 4:
            low, high = low & 15, low >> 4
        else:
            high = tl.load(place_of_codes + 32, mask=inside[:, None], other=0)
        scale, zero = _group(scales, zero_points, n, span * 64 // GROUP, inside, BITS, GROUPS, HAS_ZERO_POINTS)
        total += _span(place, span * 64, low, zero, scale, row_mask, COLUMNS, SCALE_WEIGHTS, DTYPE)
        if GROUP % 64:
            scale, zero = _group(
                scales, zero_points, n, (span * 64 + 32) // GROUP, inside, BITS, GROUPS, HAS_ZERO_POINTS
            )
        total += _span(place, span * 64 + 32, high, zero, scale, row_mask, COLUMNS, SCALE_WEIGHTS, DTYPE)
    total = finished(total, bias, n, inside, split, alpha, softcap, SPLITS, HAS_BIAS, HAS_SOFTCAP)
    target = out + (split * rows + m).to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=row_mask[:, None] & inside[None, :])
