"""Matmuls of rows in the order of experts: each tile of rows is multiplied by its own expert's weight.

    y[place] = x[row of place] @ W[expert of place]^T + b[expert]

grouped_matmul          a weight of 16 or 32 bits          matmul.py's arithmetic
grouped_matmul_nbits    of 4 or 8 bits                     matmul_nbits.py's
grouped_matmul_int4     of 4 bits, rows of 16 bits         matmul_int4.py's

A program finds its expert and its places by its tile (kernels/experts.py), and ends at once if its tile is not needed.
It has whole sums: no split-K, and so one order of sums for any number of rows.

    tile_experts, tile_starts, tile_ends    [tiles] of sort_by_expert
    pairs                                   [places]: row of x times CHOSEN, plus a number below CHOSEN
    CHOSEN                                  0: x is in the order of places itself
    GATE                                    as in matmul.py
"""

import triton
import triton.language as tl

from ingot.kernels import common
from ingot.kernels.gated_activation import gated
from ingot.kernels.gluon import gl, jit, result_layout, rows_layout, runs_layout
from ingot.kernels.kv_precision import FLOAT
from ingot.kernels.matmul import partial_sums as floats_partial
from ingot.kernels.matmul_int4 import partial_sums as int4_partial
from ingot.kernels.matmul_int4 import store_result as int4_store
from ingot.kernels.matmul_int4 import wait_for_inputs as int4_wait
from ingot.kernels.matmul_nbits import partial_sums as nbits_partial

wait_for_inputs = common.wait_for_inputs


@triton.jit
def _sources(pairs, place, row_mask, CHOSEN: tl.constexpr):
    """The row of x of each place."""
    source = place
    if CHOSEN > 0:
        source = tl.load(pairs + place, mask=row_mask, other=0) // CHOSEN
    return source.to(tl.int64)


