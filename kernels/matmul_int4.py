"""Matmuls of 16-bit rows and a 4-bit weight whose codes go from 128-bit loads straight into tensor cores.

    y = softcap(alpha * x @ W^T + b)
    W[n, k] = (code[n, k] - zero_point[n, k // GROUP]) * scale[n, k // GROUP]             GROUP: 32 or a multiple

The weight is the left operand of a multiplication of 16 x 16 by 16 x 8, for which thread 4 g + t of a warp supplies
columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of rows g and g + 8. A sum does not depend on how its columns are numbered.
Here they are numbered so that a thread's part of a span of 128 columns is 16 bytes of codes in one run, and four runs
of 16 bytes of a row of x. Threads exchange no codes and no rows.

    word 4 t + w of a span    columns 32 w + 8 t + i for i = 0, 2, 4, 6, 1, 3, 5, 7, each in 4 bits, lowest first

Two codes become two 16-bit floats in one instruction, and their zero point is subtracted in one more, exactly
(gluon.py). Scales multiply float32 sums over the columns of one group. Rows and weights outside the matrix are the last
one again, and not stored.

Codes, scales and zero points are loaded AHEAD spans before their use. One or two are in registers. With two, a turn
loads both at once, and a barrier between these loads and the sums keeps the compiler from putting off the loads, by
which it would save registers. More are copied to a ring of AHEAD + 1 spans in shared memory, past registers and the L1
cache, so that few warps keep enough bytes in flight. A thread reads the codes that it copied, and scales of others.

Each row of x has its own column of a multiplication: its bits depend on neither TILE_ROWS nor the other rows.
"""

import triton.language as tl

from ingot.kernels import common, gated_activation
from ingot.kernels.gluon import (
    async_copy,
    async_load,
    base_of,
    copied_layout,
    gated_layout,
    gl,
    jit,
    left_layout,
    mma,
    plain_layout,
    result_layout,
    right_layout,
    rows_layout,
    runs_layout,
    unpack,
)

capped = jit(common.capped.fn)
activated = jit(gated_activation.activated.fn)
wait_for_inputs = jit(common.wait_for_inputs.fn)


@jit
def weight_of(packed, zero, WORDS: tl.constexpr, TILE: tl.constexpr, WARPS: tl.constexpr, DTYPE: tl.constexpr):
    """Codes minus zero points [TILE, 32 * WORDS]: packed [TILE, 4 * WORDS] uint32, zero points [TILE]."""
    halves = gl.reshape(gl.join(packed.to(gl.uint16), (packed >> 16).to(gl.uint16)), (TILE, 8 * WORDS))
    halves = gl.convert_layout(halves, runs_layout(TILE, 2 * WORDS, WARPS), assert_trivial=True)
    offset = (-base_of(DTYPE) - zero.to(gl.float32)).to(DTYPE)
    offset = gl.convert_layout(offset, gl.SliceLayout(1, runs_layout(TILE, 2 * WORDS, WARPS)), assert_trivial=True)
    first, second, third, fourth = unpack(halves, offset[:, None], DTYPE)
    codes = gl.join(gl.join(first, second), gl.join(third, fourth))
    codes = gl.reshape(codes, (TILE, 4, WORDS, 2, 2, 2))  # row, thread, word, half, and two bits of the place in it
    return gl.reshape(gl.permute(codes, (0, 2, 5, 4, 1, 3)), (TILE, 32 * WORDS))


