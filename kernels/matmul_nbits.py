"""Matmuls of 16-bit rows and a 4- or 8-bit weight: y = softcap(alpha * x @ W^T + b), dequantized in registers.

    W[n, k] = (code[n, k] - zero_point[n, k // GROUP]) * scale[n, k // GROUP]             GROUP: 32 or a multiple

Codes are stored in spans of 64 columns. With 8 bits a span is 64 bytes, column by column; with 4 bits it is 32 bytes,
and byte j holds column j in its low half and column j + 32 in its high half. So each half of a span is a run of
columns with one scale, and needs no shuffling before the matmul. Columns are padded to whole spans.

With few rows the GPU waits for weights: SPLITS programs share the columns of one tile, and the kernel that reads the
result adds the partials, as in matmul.py; scales are loaded a step ahead, and multiply the step's sum. With many rows
the GPU waits for arithmetic: then the scale multiplies the weight before the matmul (SCALE_WEIGHTS).
"""

import triton
import triton.language as tl

from ingot.kernels.matmul import finished


@triton.jit
def _half(
    x,
    column,
    codes,
    scale,
    zero,
    row_mask,
    COLUMNS: tl.constexpr,
    SPANS_AT_ONCE: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Multiply the halves of spans that begin at `column`: codes [tile, 32 * spans], x a pointer to each row."""
    inner = tl.arange(0, 32 * SPANS_AT_ONCE)
    at = column + inner // 32 * 64 + inner % 32
    if COLUMNS % 64 == 0:
        rows = tl.load(x[:, None] + at[None, :], mask=row_mask[:, None], other=0.0)
    else:
        rows = tl.load(x[:, None] + at[None, :], mask=row_mask[:, None] & (at < COLUMNS)[None, :], other=0.0)
    weight = codes.to(tl.float32) - zero[:, None]
    if SCALE_WEIGHTS:
        return tl.dot(rows.to(DTYPE), tl.trans((weight * scale[:, None]).to(DTYPE)), input_precision="ieee")
    return tl.dot(rows.to(DTYPE), tl.trans(weight.to(DTYPE)), input_precision="ieee") * scale[None, :]


@triton.jit
def scale_and_zero(
    scales,
    zero_points,
    n,
    column,
    inside,
    N: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
):
    """Scale and zero point [tile] of the group that a column is in; the middle code for a symmetric weight."""
    group = column // GROUP
    known = inside & (group < GROUPS)
    scale = tl.load(scales + group * N + n, mask=known, other=0.0).to(tl.float32)
    zero = tl.zeros_like(scale) + (8.0 if BITS == 4 else 128.0)
    if HAS_ZERO_POINTS:
        zero = tl.load(zero_points + group * N + n, mask=known, other=0).to(tl.float32)
    return scale, zero


@triton.jit
def _partial(
    place,
    place_of_codes,
    scales,
    zero_points,
    n,
    inside,
    row_mask,
    part,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPANS_AT_ONCE: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """One of SPLITS partials [rows, n]; `place` points at each row of x, `place_of_codes` at the weight's."""
    STEPS: tl.constexpr = SPANS // SPANS_AT_ONCE
    STEP: tl.constexpr = 64 * SPANS_AT_ONCE
    total = tl.zeros([TILE_ROWS, TILE], tl.float32)
    first, last = part * STEPS // SPLITS, (part + 1) * STEPS // SPLITS
    scale, zero = scale_and_zero(scales, zero_points, n, first * STEP, inside, N, BITS, GROUP, GROUPS, HAS_ZERO_POINTS)
    for step in range(first, last):
        column = step * STEP
        low = tl.load(place_of_codes + step * (SPANS_AT_ONCE * 8 * BITS), mask=inside[:, None], other=0)
        if BITS == 4:
            low, high = low & 15, low >> 4
        else:
            high = tl.load(place_of_codes + step * (SPANS_AT_ONCE * 64) + 32, mask=inside[:, None], other=0)
        second_scale, second_zero = scale, zero
        if GROUP % 64:
            second_scale, second_zero = scale_and_zero(
                scales, zero_points, n, column + 32, inside, N, BITS, GROUP, GROUPS, HAS_ZERO_POINTS
            )
        next_scale, next_zero = scale_and_zero(
            scales, zero_points, n, column + STEP, inside, N, BITS, GROUP, GROUPS, HAS_ZERO_POINTS
        )
        total += _half(place, column, low, scale, zero, row_mask, COLUMNS, SPANS_AT_ONCE, SCALE_WEIGHTS, DTYPE)
        total += _half(
            place, column + 32, high, second_scale, second_zero, row_mask, COLUMNS, SPANS_AT_ONCE, SCALE_WEIGHTS, DTYPE
        )
        scale, zero = next_scale, next_zero
    return total


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
    SPANS_AT_ONCE: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    DTYPE: tl.constexpr,
    FOLDS: tl.constexpr,
):
    """Grid (ceil(rows / TILE_ROWS), ceil(N / TILE), SPLITS). x [rows, COLUMNS]; codes [N, SPANS * 8 * BITS] uint8.

    scales, zero_points    [GROUPS, N], any float and uint8
    out                    [rows, N], or [SPLITS, rows, N] float32 when SPLITS is more than 1
    FOLDS                  as in matmul.py: the grid's third size is SPLITS, or 1 for the sum of the partials
    SPANS_AT_ONCE          divides SPANS; more than one only where GROUP is a multiple of all their columns
    """
    m = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    split = tl.program_id(2)
    inside, row_mask = n < N, m < rows
    inner = tl.arange(0, 32 * SPANS_AT_ONCE)
    place = x + m.to(tl.int64) * x_stride
    place_of_codes = codes + n.to(tl.int64)[:, None] * (SPANS * 8 * BITS)
    if BITS == 4:
        place_of_codes += inner[None, :]
    else:
        place_of_codes += (inner // 32 * 64 + inner % 32)[None, :]
    if FOLDS:
        count = SPLITS // tl.num_programs(2)
        total = tl.zeros([TILE_ROWS, TILE], tl.float32)
        for part in range(split * count, (split + 1) * count):
            found = _partial(
                place, place_of_codes, scales, zero_points, n, inside, row_mask, part,
                N, COLUMNS, SPANS, GROUP, GROUPS, SPLITS, TILE_ROWS, TILE, SPANS_AT_ONCE,
                BITS, HAS_ZERO_POINTS, SCALE_WEIGHTS, DTYPE,
            )  # fmt: skip
            total += finished(found, bias, n, inside, part, alpha, softcap, SPLITS, HAS_BIAS, HAS_SOFTCAP)
    else:
        found = _partial(
            place, place_of_codes, scales, zero_points, n, inside, row_mask, split,
            N, COLUMNS, SPANS, GROUP, GROUPS, SPLITS, TILE_ROWS, TILE, SPANS_AT_ONCE,
            BITS, HAS_ZERO_POINTS, SCALE_WEIGHTS, DTYPE,
        )  # fmt: skip
        total = finished(found, bias, n, inside, split, alpha, softcap, SPLITS, HAS_BIAS, HAS_SOFTCAP)
    target = out + (split * rows + m).to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=row_mask[:, None] & inside[None, :])
