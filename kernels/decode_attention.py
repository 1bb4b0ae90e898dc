"""Attention of one query a sequence over its paged keys and values: split along the context, then joined.

    scores = q . k * scale                    softcap * tanh(scores / softcap) where there is one
    out    = softmax(scores) . v              over the visible tokens: the query's window, or all

A program has a sequence, a KV head and chunks of the context, so that one long sequence fills the GPU (as in
Flash-Decoding, Dao et al., 2023). The program of a sequence and KV head that finishes last joins the chunks' sums, in
their order. The bounds of chunks depend on the sequence's own length and window: so does the order of its sums, and on
nothing else, not on which program is last. With grouped queries (Ainslie et al., arXiv:2305.13245) the heads that share
keys are the rows of one matmul.
"""

import triton
import triton.language as tl

from ingot.kernels.common import LOG2_E, NEVER, capped, is_last, store_sums, wait_for_inputs
from ingot.kernels.kv_precision import (
    FLOAT,
    block_ids,
    kept_apart,
    load_codes,
    operand_type,
    place_in_block,
    power_of_scale,
    query_of_codes,
    vector_places,
)

_MOST_AT_ONCE = 8  # chunks whose sums are loaded at once: 8 x 128 bits of each thread


@triton.constexpr_function
def joined_at_once(chunks):
    """Chunks whose sums are loaded at once, a power of two."""
    return min(triton.next_power_of_2(chunks), _MOST_AT_ONCE)


