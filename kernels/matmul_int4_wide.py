"""Matmuls of 16-bit rows and a 4-bit weight for SM 90: warps that copy rows, and warps that multiply.

    y = softcap(alpha * x @ W^T + b)
    W[n, k] = (code[n, k] - zero_point[n, k // GROUP]) * scale[n, k // GROUP]           GROUP: 128 or a multiple

It computes the result of matmul_int4.py from the same codes. There each warp reads all rows of x, more bytes than those
of its codes from 9 rows on. Here a program has 256 rows of the weight and 12 warps:

    4 warps copy       128 columns of all rows to shared memory, the columns in the order of the codes, as soon as the
                       stage's last reader is done
    4 + 4 warps        128 rows of the weight each, in halves of 64. Codes go by 128-bit loads, two spans before their
                       use, to the left operand of wgmma; the rows are its right operand, in shared memory. The
                       groups take turns: one's codes become floats while the other multiplies

A stage of rows has two barriers: `full` counts one arrival of the warps that copy, `empty` those of the two groups that
multiply. A group's turn has one, at which the other arrives once its multiplication has begun. Stores are ordered
before multiplications, which read shared memory by another way (the async proxy of the PTX ISA), by a fence before the
arrival at `full`. Nothing else is shared between warps of different roles.

Scales multiply float32 sums over the columns of a span. Each row of x has its own column of a multiplication: its bits
depend on neither TILE_ROWS nor the other rows. Rows and weights outside the matrix are the last one again, and not
stored.
"""

import triton.language as tl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ingot.kernels import matmul_int4
from ingot.kernels.gluon import (
    gl,
    jit,
    left_of,
    runs_layout,
    runs_of_rows_layout,
    scores_layout,
    tile_layout,
)

GROUPS_THAT_MULTIPLY = tl.constexpr(2)
HALF = tl.constexpr(64)  # rows of a weight in one wgmma; a group has two halves
WARPS = tl.constexpr(4)  # each role has four

finished = matmul_int4.finished
load_span = matmul_int4.load_span
store_result = matmul_int4.store_result
wait_for_inputs = matmul_int4.wait_for_inputs
weight_of = matmul_int4.weight_of


@jit
def _stage_of(turn, STAGES: tl.constexpr):
    """The stage of a turn, and how often the ring went around before, by its parity."""
    return turn % STAGES, turn // STAGES & 1


@jit
def _loaded(
    half,
    quantization,
    span,
    N: tl.constexpr,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
):
    """A span of half of a group's weight, as matmul_int4.load_span returns it."""
    codes, n, n_of_codes = half
    scales, zero_points = quantization
    return load_span(codes, scales, zero_points, n, n_of_codes, span, N, SPANS, GROUP, GROUPS, 4, HAS_ZERO_POINTS)


