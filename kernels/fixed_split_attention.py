"""Attention whose bits depend on the query and its keys alone: any batch, any chunk of a prompt, one order of sums.

The context is cut into splits of SPLIT tokens, counted from the sequence's first token, as in "Defeating Nondeterminism
in LLM Inference" (He et al., Thinking Machines, 2025): the size of a split is fixed, not their number. Within a split
keys are read in tiles of TILE tokens with a running softmax; the results of splits are added in their order:

    one program per tile of queries    adds the splits itself
    several                            share the splits and store the state of each; join_fixed_splits adds them

Both are the same sums, bit for bit, though the compiler may fuse a multiplication into an addition in one kernel and
not in the other: the softmax is in base 2 with the largest score rounded up to a whole number, so that all factors
between states are powers of two, and multiplying by them is exact. (Down to 2^-126; what is smaller is 0.)

A sink is a state of its own before the first split: its exponent of 2 is made by the compiler of the program, as a
multiplication by log2(e) here could be fused into a subtraction.

Keys that a query does not see add exact zeros. So it does not matter which other queries share its tile.
"""

import triton
import triton.language as tl

from ingot.kernels.common import (
    LOG2_E,
    NEVER,
    capped,
    query_bounds,
    query_rows,
    seen_tokens,
    store_sums,
    wait_for_inputs,
)
from ingot.kernels.kv_precision import load_vectors, vector_places


