"""Mixtures of experts: which experts compute a row, the order of rows by expert, and the sum of their results.

    route_rows        scores of the router's logits, the chosen experts of each row, and their weights
    sort_by_expert    pairs of row and expert in the order of experts, and tiles of pairs of one expert each
    combine_experts   y[row] = sum over j of weights[row, j] * results[place of (row, j)], in the order of j

Between them kernels/grouped_matmul.py multiplies the tiles. Shapes and grids depend on the number of rows alone, not on
what is chosen: nothing waits for the host, and a program is one CUDA graph. passes/numerics/experts.py defines the
numbers.
"""

import triton
import triton.language as tl

from ingot.kernels.common import load_parts, sigmoid, wait_for_inputs

SOFTMAX, SIGMOID, SPARSEMIXER = (tl.constexpr(kind) for kind in range(3))


@triton.jit
def _first_of_largest(values, is_open, at):
    """The place of the largest open value, the first of equal ones; NaN is the least."""
    known = tl.where(is_open & (values == values), values, float("-inf"))
    is_largest = is_open & (known == tl.max(known))
    return tl.min(tl.where(is_largest, at, values.shape[0]))


@triton.jit
def _open_experts(
    ranked,
    at,
    COUNT: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):
    """Return a mask of experts that may be chosen: those of the groups with the largest sums of GROUP_BEST scores."""
    is_open = at < COUNT
    if CHOSEN_GROUPS < GROUPS:
        SIZE: tl.constexpr = COUNT // GROUPS
        group = at // SIZE
        sums = tl.full(at.shape, float("-inf"), tl.float32)  # place g has the sum of group g
        for one in range(GROUPS):
            is_own = is_open & (group == one)
            first = _first_of_largest(ranked, is_own, at)
            largest = tl.max(tl.where(at == first, ranked, float("-inf")))
            if GROUP_BEST == 2:
                largest += tl.max(tl.where(is_own & (at != first), ranked, float("-inf")))
            sums = tl.where(at == one, largest, sums)
        is_chosen, is_left = at < 0, at < GROUPS
        for _ in range(CHOSEN_GROUPS):
            one = _first_of_largest(sums, is_left, at)
            is_left = is_left & (at != one)
            is_chosen = is_chosen | (group == one)
        is_open = is_open & is_chosen
    return is_open


@triton.jit
def route_rows(
    logits,
    bias,
    slots,
    ids,
    weights,
    logits_stride,
    part_stride,
    least_sum,
    scale,
    margin,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
    PARTS: tl.constexpr,
    SCORE: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    NORMALISES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP_BEST: tl.constexpr = 2,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (rows,). logits [rows, COUNT] in PARTS, bias [COUNT] float32; ids and weights [rows, CHOSEN], float32.

    slots          [rows] int64: a row with a negative one is padding, and its ids are -1
    BLOCK          the next power of two of COUNT, BLOCK_CHOSEN of CHOSEN
    CHOSEN_GROUPS  of GROUPS groups of consecutive experts; equal: all
    GROUP_BEST     1 or 2: scores of a group that are added to rank it, the largest ones
    margin         of SPARSEMIXER, without bias and groups; see ingot.passes.numerics.experts.Routing
    """
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at, place = tl.arange(0, BLOCK), tl.arange(0, BLOCK_CHOSEN)
    inside = at < COUNT
    x = load_parts(logits + row * logits_stride + at, part_stride, inside, PARTS)
    if SCORE == SOFTMAX:
        raised = tl.where(inside, tl.exp(x - tl.max(tl.where(inside, x, float("-inf")))), 0.0)
        scores = raised / tl.sum(raised)
    else:
        scores = sigmoid(x) if SCORE == SIGMOID else x
    ranked = x if SCORE == SOFTMAX and not HAS_BIAS and GROUPS == 1 else scores  # the same order, not rounded
    if HAS_BIAS:
        ranked += tl.load(bias + at, mask=inside, other=0.0)
    is_open = _open_experts(ranked, at, COUNT, GROUPS, CHOSEN_GROUPS, GROUP_BEST)
    chosen, found, total = tl.zeros([BLOCK_CHOSEN], tl.int32), tl.zeros([BLOCK_CHOSEN], tl.float32), 0.0
    for j in range(CHOSEN):
        expert = _first_of_largest(ranked, is_open, at)
        score = tl.sum(tl.where(at == expert, scores, 0.0))
        if SCORE == SPARSEMIXER:  # the share in a softmax over those left that are near
            is_near = is_open & (score - x <= margin * tl.maximum(tl.abs(x), score))
            score = 1.0 / tl.sum(tl.where(is_near, tl.exp(x - score), 0.0))
        is_open = is_open & (at != expert)
        chosen, found = tl.where(place == j, expert, chosen), tl.where(place == j, score, found)
        total += score
    if NORMALISES:
        found /= tl.maximum(total, least_sum)
    is_padding = tl.load(slots + row) < 0
    target = row * CHOSEN + place
    tl.store(ids + target, tl.where(is_padding, -1, chosen), mask=place < CHOSEN)
    tl.store(weights + target, found * scale, mask=place < CHOSEN)


@triton.jit
def sort_by_expert(
    ids,
    places,
    pairs,
    tile_experts,
    tile_starts,
    tile_ends,
    num_pairs,
    num_tiles,
    COUNT: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (COUNT,): a program for each expert. ids [num_pairs] int32, -1 for none.

    places        [num_pairs] where each pair is in the order of experts, and of ids in each; of -1 it is not written
    pairs         [num_pairs] the same, inverted: which pair is in each place
    tile_experts  [num_tiles] expert of each tile of up to TILE_ROWS places, -1 for a tile that is not needed
    tile_starts   [num_tiles] first place of a tile; tile_ends: the place after the last one of its expert
    BINS          the next power of two of COUNT

    All programs count all pairs: reading them is cheap, and no program waits for another.
    """
    wait_for_inputs(DEPENDENT)
    expert = tl.program_id(0)
    bins, at = tl.arange(0, BINS), tl.arange(0, BLOCK)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        found = tl.load(ids + first + at, mask=first + at < num_pairs, other=-1)
        counts += tl.histogram(tl.maximum(found, 0), BINS, mask=found >= 0)
    start = tl.sum(tl.where(bins < expert, counts, 0))
    own = tl.sum(tl.where(bins == expert, counts, 0))
    needed = (counts + (TILE_ROWS - 1)) // TILE_ROWS
    first_tile = tl.sum(tl.where(bins < expert, needed, 0))
    own_tiles = (own + TILE_ROWS - 1) // TILE_ROWS
    for first in range(0, own_tiles, BLOCK):
        tile = first + at
        is_own = tile < own_tiles
        tl.store(tile_experts + first_tile + tile, tl.zeros_like(tile) + expert, mask=is_own)
        tl.store(tile_starts + first_tile + tile, start + tile * TILE_ROWS, mask=is_own)
        tl.store(tile_ends + first_tile + tile, tl.zeros_like(tile) + start + own, mask=is_own)
    if expert == COUNT - 1:
        for first in range(first_tile + own_tiles, num_tiles, BLOCK):
            tl.store(tile_experts + first + at, tl.zeros_like(at) - 1, mask=first + at < num_tiles)
    if own > 0:
        for first in range(0, num_pairs, BLOCK):
            found = tl.load(ids + first + at, mask=first + at < num_pairs, other=-1)
            is_own = found == expert
            place = start + tl.cumsum(is_own.to(tl.int32), 0) - 1
            tl.store(places + first + at, place, mask=is_own)
            tl.store(pairs + place, first + at, mask=is_own)
            start += tl.sum(is_own.to(tl.int32))


@triton.jit
def combine_experts(
    results,
    ids,
    places,
    weights,
    out,
    results_stride,
    out_stride,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (rows, ceil(COLUMNS / BLOCK)). results [rows * CHOSEN, COLUMNS] by place; out [rows, COLUMNS].

    A row of padding, whose ids are -1, becomes zeros.
    """
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < COLUMNS
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(CHOSEN):
        known = tl.load(ids + row * CHOSEN + j) >= 0
        place = tl.load(places + row * CHOSEN + j, mask=known, other=0).to(tl.int64)
        term = tl.load(results + place * results_stride + at, mask=inside & known, other=0.0).to(tl.float32)
        total += term * tl.load(weights + row * CHOSEN + j, mask=known, other=0.0)
    tl.store(out + row * out_stride + at, total.to(out.dtype.element_ty), mask=inside)