@jit
def _with_half(
    total,
    loaded,
    half,
    coming,
    quantization,
    rows,
    turns,
    side,
    parity,
    N: tl.constexpr,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The sums [64, rows] of half of a group's weight with those of a loaded span, and the span `coming`, loaded."""
    RESULT: tl.constexpr = scores_layout(TILE_ROWS)
    packed, groups = loaded
    scale, zero = groups[0]
    weight = gl.convert_layout(weight_of(packed, zero, 4, HALF, WARPS, DTYPE), left_of(RESULT), assert_trivial=True)
    new = _loaded(half, quantization, coming, N, SPANS, GROUP, GROUPS, HAS_ZERO_POINTS)
    zeros = gl.full((HALF, TILE_ROWS), 0.0, gl.float32, layout=RESULT)
    mbarrier.wait(turns.index(side), parity)
    sums = warpgroup_mma(weight, rows.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.arrive(turns.index(1 - side))
    sums, weight = warpgroup_mma_wait(0, deps=[sums, weight])
    return total + sums * scale.to(gl.float32)[:, None], new


@jit
def _partial_sums(
    side,
    quantization,
    part,
    first_half,
    second_half,
    ring,
    begin,
    N: tl.constexpr,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """One of SPLITS partials of a group's two halves [64, rows]; the program's first span is `begin`."""
    stages, full, empty, turns = ring
    RESULT: tl.constexpr = scores_layout(TILE_ROWS)
    total = gl.full((HALF, TILE_ROWS), 0.0, gl.float32, layout=RESULT)
    other_total = gl.full((HALF, TILE_ROWS), 0.0, gl.float32, layout=RESULT)
    first, last = part * SPANS // SPLITS, (part + 1) * SPANS // SPLITS
    end = last - 1
    second = gl.minimum(first + 1, end)
    now = _loaded(first_half, quantization, first, N, SPANS, GROUP, GROUPS, HAS_ZERO_POINTS)
    other = _loaded(second_half, quantization, first, N, SPANS, GROUP, GROUPS, HAS_ZERO_POINTS)
    then = _loaded(first_half, quantization, second, N, SPANS, GROUP, GROUPS, HAS_ZERO_POINTS)
    other_then = _loaded(second_half, quantization, second, N, SPANS, GROUP, GROUPS, HAS_ZERO_POINTS)
    for span in range(first, last):
        coming = gl.minimum(span + 2, end)
        stage, phase = _stage_of(span - begin, STAGES)
        mbarrier.wait(full.index(stage), phase)
        rows = stages.index(stage)
        total, new = _with_half(
            total, now, first_half, coming, quantization, rows, turns, side, 1 - side,
            N, SPANS, GROUP, GROUPS, TILE_ROWS, HAS_ZERO_POINTS, DTYPE,
        )  # fmt: skip
        other_total, other_new = _with_half(
            other_total, other, second_half, coming, quantization, rows, turns, side, side,
            N, SPANS, GROUP, GROUPS, TILE_ROWS, HAS_ZERO_POINTS, DTYPE,
        )  # fmt: skip
        mbarrier.arrive(empty.index(stage))
        now, other, then, other_then = then, other_then, new, other_new
    return total, other_total


@jit
def _half(codes, first, N: tl.constexpr, SPANS: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Pointers to the codes of 64 rows of the weight, and these rows in the layouts of results and of codes."""
    WEIGHT: tl.constexpr = runs_layout(HALF, 4, WARPS)
    n = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, scores_layout(TILE_ROWS)))
    n_of_codes = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, WEIGHT))
    # The last program's weights may be beyond the matrix.
    if N % (4 * HALF.value):
        n, n_of_codes = gl.minimum(n, N - 1), gl.minimum(n_of_codes, N - 1)
    words = codes.to(gl.pointer_type(gl.uint32), bitcast=True)
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, WEIGHT))
    return words + n_of_codes.to(gl.int64)[:, None] * (SPANS * 16) + word[None, :], n, n_of_codes


@jit
def _multiply(
    side,
    given,
    N: tl.constexpr,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DTYPE: tl.constexpr,
    FOLDS: tl.constexpr,
    GATE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One of the groups that multiply."""
    codes, quantization, bias, out, rows, out_stride, first_row, first, split, alpha, softcap, ring = given
    RESULT: tl.constexpr = scores_layout(TILE_ROWS)
    first += side * (2 * HALF)
    half, other_half = _half(codes, first, N, SPANS, TILE_ROWS), _half(codes, first + HALF, N, SPANS, TILE_ROWS)
    count = SPLITS // gl.num_programs(2)
    begin = split * count * SPANS // SPLITS
    if FOLDS:
        total = gl.full((HALF, TILE_ROWS), 0.0, gl.float32, layout=RESULT)
        other_total = gl.full((HALF, TILE_ROWS), 0.0, gl.float32, layout=RESULT)
        for part in range(split * count, (split + 1) * count):
            found, other = _partial_sums(
                side, quantization, part, half, other_half, ring, begin,
                N, SPANS, GROUP, GROUPS, SPLITS, TILE_ROWS, STAGES, HAS_ZERO_POINTS, DTYPE,
            )  # fmt: skip
            total += finished(found, bias, half[1], part, alpha, softcap, SPLITS, HAS_BIAS, HAS_SOFTCAP)
            other_total += finished(other, bias, other_half[1], part, alpha, softcap, SPLITS, HAS_BIAS, HAS_SOFTCAP)
    else:
        total, other_total = _partial_sums(
            side, quantization, split, half, other_half, ring, begin,
            N, SPANS, GROUP, GROUPS, SPLITS, TILE_ROWS, STAGES, HAS_ZERO_POINTS, DTYPE,
        )  # fmt: skip
        total = finished(total, bias, half[1], split, alpha, softcap, SPLITS, HAS_BIAS, HAS_SOFTCAP)
        other_total = finished(other_total, bias, other_half[1], split, alpha, softcap, SPLITS, HAS_BIAS, HAS_SOFTCAP)
    wait_for_inputs(DEPENDENT)
    store_result(total, out, rows, out_stride, first_row, first, split,
                 N, HALF, TILE_ROWS, WARPS, RESULT, GATE)  # fmt: skip
    store_result(other_total, out, rows, out_stride, first_row, first + HALF, split,
                 N, HALF, TILE_ROWS, WARPS, RESULT, GATE)  # fmt: skip


@jit
def _copy(
    given,
    COLUMNS: tl.constexpr,
    SPANS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The warps that copy: the spans of all of the program's parts, in turn."""
    x, rows, x_stride, first_row, split, ring = given
    stages, full, empty, _ = ring
    LAYOUT: tl.constexpr = runs_of_rows_layout(TILE_ROWS)
    m = gl.minimum(first_row + gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, LAYOUT)), rows - 1)
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    place = x + m.to(gl.int64)[:, None] * x_stride + column[None, :]
    count = SPLITS // gl.num_programs(2)
    begin = split * count * SPANS // SPLITS
    wait_for_inputs(DEPENDENT)
    for span in range(begin, (split + 1) * count * SPANS // SPLITS):
        if COLUMNS % 128:
            found = gl.load(place + span * 128, mask=(span * 128 + column < COLUMNS)[None, :], other=0.0)
        else:
            found = gl.load(place + span * 128)
        # The order in which matmul_int4.weight_of leaves the columns of codes.
        turned = gl.permute(gl.reshape(found, (TILE_ROWS, 4, 4, 2, 2, 2)), (0, 1, 3, 4, 2, 5))
        stage, phase = _stage_of(span - begin, STAGES)
        mbarrier.wait(empty.index(stage), phase ^ 1)
        stages.index(stage).store(gl.reshape(turned, (TILE_ROWS, 128)))
        fence_async_shared()
        gl.barrier()
        mbarrier.arrive(full.index(stage))


@jit
def matmul_int4_wide(
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
    STAGES: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DTYPE: tl.constexpr,
    FOLDS: tl.constexpr,
    GATE: tl.constexpr = -1,
    DEPENDENT: tl.constexpr = False,
):
    """Grid, arguments and constants are those of matmul_int4, but for these.

    GROUP, TILE    128 or a multiple; 256
    TILE_ROWS      16, 32 or 64
    STAGES         of the ring of rows
    """
    gl.static_assert(TILE == GROUPS_THAT_MULTIPLY * 2 * HALF)
    gl.static_assert(GROUP % 128 == 0)
    first_row, first, split = gl.program_id(0) * TILE_ROWS, gl.program_id(1) * TILE, gl.program_id(2)
    stages = gl.allocate_shared_memory(DTYPE, [STAGES, TILE_ROWS, 128], tile_layout())
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(empty.index(stage), GROUPS_THAT_MULTIPLY)
    turns = mbarrier.allocate_mbarrier(batch=GROUPS_THAT_MULTIPLY)
    for side in gl.static_range(GROUPS_THAT_MULTIPLY):
        mbarrier.init(turns.index(side), 1)
    ring = (stages, full, empty, turns)
    given = (codes, (scales, zero_points), bias, out, rows, out_stride, first_row, first, split, alpha, softcap, ring)
    gl.warp_specialize(
        [
            (_multiply, (0, given, N, SPANS, GROUP, GROUPS, SPLITS, TILE_ROWS, STAGES, HAS_ZERO_POINTS, HAS_BIAS,
                         HAS_SOFTCAP, DTYPE, FOLDS, GATE, DEPENDENT)),
            (_multiply, (1, given, N, SPANS, GROUP, GROUPS, SPLITS, TILE_ROWS, STAGES, HAS_ZERO_POINTS, HAS_BIAS,
                         HAS_SOFTCAP, DTYPE, FOLDS, GATE, DEPENDENT)),
            (_copy, ((x, rows, x_stride, first_row, split, ring), COLUMNS, SPANS, SPLITS, TILE_ROWS, STAGES,
                     DEPENDENT)),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip
