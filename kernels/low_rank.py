"""LoRA adapters of a step's rows: y += alpha * B (A x), each row with the adapter of its own slot, or with none.

    low_rank_shrink    t = A x, of the rows that have an adapter
    low_rank_expand    y += alpha * (B t), in place: no other row is read or written, so that it keeps its bits

Rows with one adapter are neighbours in an order that the host makes; a unit is up to TILE_ROWS of them (Punica,
arXiv:2310.18547). How many units there are, where an adapter's matrices are and how large its ranks are is read from
memory when the kernels run: one captured launch serves every batch and every set of loaded adapters.

    units    [4 + 3 * units] int32: how many units there are, ranks of a row of results, elements of a slot's part of
             table and of spans; then of each unit its slot, first place and number of rows
    rows     [places] int32: the row at a place of that order
    table    [slots, layers, 4] int64: elements of the pool before A and before B, ranks of A, ranks of a row of B; 0
             ranks where the slot's adapter does not change the layer
    spans    [slots, tiles of all layers, 2] int32: for TILE rows of B the first of their ranks, and their number; a
             matrix of several projections has the ranks of all, and a row has values for those of its own
    pool     A [ranks, columns] and B [rows, ranks of a row]; they begin at multiples of 16 elements, and ranks are
             multiples of TILE_RANKS, padded with zeros
    results  [places, SPLITS, ranks of a row of results] float32: SPLITS programs share the columns of x, and the reader
             adds their partial sums in order
"""

import triton
import triton.language as tl

from ingot.kernels.common import wait_for_inputs

IN_ORDER, GATE_FIRST, FACTOR_FIRST = (tl.constexpr(order) for order in range(3))


@triton.jit
def _aligned(place):
    """A number in memory that is a multiple of 16, which lets the compiler use vector loads."""
    return tl.multiple_of(tl.load(place), 16)