@triton.jit
def _finish(
    result,
    bias,
    out,
    place,
    row_mask,
    n,
    inside,
    expert,
    out_stride,
    N: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
):
    """Add the bias, gate, and store a tile [rows, n]."""
    if HAS_BIAS:
        result += tl.load(bias + expert * N + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATE >= 0:
        result = gated(result, GATE, TILE_ROWS, TILE)
        n = tl.program_id(1) * (TILE // 2) + tl.arange(0, TILE // 2)
        inside = n < N // 2
    target = out + place.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=row_mask[:, None] & inside[None, :])


@triton.jit
def grouped_matmul(
    x,
    weight,
    bias,
    out,
    pairs,
    tile_experts,
    tile_starts,
    tile_ends,
    x_stride,
    out_stride,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    CHOSEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    GATE: tl.constexpr = -1,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (tiles, ceil(N / TILE)). x [rows, COLUMNS], weight [experts, N, COLUMNS]; out [places, N].

    bias    [experts, N]
    """
    wait_for_inputs(DEPENDENT)
    expert = tl.load(tile_experts + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(tile_starts + tl.program_id(0)) + tl.arange(0, TILE_ROWS)
    row_mask = place < tl.load(tile_ends + tl.program_id(0))
    n, k = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, TILE_COLUMNS)
    inside = n < N
    left = x + _sources(pairs, place, row_mask, CHOSEN)[:, None] * x_stride + k[None, :]
    right = weight + expert * (N * COLUMNS) + n.to(tl.int64)[:, None] * COLUMNS + k[None, :]
    result = floats_partial(
        left, right, x, x, place, n, k, row_mask, inside, 0, COLUMNS, 1, TILE_ROWS, TILE, TILE_COLUMNS, FLOAT, UPCAST
    )
    _finish(
        result, bias, out, place, row_mask, n, inside, expert, out_stride, N, TILE_ROWS, TILE, HAS_BIAS, GATE
    )  # fmt: skip


@triton.jit
def grouped_matmul_nbits(
    x,
    codes,
    scales,
    zero_points,
    bias,
    out,
    pairs,
    tile_experts,
    tile_starts,
    tile_ends,
    x_stride,
    out_stride,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPANS_AT_ONCE: tl.constexpr,
    BITS: tl.constexpr,
    CHOSEN: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    DTYPE: tl.constexpr,
    GATE: tl.constexpr = -1,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (tiles, ceil(N / TILE)). x [rows, COLUMNS]; codes [experts, N, SPANS * 64] uint8; out [places, N].

    scales, zero_points    [experts, GROUPS, N]
    """
    wait_for_inputs(DEPENDENT)
    expert = tl.load(tile_experts + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(tile_starts + tl.program_id(0)) + tl.arange(0, TILE_ROWS)
    row_mask = place < tl.load(tile_ends + tl.program_id(0))
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = n < N
    rows = x + _sources(pairs, place, row_mask, CHOSEN) * x_stride
    place_of_codes = codes + expert * (N * SPANS * 64) + n.to(tl.int64) * (SPANS * 64)
    result = nbits_partial(
        rows, place_of_codes, scales + expert * (GROUPS * N), zero_points + expert * (GROUPS * N), n, inside,
        row_mask, 0, N, COLUMNS, SPANS, GROUP, GROUPS, 1, TILE_ROWS, TILE, SPANS_AT_ONCE,
        BITS, HAS_ZERO_POINTS, SCALE_WEIGHTS, DTYPE,
    )  # fmt: skip
    _finish(
        result, bias, out, place, row_mask, n, inside, expert, out_stride, N, TILE_ROWS, TILE, HAS_BIAS, GATE
    )  # fmt: skip


@jit
def grouped_matmul_int4(
    x,
    codes,
    scales,
    zero_points,
    bias,
    out,
    pairs,
    tile_experts,
    tile_starts,
    tile_ends,
    x_stride,
    out_stride,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    AHEAD: tl.constexpr,
    WARPS: tl.constexpr,
    CHOSEN: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    GATE: tl.constexpr = -1,
    DEPENDENT: tl.constexpr = False,
):
    """The same as grouped_matmul_nbits. TILE_ROWS, TILE, AHEAD and WARPS: as in matmul_int4.py."""
    int4_wait(DEPENDENT)
    expert = gl.load(tile_experts + gl.program_id(0)).to(gl.int64)
    if expert < 0:
        return
    WORDS: tl.constexpr = 4 if GROUP % 128 == 0 else (2 if GROUP % 64 == 0 else 1)
    WEIGHT: tl.constexpr = runs_layout(TILE, 4, WARPS)
    ROWS: tl.constexpr = rows_layout(TILE_ROWS, WORDS, WARPS)
    RESULT: tl.constexpr = result_layout(WARPS)
    start, end = gl.load(tile_starts + gl.program_id(0)), gl.load(tile_ends + gl.program_id(0))
    first = gl.program_id(1) * TILE
    source = gl.minimum(start + gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, ROWS)), end - 1)
    if CHOSEN > 0:
        source = gl.load(pairs + source) // CHOSEN
    column = gl.arange(0, 32 * WORDS, layout=gl.SliceLayout(0, ROWS))
    rows = x + source.to(gl.int64)[:, None] * x_stride + column[None, :]
    n = gl.minimum(first + gl.arange(0, TILE, layout=gl.SliceLayout(1, RESULT)), N - 1)
    n_of_codes = gl.minimum(first + gl.arange(0, TILE, layout=gl.SliceLayout(1, WEIGHT)), N - 1)
    words = codes.to(gl.pointer_type(gl.uint32), bitcast=True) + expert * (N * SPANS * 16)
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, WEIGHT))
    place_of_codes = words + n_of_codes.to(gl.int64)[:, None] * (SPANS * 16) + word[None, :]
    total = int4_partial(
        rows, column, place_of_codes, scales + expert * (GROUPS * N), zero_points + expert * (GROUPS * N), n,
        n_of_codes, first, 0, N, COLUMNS, SPANS, GROUP, GROUPS, 1, TILE_ROWS, TILE, WORDS, AHEAD, WARPS,
        HAS_ZERO_POINTS, DTYPE, False,
    )  # fmt: skip
    if HAS_BIAS:
        total += gl.load(bias + expert * N + n).to(gl.float32)[:, None]
    int4_store(total, out, end, out_stride, start, first, 0, N, TILE, TILE_ROWS, WARPS, RESULT, GATE)