@triton.jit
def chunks_of(
    length, window, CHUNKS: tl.constexpr, FILLING: tl.constexpr, USUAL_CHUNK: tl.constexpr, TILE: tl.constexpr
):
    """First visible token, begin of chunk 0, and tokens of a chunk: at most CHUNKS chunks of whole tiles.

    A chunk has USUAL_CHUNK tokens; fewer, a tile at least, where FILLING chunks are then nearly filled; more, where
    there would be more than CHUNKS.
    """
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    begin = first // TILE * TILE
    few = tl.maximum((length - begin + FILLING * TILE // 2) // (FILLING * TILE) * TILE, TILE)
    return first, begin, tl.maximum(tl.minimum(few, USUAL_CHUNK), tl.cdiv(tl.cdiv(length - begin, CHUNKS), TILE) * TILE)


@triton.jit
def chunks_of_program(
    length, window, CHUNKS: tl.constexpr, FILLING: tl.constexpr, USUAL_CHUNK: tl.constexpr, TILE: tl.constexpr
):
    """First visible token; the program's first chunk, its first token and its end; tokens of a chunk; how many chunks
    the sequence has, and a program at most. The programs of axis 2 of the grid share the chunks."""
    first, begin, size = chunks_of(length, window, CHUNKS, FILLING, USUAL_CHUNK, TILE)
    chunks = tl.cdiv(length - begin, size)
    count = tl.cdiv(chunks, tl.num_programs(2))
    chunk = tl.program_id(2) * count
    start, end = begin + chunk * size, tl.minimum(begin + (chunk + count) * size, length)
    return first, chunk, start, end, size, chunks, count


@triton.jit
def _joined(
    sums,
    weights,
    sinks,
    first_head,
    place,
    count,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Join `count` chunks, AT_ONCE at a time: [GROUP_BLOCK, BLOCK_DIM]. sums and weights are read from the L2 cache,
    `place` is the first chunk of the first head."""
    group, at, chunk = tl.arange(0, GROUP_BLOCK), tl.arange(0, BLOCK_DIM), tl.arange(0, CHUNKS_BLOCK)
    place += group * CHUNKS
    known = (group < GROUP)[:, None] & (chunk < count)[None, :]
    own = weights + (place[:, None] + chunk[None, :]) * 2
    theirs = tl.load(own, mask=known, other=NEVER, cache_modifier=".cg")
    largest = tl.max(theirs, 1)
    if HAS_SINKS:
        sink = tl.load(sinks + first_head + group, mask=group < GROUP, other=0.0).to(tl.float32) * LOG2_E
        largest = tl.maximum(largest, sink)
    totals = tl.load(own + 1, mask=known, other=0.0, cache_modifier=".cg")
    total = tl.sum(totals * tl.exp2(theirs - largest[:, None]), 1)
    if HAS_SINKS:
        total += tl.exp2(sink - largest)
    found = tl.zeros([GROUP_BLOCK, BLOCK_DIM], tl.float32)
    for start in range(0, count, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            some = (group < GROUP) & (start + i < count)
            which = (place + start + i)[:, None]
            # A score is loaded by each thread that multiplies with it, so that no thread waits for another.
            score = tl.load(
                weights + which * 2 + at[None, :] * 0, mask=some[:, None], other=NEVER, cache_modifier=".cg"
            )
            vectors = sums + which * DIM + at[None, :]
            vectors = tl.load(vectors, mask=some[:, None] & (at < DIM)[None, :], other=0.0, cache_modifier=".cg")
            found += vectors * tl.exp2(score - largest[:, None])
    return found / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def decode_attention(
    q,
    pool,
    scales,
    tables,
    lengths,
    sinks,
    sums,
    weights,
    counters,
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
    CHUNKS: tl.constexpr,
    FILLING: tl.constexpr,
    USUAL_CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DTYPE: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (sequences, KV_HEADS, programs). q, out [sequences, KV_HEADS * GROUP * DIM]; the pool as rotary_kv_write's.

    tables     [sequences, blocks] int32: the sequence's blocks in order
    lengths    [sequences] int32: tokens of the sequence, the query's included; 0 for the bucket's padding, whose rows
               of `out` are zeros
    window     most tokens that a query attends to, its own included; 0: all
    sinks      [KV_HEADS * GROUP] float32: a score per head that takes part in the softmax and has no value
    sums       [sequences, KV_HEADS * GROUP, CHUNKS, DIM] float32: sum of 2^(score - largest) * v
    weights    [sequences, KV_HEADS * GROUP, CHUNKS, 2] float32: largest score, sum of 2^(score - largest)
    counters   [sequences, KV_HEADS] int32: zeros before and after
    WIDTH      elements of the pool per vector; TILE tokens are read at once, USUAL_CHUNK is a multiple of it

    The programs of a sequence and KV head have equally many chunks that follow each other: one loop over their tiles,
    which begins a chunk by dropping the sums of the one before. Any number of programs gives the same bits.
    """
    wait_for_inputs(DEPENDENT)
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    length = tl.load(lengths + sequence)
    first, chunk, start, end, size, chunks, count = chunks_of_program(
        length, window, CHUNKS, FILLING, USUAL_CHUNK, TILE
    )
    at = tl.arange(0, BLOCK_DIM)
    GROUP_BLOCK: tl.constexpr = triton.next_power_of_2(GROUP)
    head = tl.arange(0, GROUP_BLOCK)
    target = out + sequence * out_stride + (kv_head * GROUP + head)[:, None] * DIM + at[None, :]
    inside = (head < GROUP)[:, None] & (at < DIM)[None, :]
    if start < end:
        group, inner = tl.arange(0, BLOCK_GROUP), tl.arange(0, TILE)
        heads = kv_head * GROUP + group
        mask = (group < GROUP)[:, None] & (at < DIM)[None, :]
        query = tl.load(q + sequence * q_stride + heads[:, None] * DIM + at[None, :], mask=mask, other=0.0)
        if KIND == FLOAT:
            query, by = query.to(DTYPE), scale
        else:
            query, by = query_of_codes(query, KIND, DTYPE)
            by *= scale
        table = tables + sequence * table_stride
        largest = tl.zeros([BLOCK_GROUP], tl.float32) + NEVER
        # A total for each place in a tile; the end of a chunk adds them up.
        totals = tl.zeros([BLOCK_GROUP, TILE], tl.float32)
        found = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
        last = start + size - TILE  # tile of the chunk
        # Blocks are read a tile ahead: a load whose address comes from another load of its turn is not pipelined.
        coming = block_ids(table, start, inner, end, BLOCK_TOKENS, TILE)
        for tile in range(start, end, TILE):
            token, block = tile + inner, coming
            coming = block_ids(table, tile + TILE, inner, end, BLOCK_TOKENS, TILE)
            seen = (token >= first) & (token < end)
            place = place_in_block(tile, inner, BLOCK_TOKENS, TILE)
            rows, scale_rows = vector_places(
                block, place, kv_head, block_stride, head_stride, scale_block_stride, WIDTH, BLOCK_TOKENS
            )
            key = kept_apart(load_codes(pool, rows, seen, WIDTH, DIM, BLOCK_DIM, KIND, DTYPE), KIND, DTYPE)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee")
            if KIND != FLOAT:
                scores *= tl.load(scales + scale_rows, mask=seen, other=0.0).to(tl.float32)[None, :]
            if HAS_SOFTCAP:  # noqa: SIM108  a branch of the compiler
                scores = capped(scores * by, softcap) * LOG2_E
            else:
                scores = scores * (by * LOG2_E)
            rows, scale_rows = rows + value_offset, scale_rows + scale_value_offset
            value = kept_apart(load_codes(pool, rows, seen, WIDTH, DIM, BLOCK_DIM, KIND, DTYPE), KIND, DTYPE)
            if KIND != FLOAT:
                # A share times the scale of its value is at most 1, as float16 needs it; the totals are without.
                power, inverse = power_of_scale(tl.load(scales + scale_rows, mask=seen, other=1.0).to(tl.float32))
                scores += power[None, :]
            scores = tl.where(seen[None, :], scores, NEVER)
            new = tl.maximum(largest, tl.max(scores, 1))
            shares, fade = tl.exp2(scores - new[:, None]), tl.exp2(largest - new)
            found *= fade[:, None]
            found += tl.dot(shares.to(operand_type(KIND, DTYPE)), value, input_precision="ieee")
            if KIND != FLOAT:
                shares *= inverse[None, :]
            totals = totals * fade[:, None] + shares
            largest = new
            if (tile == last) | (tile + TILE >= end):
                state = (sequence * KV_HEADS * GROUP + heads) * CHUNKS + chunk
                store_sums(sums, weights, state, at, group < GROUP, mask, largest, tl.sum(totals, 1), found, DIM)
                chunk, last = chunk + 1, last + size
                largest, totals = tl.zeros_like(largest) + NEVER, tl.zeros_like(totals)
                found = tl.zeros_like(found)

        if is_last(counters + sequence * KV_HEADS + kv_head, tl.cdiv(chunks, count)):
            CHUNKS_BLOCK: tl.constexpr = triton.next_power_of_2(CHUNKS)
            AT_ONCE: tl.constexpr = joined_at_once(CHUNKS)
            first_head = kv_head * GROUP
            place = (sequence * KV_HEADS * GROUP + first_head) * CHUNKS
            result = _joined(
                sums, weights, sinks, first_head, place, chunks,
                GROUP, GROUP_BLOCK, DIM, BLOCK_DIM, CHUNKS, CHUNKS_BLOCK, AT_ONCE, HAS_SINKS,
            )  # fmt: skip
            tl.store(target, result.to(out.dtype.element_ty), mask=inside)
    elif (length == 0) & (tl.program_id(2) == 0):
        tl.store(target, tl.zeros([GROUP_BLOCK, BLOCK_DIM], out.dtype.element_ty), mask=inside)