@triton.jit
def low_rank_shrink(
    x,
    pool,
    table,
    units,
    rows,
    results,
    columns,
    x_stride,
    SPLITS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_RANKS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (any, SPLITS): programs of the first axis share the units. x [rows, columns]; table begins at the layer.

    UPCAST    multiply in float32, as in matmul.py
    """
    wait_for_inputs(DEPENDENT)
    part, count, width = tl.program_id(1), tl.load(units), tl.load(units + 1)
    steps = tl.cdiv(columns, TILE_COLUMNS)
    m, r, k = tl.arange(0, TILE_ROWS), tl.arange(0, TILE_RANKS), tl.arange(0, TILE_COLUMNS)
    for unit in range(tl.program_id(0), count, tl.num_programs(0)):
        entry = table + tl.load(units + 4 + 3 * unit).to(tl.int64) * tl.load(units + 2)
        ranks = tl.load(entry + 2).to(tl.int32)
        place = tl.load(units + 5 + 3 * unit) + m
        row_mask = m < tl.load(units + 6 + 3 * unit)
        row = tl.load(rows + place, mask=row_mask, other=0).to(tl.int64)
        left = x + row[:, None] * x_stride + k[None, :]
        right = pool + _aligned(entry) + r.to(tl.int64)[None, :] * columns + k[:, None]
        target = results + (place.to(tl.int64) * SPLITS + part)[:, None] * width + r[None, :]
        for rank in range(0, ranks, TILE_RANKS):
            a = right + rank * columns
            total = tl.zeros([TILE_ROWS, TILE_RANKS], tl.float32)
            for step in range(part * steps // SPLITS, (part + 1) * steps // SPLITS):
                column = step * TILE_COLUMNS
                known = column + k < columns
                of_x = tl.load(left + column, mask=row_mask[:, None] & known[None, :], other=0.0)
                of_a = tl.load(a + column, mask=known[:, None], other=0.0)
                if UPCAST:
                    of_x, of_a = of_x.to(tl.float32), of_a.to(tl.float32)
                total = tl.dot(of_x, of_a, total, input_precision="ieee")
            tl.store(target + rank, total, mask=row_mask[:, None])


@triton.jit
def _columns(n, outputs, ORDER: tl.constexpr):
    """Columns of the result for rows of B: gates and ups of one matrix may be interleaved (gated_activation.py)."""
    column = n
    if ORDER != IN_ORDER:
        is_second = n >= outputs // 2
        at = tl.where(is_second, n - outputs // 2, n)
        is_factor = is_second if ORDER == GATE_FIRST else n < outputs // 2
        column = at // 8 * 16 + at % 8 + tl.where(is_factor, 8, 0)
    return column


@triton.jit
def _low(results, place, rank, width, row_mask, SPLITS: tl.constexpr):
    """t [rows, ranks] of these places and ranks: partial sums in order."""
    at = results + place.to(tl.int64)[:, None] * (SPLITS * width) + rank[None, :]
    t = tl.zeros([place.shape[0], rank.shape[0]], tl.float32)
    for part in tl.static_range(SPLITS):
        t += tl.load(at + part * width, mask=row_mask[:, None], other=0.0)
    return t


@triton.jit
def _add(out, at, delta, mask, part_stride, alpha, PARTS: tl.constexpr):
    """out[at] += alpha * delta, and its other partials become zeros."""
    target = out + at
    total = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        is_apart = mask & (part_stride > 0)
        total += tl.load(target + part * part_stride, mask=is_apart, other=0.0).to(tl.float32)
        tl.store(target + part * part_stride, tl.zeros(delta.shape, out.dtype.element_ty), mask=is_apart)
    tl.store(target, (total + delta * alpha).to(out.dtype.element_ty), mask=mask)


@triton.jit
def low_rank_expand(
    results,
    pool,
    table,
    spans,
    units,
    rows,
    out,
    outputs,
    out_stride,
    part_stride,
    alpha,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_RANKS: tl.constexpr,
    ORDER: tl.constexpr,
    BY_ROW: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (any, ceil(outputs / TILE)). out [rows, outputs]; table and spans begin at the layer.

    PARTS          partials of out (common.load_parts) that are added before: the sum is then as in a program that has
                   added them, whose reader adds zeros, too; the others become zeros. 1: the first is added to
    part_stride    elements between the partials; 0: out is their sum
    ORDER          of the columns of out; B's rows are in the order of the checkpoint
    BY_ROW         without tensor cores, row by row: units of few rows would waste most of their tiles
    """
    wait_for_inputs(DEPENDENT)
    PRECISION: tl.constexpr = "ieee" if pool.dtype.element_ty == tl.float32 else "tf32"
    count, width = tl.load(units), _aligned(units + 1)
    n, m, r = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, TILE_ROWS), tl.arange(0, TILE_RANKS)
    inside, wide = n < outputs, width.to(tl.int64) * SPLITS
    column = _columns(n, outputs, ORDER)
    for unit in range(tl.program_id(0), count, tl.num_programs(0)):
        slot = tl.load(units + 4 + 3 * unit).to(tl.int64)
        span = spans + slot * tl.load(units + 3) + 2 * tl.program_id(1)
        first, number = _aligned(span), tl.load(span + 1)
        if number > 0:
            entry = table + slot * tl.load(units + 2)
            begin, many = tl.load(units + 5 + 3 * unit), tl.load(units + 6 + 3 * unit)
            right = pool + _aligned(entry + 1) + n.to(tl.int64)[:, None] * _aligned(entry + 3) + r[None, :]
            if BY_ROW:
                for place in range(begin, begin + many):
                    delta = tl.zeros([TILE], tl.float32)
                    low = results + place * wide + first + r
                    for rank in range(0, number, TILE_RANKS):
                        t = tl.load(low + rank)
                        for part in tl.static_range(1, SPLITS):
                            t += tl.load(low + part * width + rank)
                        b = tl.load(right + rank, mask=inside[:, None], other=0.0).to(tl.float32)
                        delta += tl.sum(b * t[None, :], axis=1)
                    at = tl.load(rows + place).to(tl.int64) * out_stride + column
                    _add(out, at, delta, inside, part_stride, alpha, PARTS)
            else:
                place, row_mask = begin + m, m < many
                delta = tl.zeros([TILE_ROWS, TILE], tl.float32)
                for rank in range(0, number, TILE_RANKS):
                    t = _low(results, place, first + rank + r, width, row_mask, SPLITS)
                    b = tl.load(right + rank, mask=inside[:, None], other=0.0).to(tl.float32)
                    delta = tl.dot(t, tl.trans(b), delta, input_precision=PRECISION)
                row = tl.load(rows + place, mask=row_mask, other=0).to(tl.int64)
                at = row[:, None] * out_stride + column[None, :]
                _add(out, at, delta, row_mask[:, None] & inside[None, :], part_stride, alpha, PARTS)
