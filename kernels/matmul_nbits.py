"""Matmuls of 16- or 32-bit rows and a 4- or 8-bit weight, dequantized in registers, or before for many rows.

    y = softcap(alpha * x @ W^T + b)
    W[n, k] = (code[n, k] - zero_point[n, k // GROUP]) * scale[n, k // GROUP]             GROUP: 32 or a multiple

Codes are stored in spans of 64 bytes. With 8 bits a span has 64 columns in order. With 4 bits it has 128, in the order
of matmul_int4.py, which multiplies 16-bit rows by such a weight with fewer instructions. Columns are padded to whole
spans.

With few rows the GPU waits for weights: SPLITS programs share the columns of one tile, and the kernel that reads the
result adds the partials, as in matmul.py; scales are loaded a step ahead, and multiply the step's sum. With many rows
the GPU waits for arithmetic: then the scale multiplies the weight before the matmul (SCALE_WEIGHTS).
"""

import triton
import triton.language as tl

from ingot.kernels.common import wait_for_inputs
from ingot.kernels.gated_activation import gated
from ingot.kernels.matmul import finished


@triton.jit
def codes_of(place, inside, column, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Load the codes [tile, WIDTH] of columns from `column` on, a multiple of WIDTH; `place` points at each weight's.

    WIDTH is 32, a whole span, or with 8 bits several spans.
    """
    if BITS == 8:
        codes = tl.load(place[:, None] + column + tl.arange(0, WIDTH)[None, :], mask=inside[:, None], other=0)
    else:
        WORDS: tl.constexpr = WIDTH // 32
        at = tl.arange(0, 16 * WORDS)  # bytes: of 4 words of 4, or of a span
        if WORDS == 1:  # noqa: SIM108
            at = column // 128 * 64 + at // 4 * 16 + column % 128 // 32 * 4 + at % 4
        else:
            at = column // 2 + at
        packed = tl.load(place[:, None] + at[None, :], mask=inside[:, None], other=0)
        halves = tl.reshape(tl.join(packed & 15, packed >> 4), (packed.shape[0], 4, WORDS, 2, 2, 2))
        codes = tl.reshape(tl.permute(halves, (0, 2, 1, 4, 5, 3)), (packed.shape[0], WIDTH))
    return codes


@triton.jit
def _piece(
    x,
    column,
    codes,
    scale,
    zero,
    row_mask,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_PADDED: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Multiply the WIDTH columns that begin at `column`: codes [tile, WIDTH], x a pointer to each row."""
    at = column + tl.arange(0, WIDTH)
    if IS_PADDED:
        rows = tl.load(x[:, None] + at[None, :], mask=row_mask[:, None] & (at < COLUMNS)[None, :], other=0.0)
    else:
        rows = tl.load(x[:, None] + at[None, :], mask=row_mask[:, None], other=0.0)
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
def partial_sums(
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
    """One of SPLITS partials [rows, n]; `place` points at each row of x, `place_of_codes` at each weight's codes."""
    STEPS: tl.constexpr = SPANS // SPANS_AT_ONCE
    STEP: tl.constexpr = 512 // BITS * SPANS_AT_ONCE
    WIDTH: tl.constexpr = STEP if GROUP % STEP == 0 else 32
    total = tl.zeros([TILE_ROWS, TILE], tl.float32)
    first, last = part * STEPS // SPLITS, (part + 1) * STEPS // SPLITS
    scale, zero = scale_and_zero(scales, zero_points, n, first * STEP, inside, N, BITS, GROUP, GROUPS, HAS_ZERO_POINTS)
    for step in range(first, last):
        for piece in tl.static_range(STEP // WIDTH):
            column = step * STEP + piece * WIDTH
            codes = codes_of(place_of_codes, inside, column, WIDTH, BITS)
            next_scale, next_zero = scale_and_zero(
                scales, zero_points, n, column + WIDTH, inside, N, BITS, GROUP, GROUPS, HAS_ZERO_POINTS
            )
            total += _piece(
                place, column, codes, scale, zero, row_mask, COLUMNS, WIDTH, COLUMNS % STEP > 0, SCALE_WEIGHTS, DTYPE
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
    GATE: tl.constexpr = -1,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (ceil(rows / TILE_ROWS), ceil(N / TILE), SPLITS). x [rows, COLUMNS]; codes [N, SPANS * 64] uint8.

    scales, zero_points    [GROUPS, N], any float and uint8
    out                    [rows, N], or [SPLITS, rows, N] float32 when SPLITS is more than 1
    FOLDS, GATE            as in matmul.py: the grid's third size is SPLITS, or 1 for the sum of the partials
    SPANS_AT_ONCE          divides SPANS; 1 with 4 bits
    """
    wait_for_inputs(DEPENDENT)
    m = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    split = tl.program_id(2)
    inside, row_mask = n < N, m < rows
    place = x + m.to(tl.int64) * x_stride
    place_of_codes = codes + n.to(tl.int64) * (SPANS * 64)
    if FOLDS:
        count = SPLITS // tl.num_programs(2)
        total = tl.zeros([TILE_ROWS, TILE], tl.float32)
        for part in range(split * count, (split + 1) * count):
            found = partial_sums(
                place, place_of_codes, scales, zero_points, n, inside, row_mask, part,
                N, COLUMNS, SPANS, GROUP, GROUPS, SPLITS, TILE_ROWS, TILE, SPANS_AT_ONCE,
                BITS, HAS_ZERO_POINTS, SCALE_WEIGHTS, DTYPE,
            )  # fmt: skip
            total += finished(found, bias, n, inside, part, alpha, softcap, SPLITS, HAS_BIAS, HAS_SOFTCAP)
    else:
        found = partial_sums(
            place, place_of_codes, scales, zero_points, n, inside, row_mask, split,
            N, COLUMNS, SPANS, GROUP, GROUPS, SPLITS, TILE_ROWS, TILE, SPANS_AT_ONCE,
            BITS, HAS_ZERO_POINTS, SCALE_WEIGHTS, DTYPE,
        )  # fmt: skip
        total = finished(found, bias, n, inside, split, alpha, softcap, SPLITS, HAS_BIAS, HAS_SOFTCAP)
    if GATE >= 0:
        total = gated(total, GATE, TILE_ROWS, TILE)
        n = tl.program_id(1) * (TILE // 2) + tl.arange(0, TILE // 2)
        inside = n < N // 2
    target = out + (split * rows + m).to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=row_mask[:, None] & inside[None, :])


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
    """Dequantize rows first .. first + count - 1 of W [N, COLUMNS] to out [count, COLUMNS], in 16 bits.

    Grid (ceil(count / TILE), SPANS). For matmuls of so many rows that arithmetic dominates: written once a step into
    the arena and read by matmul.py, in slices that stay in the GPU's cache; for 2048 rows writing costs a few per cent
    of the matmul. W is rounded as the matmul above rounds it in registers.
    """
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
