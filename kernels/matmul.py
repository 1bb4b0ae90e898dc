"""Matmuls with a weight of 16 bits, or of 8 bits with a scale per row of the weight.

    FLOAT           y = x @ W^T
    FP8             y = (x @ W^T) * x_scale[row] * w_scale[n]     x, W e4m3fn, sums float32
    INT8            y = (x @ W^T) * x_scale[row] * w_scale[n]     x, W int8, sums int32: exact
    FP8_WEIGHT      y = (x @ W^T) * w_scale[n]                    x 16 bits, W e4m3fn, widened before the matmul

and then softcap(alpha * y + b). With few rows the GPU waits for weights: SPLITS programs share the columns of one tile,
and the kernel that reads the result adds the partials in order; the first partial contains the bias. (Split-K without
atomics: the order of a sum is fixed.)

With FOLDS the grid decides at run time which programs compute the partials: SPLITS programs store one each, or a single
one adds all of them in the reader's order and stores their sum. Both give the same bits where alpha is 1: a partial is
rounded before it is added, and the multiplication by alpha, which the compiler may fuse with the addition, is exact.
"""

import triton
import triton.language as tl

from ingot.kernels.common import capped, wait_for_inputs
from ingot.kernels.gated_activation import gated
from ingot.kernels.kv_precision import FLOAT, FP8, INT8

FP8_WEIGHT = tl.constexpr(3)


@triton.jit
def finished(
    total,
    bias,
    n,
    inside,
    split,
    alpha,
    softcap,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Finish a result [rows, n] or a partial: times alpha, the bias added once, capped unless it is a partial."""
    total = total * alpha
    if HAS_BIAS:
        total += tl.load(bias + n, mask=inside & (split == 0), other=0.0).to(tl.float32)[None, :]
    if HAS_SOFTCAP and SPLITS == 1:
        total = capped(total, softcap)
    return total


@triton.jit
def partial_sums(
    left,
    right,
    x_scales,
    weight_scales,
    m,
    n,
    k,
    row_mask,
    inside,
    part,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One of SPLITS partials [rows, n], scaled; left and right are pointers [rows, k] and [n, k]."""
    SUM: tl.constexpr = tl.float32 if KIND != INT8 or UPCAST else tl.int32
    STEPS: tl.constexpr = (COLUMNS + TILE_COLUMNS - 1) // TILE_COLUMNS
    total = tl.zeros([TILE_ROWS, TILE], SUM)
    for step in range(part * STEPS // SPLITS, (part + 1) * STEPS // SPLITS):
        column = step * TILE_COLUMNS
        if COLUMNS % TILE_COLUMNS == 0:
            a = tl.load(left + column, mask=row_mask[:, None], other=0.0)
            b = tl.load(right + column, mask=inside[:, None], other=0.0)
        else:
            known = (column + k < COLUMNS)[None, :]
            a = tl.load(left + column, mask=row_mask[:, None] & known, other=0.0)
            b = tl.load(right + column, mask=inside[:, None] & known, other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        elif KIND == FP8_WEIGHT:
            b = b.to(a.dtype)
        if KIND == FP8 and not UPCAST:  # tensor cores of SM 90 keep 14 bits of a sum: limit it to one step
            total = tl.dot(a, tl.trans(b), total, out_dtype=SUM, max_num_imprecise_acc=TILE_COLUMNS)
        else:
            total = tl.dot(
                a, tl.trans(b), total, out_dtype=SUM, input_precision="ieee"
            )  # else SM 80 cuts float32 short
    result = total.to(tl.float32)
    if KIND == FP8 or KIND == INT8:  # noqa: SIM109  # no `in` in Triton's language
        result *= tl.load(x_scales + m, mask=row_mask, other=0.0)[:, None]
    if KIND != FLOAT:
        result *= tl.load(weight_scales + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    return result


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
    alpha,
    softcap,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    FOLDS: tl.constexpr,
    GATE: tl.constexpr = -1,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (ceil(N / TILE) * ceil(rows / TILE_ROWS), SPLITS). x [rows, COLUMNS], weight [N, COLUMNS].

    x_scales, weight_scales    [rows] and [N] float32
    out       [rows, N], or [SPLITS, rows, N] float32 when SPLITS is more than 1
    FOLDS     the grid's second size is SPLITS, or 1 for the sum of the partials, [1, rows, N]
    BAND      row tiles that run together, for the cache
    GATE      an activation of gated_activation.py, for a weight of interleaved gates and ups: out [rows, N / 2]
    UPCAST    multiply in float32: for the interpreter, whose bfloat16 and 8-bit matmuls are not the GPU's
    """
    wait_for_inputs(DEPENDENT)
    row_tiles, tiles = tl.cdiv(rows, TILE_ROWS), tl.cdiv(N, TILE)
    program, split = tl.program_id(0), tl.program_id(1)
    band = program // (BAND * tiles)
    height = tl.minimum(row_tiles - band * BAND, BAND)
    inner = program - band * BAND * tiles
    m = (band * BAND + inner % height) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    n = (inner // height) * TILE + tl.arange(0, TILE)
    k = tl.arange(0, TILE_COLUMNS)
    row_mask, inside = m < rows, n < N
    left = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    right = weight + n.to(tl.int64)[:, None] * COLUMNS + k[None, :]
    if FOLDS:
        count = SPLITS // tl.num_programs(1)
        result = tl.zeros([TILE_ROWS, TILE], tl.float32)
        for part in range(split * count, (split + 1) * count):
            total = partial_sums(
                left, right, x_scales, weight_scales, m, n, k, row_mask, inside, part,
                COLUMNS, SPLITS, TILE_ROWS, TILE, TILE_COLUMNS, KIND, UPCAST,
            )  # fmt: skip
            result += finished(total, bias, n, inside, part, alpha, softcap, SPLITS, HAS_BIAS, HAS_SOFTCAP)
    else:
        total = partial_sums(
            left, right, x_scales, weight_scales, m, n, k, row_mask, inside, split,
            COLUMNS, SPLITS, TILE_ROWS, TILE, TILE_COLUMNS, KIND, UPCAST,
        )  # fmt: skip
        result = finished(total, bias, n, inside, split, alpha, softcap, SPLITS, HAS_BIAS, HAS_SOFTCAP)
    if GATE >= 0:
        result = gated(result, GATE, TILE_ROWS, TILE)
        n = (inner // height) * (TILE // 2) + tl.arange(0, TILE // 2)
        inside = n < N // 2
    target = out + (split * rows + m).to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=row_mask[:, None] & inside[None, :])