@jit
def _multiplied(
    packed,
    zero,
    x,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Sums of a weight times x: packed [TILE, 4 * WORDS] uint32, x [TILE_ROWS, 32 * WORDS]."""
    weight = weight_of(packed, zero, WORDS, TILE, WARPS, DTYPE)
    rows = gl.permute(gl.reshape(x, (TILE_ROWS, WORDS, 4, 2, 2, 2)), (1, 3, 4, 2, 5, 0))  # the same order of columns
    return mma(
        gl.convert_layout(weight, left_layout(WARPS), assert_trivial=True),
        gl.convert_layout(gl.reshape(rows, (32 * WORDS, TILE_ROWS)), right_layout(WARPS), assert_trivial=True),
        gl.full((TILE, TILE_ROWS), 0.0, gl.float32, layout=result_layout(WARPS)),
    )


@jit
def _pieces(packed, WORDS: tl.constexpr, TILE: tl.constexpr, WARPS: tl.constexpr):
    """Parts of a span's words [TILE, 16] with WORDS words of each thread."""
    if WORDS == 4:
        pieces = (packed,)
    elif WORDS == 2:
        halves = gl.reshape(packed, (TILE, 4, 2, 2))
        low, high = gl.split(gl.permute(halves, (0, 1, 3, 2)))
        pieces = (_aligned(low, 2, TILE, WARPS), _aligned(high, 2, TILE, WARPS))  # type: ignore[assignment]  # in a branch of a constant
    else:
        even, odd = gl.split(gl.reshape(packed, (TILE, 4, 2, 2)))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        pieces = (  # type: ignore[assignment]
            _aligned(first, 1, TILE, WARPS),
            _aligned(second, 1, TILE, WARPS),
            _aligned(third, 1, TILE, WARPS),
            _aligned(fourth, 1, TILE, WARPS),
        )
    return pieces


@jit
def _aligned(words, WORDS: tl.constexpr, TILE: tl.constexpr, WARPS: tl.constexpr):
    words = gl.reshape(words, (TILE, 4 * WORDS))
    return gl.convert_layout(words, runs_layout(TILE, WORDS, WARPS), assert_trivial=True)


@jit
def _group_of(column, SPANS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """The group of a column; columns after the last one are in its group."""
    group = column // GROUP
    if GROUP * GROUPS < 128 * SPANS:
        group = gl.minimum(group, GROUPS - 1)
    return group


@jit
def _scale_and_zero(
    scales,
    zero_points,
    n,
    n_of_codes,
    column,
    N: tl.constexpr,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
):
    """Scale and zero point [tile] of the group that a column is in."""
    group = _group_of(column, SPANS, GROUP, GROUPS)
    scale = gl.load(scales + group * N + n)
    if HAS_ZERO_POINTS:  # noqa: SIM108
        zero = gl.load(zero_points + group * N + n_of_codes)
    else:
        zero = (n_of_codes * 0 + 8).to(gl.uint8)
    return scale, zero


@jit
def load_span(
    codes,
    scales,
    zero_points,
    n,
    n_of_codes,
    span,
    N: tl.constexpr,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
):
    """A span's codes, and (scale, zero point) of each of its pieces of WORDS words."""
    found = ()
    for piece in tl.static_range(4 // WORDS):
        column = span * 128 + piece * 32 * WORDS
        found += (  # type: ignore[assignment]  # a longer tuple by each turn of the compiler
            _scale_and_zero(scales, zero_points, n, n_of_codes, column, N, SPANS, GROUP, GROUPS, HAS_ZERO_POINTS),
        )
    return gl.load(codes + span * 16), found


@jit
def _with_span(
    total,
    loaded,
    x,
    column,
    span,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    WARPS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The sums with a span's, of what `load_span` loaded."""
    pieces = _pieces(loaded[0], WORDS, TILE, WARPS)
    for piece in tl.static_range(4 // WORDS):
        at = span * 128 + piece * 32 * WORDS
        if COLUMNS % 128:  # noqa: SIM108  a branch of the compiler
            rows = gl.load(x + at, mask=(at + column < COLUMNS)[None, :], other=0.0)
        else:
            rows = gl.load(x + at)
        scale, zero = loaded[1][piece]
        sums = _multiplied(pieces[piece], zero, rows, WORDS, TILE, TILE_ROWS, WARPS, DTYPE)
        total += sums * scale.to(gl.float32)[:, None]
    return total


@jit
def _copy_span(
    ring,
    slot,
    codes,
    scales,
    zero_points,
    first,
    span,
    N: tl.constexpr,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    WARPS: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
):
    """Begin to copy a span of the weights from `first` on to a slot of the ring, with what its pieces need."""
    ring_codes, ring_scales, ring_zeros = ring
    async_load(ring_codes.index(slot), codes + span * 16)
    for piece in tl.static_range(4 // WORDS):
        group = _group_of(span * 128 + piece * 32 * WORDS, SPANS, GROUP, GROUPS)
        at = slot * (4 // WORDS) + piece
        n = first + gl.arange(0, TILE, layout=copied_layout(scales.dtype.element_ty, WARPS))
        async_load(ring_scales.index(at), scales + group * N + n, mask=n < N)
        if HAS_ZERO_POINTS:
            n = first + gl.arange(0, TILE, layout=copied_layout(gl.uint8, WARPS))
            async_load(ring_zeros.index(at), zero_points + group * N + n, mask=n < N)


@jit
def _read_span(
    ring,
    slot,
    n_of_codes,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    WARPS: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
):
    """Return what `load_span` does, from a slot of the ring."""
    ring_codes, ring_scales, ring_zeros = ring
    WEIGHT: tl.constexpr = runs_layout(TILE, 4, WARPS)
    found = ()
    for piece in tl.static_range(4 // WORDS):
        at = slot * (4 // WORDS) + piece
        scale = ring_scales.index(at).load(gl.SliceLayout(1, result_layout(WARPS)))
        if HAS_ZERO_POINTS:
            zero = ring_zeros.index(at).load(gl.SliceLayout(1, WEIGHT))
        else:
            zero = (n_of_codes * 0 + 8).to(gl.uint8)
        found += ((scale, zero),)  # type: ignore[assignment]
    return ring_codes.index(slot).load(WEIGHT), found


@jit
def _ring_sums(
    total,
    x,
    column,
    codes,
    scales,
    zero_points,
    n_of_codes,
    tile,
    first,
    last,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LONGEST: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    AHEAD: tl.constexpr,
    WARPS: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    DTYPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The sums with spans first .. last - 1 of the weights from `tile` on, in shared memory AHEAD spans before.

    LONGEST    spans of a part at most
    """
    PIECES: tl.constexpr = (AHEAD + 1) * 4 // WORDS
    # Copies that no part has are not in the code: Triton 3.7 compiles none that it can see is never made.
    ring = (
        gl.allocate_shared_memory(gl.uint32, [AHEAD + 1, TILE, 16], plain_layout(2)),
        gl.allocate_shared_memory(scales.dtype.element_ty, [PIECES, TILE], plain_layout(1)),
        gl.allocate_shared_memory(gl.uint8, [PIECES, TILE], plain_layout(1)),
    )
    for slot in tl.static_range(AHEAD):
        if slot < LONGEST:  # noqa: SIM102  a branch of the compiler
            if first + slot < last:
                _copy_span(ring, slot, codes, scales, zero_points, tile, first + slot,
                           N, SPANS, GROUP, GROUPS, TILE, WORDS, WARPS, HAS_ZERO_POINTS)  # fmt: skip
        async_copy.commit_group()
    wait_for_inputs(DEPENDENT)
    for span in range(first, last):
        # A group for each span, also for those after the last: this one's is done when AHEAD - 1 newer ones are not.
        async_copy.wait_group(AHEAD - 1)
        if AHEAD < LONGEST:
            coming = span + AHEAD
            if coming < last:
                _copy_span(ring, (coming - first) % (AHEAD + 1), codes, scales, zero_points, tile, coming,
                           N, SPANS, GROUP, GROUPS, TILE, WORDS, WARPS, HAS_ZERO_POINTS)  # fmt: skip
        async_copy.commit_group()
        loaded = _read_span(ring, (span - first) % (AHEAD + 1), n_of_codes, TILE, WORDS, WARPS, HAS_ZERO_POINTS)
        total = _with_span(total, loaded, x, column, span, COLUMNS, TILE_ROWS, TILE, WORDS, WARPS, DTYPE)
    return total


@jit
def partial_sums(
    x,
    column,
    codes,
    scales,
    zero_points,
    n,
    n_of_codes,
    tile,
    part,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    AHEAD: tl.constexpr,
    WARPS: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    DTYPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One of SPLITS partials [n, rows] of the weights from `tile` on.

    x are pointers to `column` [32 * WORDS] of each row, codes to each weight's.

    The first weights are on their way before the program waits for the launch that writes x.
    """
    total = gl.full((TILE, TILE_ROWS), 0.0, gl.float32, layout=result_layout(WARPS))
    first, last = part * SPANS // SPLITS, (part + 1) * SPANS // SPLITS
    if AHEAD > 2:
        total = _ring_sums(
            total, x, column, codes, scales, zero_points, n_of_codes, tile, first, last,
            N, COLUMNS, SPANS, GROUP, GROUPS, (SPANS + SPLITS - 1) // SPLITS, TILE_ROWS, TILE, WORDS, AHEAD, WARPS,
            HAS_ZERO_POINTS, DTYPE, DEPENDENT,
        )  # fmt: skip
    else:
        end = last - 1
        now = load_span(codes, scales, zero_points, n, n_of_codes, first,
                    N, SPANS, GROUP, GROUPS, WORDS, HAS_ZERO_POINTS)  # fmt: skip
        if AHEAD == 1:
            wait_for_inputs(DEPENDENT)
            for span in range(first, last):
                new = load_span(codes, scales, zero_points, n, n_of_codes, gl.minimum(span + 1, end),
                            N, SPANS, GROUP, GROUPS, WORDS, HAS_ZERO_POINTS)  # fmt: skip
                total = _with_span(total, now, x, column, span, COLUMNS, TILE_ROWS, TILE, WORDS, WARPS, DTYPE)
                now = new
        else:
            then = load_span(codes, scales, zero_points, n, n_of_codes, gl.minimum(first + 1, end),
                         N, SPANS, GROUP, GROUPS, WORDS, HAS_ZERO_POINTS)  # fmt: skip
            wait_for_inputs(DEPENDENT)
            left = first + (last - first) // 2 * 2
            for span in range(first, left, 2):
                new = load_span(codes, scales, zero_points, n, n_of_codes, gl.minimum(span + 2, end),
                            N, SPANS, GROUP, GROUPS, WORDS, HAS_ZERO_POINTS)  # fmt: skip
                newer = load_span(codes, scales, zero_points, n, n_of_codes, gl.minimum(span + 3, end),
                              N, SPANS, GROUP, GROUPS, WORDS, HAS_ZERO_POINTS)  # fmt: skip
                gl.barrier()
                total = _with_span(total, now, x, column, span, COLUMNS, TILE_ROWS, TILE, WORDS, WARPS, DTYPE)
                total = _with_span(total, then, x, column, span + 1, COLUMNS, TILE_ROWS, TILE, WORDS, WARPS, DTYPE)
                now, then = new, newer
            if left < last:
                total = _with_span(total, now, x, column, left, COLUMNS, TILE_ROWS, TILE, WORDS, WARPS, DTYPE)
    return total


@jit
def matmul_int4(
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
    AHEAD: tl.constexpr,
    WARPS: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DTYPE: tl.constexpr,
    FOLDS: tl.constexpr,
    GATE: tl.constexpr = -1,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (ceil(rows / TILE_ROWS), ceil(N / TILE), SPLITS). x [rows, COLUMNS]; codes [N, SPANS * 64] uint8.

    scales, zero_points    [GROUPS, N], any float and uint8
    out                    [rows, N], or [SPLITS, rows, N] float32 when SPLITS is more than 1
    TILE_ROWS, TILE        a multiple of 8, and of 16 * WARPS: powers of two
    AHEAD                  1, 2 or more; more than 2 where N is a multiple of 16
    WARPS                  of a program
    FOLDS, GATE            as in matmul.py: the grid's third size is SPLITS, or 1 for the sum of the partials
    """
    WORDS: tl.constexpr = 4 if GROUP % 128 == 0 else (2 if GROUP % 64 == 0 else 1)
    WEIGHT: tl.constexpr = runs_layout(TILE, 4, WARPS)
    ROWS: tl.constexpr = rows_layout(TILE_ROWS, WORDS, WARPS)
    RESULT: tl.constexpr = result_layout(WARPS)
    first_row, first = gl.program_id(0) * TILE_ROWS, gl.program_id(1) * TILE
    split = gl.program_id(2)
    m = gl.minimum(first_row + gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, ROWS)), rows - 1)
    column = gl.arange(0, 32 * WORDS, layout=gl.SliceLayout(0, ROWS))
    place = x + m.to(gl.int64)[:, None] * x_stride + column[None, :]
    n = gl.minimum(first + gl.arange(0, TILE, layout=gl.SliceLayout(1, RESULT)), N - 1)
    n_of_codes = gl.minimum(first + gl.arange(0, TILE, layout=gl.SliceLayout(1, WEIGHT)), N - 1)
    words = codes.to(gl.pointer_type(gl.uint32), bitcast=True)
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, WEIGHT))
    place_of_codes = words + n_of_codes.to(gl.int64)[:, None] * (SPANS * 16) + word[None, :]
    if FOLDS:
        count = SPLITS // gl.num_programs(2)
        total = gl.full((TILE, TILE_ROWS), 0.0, gl.float32, layout=RESULT)
        for part in range(split * count, (split + 1) * count):
            found = partial_sums(
                place, column, place_of_codes, scales, zero_points, n, n_of_codes, first, part,
                N, COLUMNS, SPANS, GROUP, GROUPS, SPLITS, TILE_ROWS, TILE, WORDS, AHEAD, WARPS, HAS_ZERO_POINTS, DTYPE,
                DEPENDENT,
            )  # fmt: skip
            total += finished(found, bias, n, part, alpha, softcap, SPLITS, HAS_BIAS, HAS_SOFTCAP)
    else:
        found = partial_sums(
            place, column, place_of_codes, scales, zero_points, n, n_of_codes, first, split,
            N, COLUMNS, SPANS, GROUP, GROUPS, SPLITS, TILE_ROWS, TILE, WORDS, AHEAD, WARPS, HAS_ZERO_POINTS, DTYPE,
            DEPENDENT,
        )  # fmt: skip
        total = finished(found, bias, n, split, alpha, softcap, SPLITS, HAS_BIAS, HAS_SOFTCAP)
    store_result(total, out, rows, out_stride, first_row, first, split, N, TILE, TILE_ROWS, WARPS, RESULT, GATE)


@jit
def store_result(
    total,
    out,
    rows,
    out_stride,
    first_row,
    first,
    split,
    N: tl.constexpr,
    TILE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    LAYOUT: tl.constexpr,
    GATE: tl.constexpr,
):
    """Store a tile [n, rows] of sums in LAYOUT, or with GATE the gated activation of them."""
    if GATE >= 0:
        _store_sums(_gated_sums(total, GATE, TILE, TILE_ROWS, WARPS), out, rows, out_stride, first_row, first // 2, 0,
                N // 2, TILE // 2, TILE_ROWS, gated_layout(TILE, TILE_ROWS, WARPS))  # fmt: skip
    else:
        _store_sums(total, out, rows, out_stride, first_row, first, split, N, TILE, TILE_ROWS, LAYOUT)


@jit
def _gated_sums(total, GATE: tl.constexpr, TILE: tl.constexpr, TILE_ROWS: tl.constexpr, WARPS: tl.constexpr):
    """The same as gated_activation.gated, for a result [n, rows]: a thread has gate and up in rows g and g + 8."""
    halves = gl.permute(gl.reshape(total, (TILE // 16, 2, 8, TILE_ROWS)), (0, 2, 3, 1))
    gate, up = gl.split(halves)
    result = gl.reshape(activated(gate, None, GATE) * up, (TILE // 2, TILE_ROWS))
    return gl.convert_layout(result, gated_layout(TILE, TILE_ROWS, WARPS), assert_trivial=True)


@jit
def _store_sums(
    total,
    out,
    rows,
    out_stride,
    first_row,
    first,
    split,
    N: tl.constexpr,
    TILE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Store a tile [n, rows] of the result."""
    row = first_row + gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(0, LAYOUT))
    at = first + gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    target = out + (split * rows + row).to(gl.int64)[None, :] * out_stride + at[:, None]
    gl.store(target, total.to(out.dtype.element_ty), mask=(row < rows)[None, :] & (at < N)[:, None])


@jit
def finished(
    total,
    bias,
    n,
    split,
    alpha,
    softcap,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """The same as matmul.finished, for a result [n, rows]."""
    total = total * alpha
    if HAS_BIAS:
        known = gl.load(bias + n).to(gl.float32)
        total += gl.where(split == 0, known, 0.0)[:, None]
    if HAS_SOFTCAP and SPLITS == 1:
        total = capped(total, softcap)
    return total