@triton.jit
def power_of_two(exponent):
    """2^exponent of whole numbers in float32 that are at most 0; 0 below 2^-126."""
    whole = tl.maximum(exponent, -127.0).to(tl.int32)
    return ((whole + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fixed_split_attention(
    q,
    pool,
    scales,
    tables,
    lengths,
    query_starts,
    tile_sequences,
    tile_starts,
    sinks,
    sums,
    weights,
    out,
    scale,
    softcap,
    window,
    q_stride,
    out_stride,
    table_stride,
    block_stride,
    head_stride,
    value_offset,
    scale_block_stride,
    scale_value_offset,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DTYPE: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (tiles, KV_HEADS * TILE_QUERIES / QUERIES, programs): 1 program writes `out`, more write sums and weights.

    q, out, the pool, lengths, tiles    as in ragged_attention.py
    sinks      [heads] float32: exponents of 2 that take part in the softmax of their head and have no value
    sums       [queries, heads, SPLITS, DIM] float32: sum of 2^(score - largest) * v over the split
    weights    [queries, heads, SPLITS, 2] float32: largest score, rounded up, and sum of 2^(score - largest)
    SPLIT      tokens, a multiple of TILE; SPLITS of them are the longest context
    """
    wait_for_inputs(DEPENDENT)
    tile_index, kv_head = tl.program_id(0), tl.program_id(1) % KV_HEADS
    programs = tl.num_programs(2)
    sequence = tl.load(tile_sequences + tile_index).to(tl.int64)
    if sequence >= 0:
        bounds = query_bounds(sequence, query_starts, lengths)
        start = tl.load(tile_starts + tile_index) + tl.program_id(1) // KV_HEADS * QUERIES
        place, position, head, own = query_rows(
            bounds, start, kv_head * GROUP, GROUP, QUERIES * BLOCK_GROUP, BLOCK_GROUP
        )
        at, inner = tl.arange(0, BLOCK_DIM), tl.arange(0, TILE)
        mask, table = own[:, None] & (at < DIM)[None, :], tables + sequence * table_stride
        vectors = tl.load(q + place[:, None] * q_stride + head[:, None] * DIM + at[None, :], mask=mask, other=0.0)
        vectors = vectors.to(DTYPE)
        largest = tl.zeros([QUERIES * BLOCK_GROUP], tl.float32) + NEVER
        total = tl.zeros([QUERIES * BLOCK_GROUP], tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=own, other=0.0)
            largest = tl.ceil(sink)
            total = tl.exp2(sink - largest)
        found = tl.zeros([QUERIES * BLOCK_GROUP, BLOCK_DIM], tl.float32)
        earliest, end = seen_tokens(bounds, start, window, QUERIES)
        for split in range(earliest // SPLIT + tl.program_id(2), tl.cdiv(end, SPLIT), programs):
            split_largest = tl.zeros([QUERIES * BLOCK_GROUP], tl.float32) + NEVER
            split_total = tl.zeros([QUERIES * BLOCK_GROUP], tl.float32)
            split_found = tl.zeros([QUERIES * BLOCK_GROUP, BLOCK_DIM], tl.float32)
            first, last = tl.maximum(split * SPLIT, earliest // TILE * TILE), tl.minimum((split + 1) * SPLIT, end)
            for tile in range(first, last, TILE):
                token = tile + inner
                known = token < last
                block = tl.load(table + token // BLOCK_TOKENS, mask=known, other=0)
                rows, scale_rows = vector_places(
                    block, token % BLOCK_TOKENS, kv_head, block_stride, head_stride, scale_block_stride,
                    WIDTH, BLOCK_TOKENS,
                )  # fmt: skip
                key = load_vectors(pool, scales, rows, scale_rows, known, WIDTH, DIM, BLOCK_DIM, KIND, DTYPE)
                scores = tl.dot(vectors, tl.trans(key), input_precision="ieee") * scale
                if HAS_SOFTCAP:
                    scores = capped(scores, softcap)
                distance = position[:, None] - token[None, :]
                seen = (distance >= 0) & ((distance < window) | (window == 0))
                scores = tl.where(seen, scores * LOG2_E, NEVER)
                new = tl.maximum(split_largest, tl.ceil(tl.max(scores, 1)))
                shares = tl.where(seen, tl.exp2(scores - new[:, None]), 0.0)
                fade = power_of_two(split_largest - new)
                rows, scale_rows = rows + value_offset, scale_rows + scale_value_offset
                value = load_vectors(pool, scales, rows, scale_rows, known, WIDTH, DIM, BLOCK_DIM, KIND, DTYPE)
                split_total = split_total * fade + tl.sum(shares, 1)
                split_found = split_found * fade[:, None] + tl.dot(shares.to(DTYPE), value, input_precision="ieee")
                split_largest = new
            if programs > 1:
                state = (place * KV_HEADS * GROUP + head) * SPLITS + split
                store_sums(sums, weights, state, at, own, mask, split_largest, split_total, split_found, DIM)
            else:
                new = tl.maximum(largest, split_largest)
                before, added = power_of_two(largest - new), power_of_two(split_largest - new)
                total = total * before + split_total * added
                found = found * before[:, None] + split_found * added[:, None]
                largest = new
        if programs == 1:
            result = tl.div_rn(found, tl.where(total > 0, total, 1.0)[:, None] + tl.zeros_like(found))
            target = out + place[:, None] * out_stride + head[:, None] * DIM + at[None, :]
            tl.store(target, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def join_fixed_splits(
    sums,
    weights,
    positions,
    sinks,
    out,
    window,
    out_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (queries, HEADS). out [queries, HEADS * DIM]: the splits that each query sees, added in their order.

    positions    [queries] int64: the place of each query in its sequence
    AT_ONCE      splits that are loaded before they are added
    """
    wait_for_inputs(DEPENDENT)
    query, head, at = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK_DIM)
    position = tl.load(positions + query).to(tl.int32)
    earliest = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    one = tl.arange(0, 1)
    largest, total = tl.zeros([1], tl.float32) + NEVER, tl.zeros([1], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head + one)
        largest = tl.ceil(sink)
        total = tl.exp2(sink - largest)
    found = tl.zeros([BLOCK_DIM], tl.float32)
    count = position // SPLIT + 1
    for start in range(earliest // SPLIT, count, AT_ONCE):
        for ahead in tl.static_range(AT_ONCE):
            split = start + ahead
            state, known = (query * HEADS + head) * SPLITS + split, split < count
            split_largest = tl.load(weights + state * 2 + one, mask=known & (one == 0), other=NEVER)
            split_total = tl.load(weights + state * 2 + 1 + one, mask=known & (one == 0), other=0.0)
            split_found = tl.load(sums + state * DIM + at, mask=known & (at < DIM), other=0.0)
            new = tl.maximum(largest, split_largest)
            before, added = power_of_two(largest - new), power_of_two(split_largest - new)
            total = total * before + split_total * added
            found = found * before + split_found * added
            largest = new
    result = tl.div_rn(found, tl.where(total > 0, total, 1.0) + tl.zeros_like(found))
    tl.store(out + query * out_stride + head * DIM + at, result.to(out.dtype.element_ty), mask=at < DIM)
