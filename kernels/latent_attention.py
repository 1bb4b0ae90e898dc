"""Attention to latents (MLA; DeepSeek-V2, arXiv:2405.04434) in its absorbed form: one paged key for all heads.

    key = [rope(k) | latent]               [ROPE + RANK] of a token, in one vector of the pool
    scores = (rope(q) . rope(k) + absorbed . latent) * scale
    out    = softmax(scores) . latent      [HEADS, RANK]; what multiplies it by each head's matrix is head_matmul.py

`q` has each head's part that is rotated, `absorbed` its other part times W_UK of the head. A tile of latents is read
once, and is key and value of all rows of a program: heads of one query in a decode step, queries and heads of a prompt.

latent_decode_attention    one query a sequence; chunks of the context and their joining as in decode_attention.py
latent_ragged_attention    many; one loop over all tiles of keys, each masked, so that a row's bits depend on its query
                           and its keys alone: not on other rows, nor on how its prompt is cut
"""

import triton
import triton.language as tl

from ingot.kernels.common import (
    LOG2_E,
    NEVER,
    is_last,
    load_parts,
    query_bounds,
    query_rows,
    seen_tokens,
    store_sums,
    wait_for_inputs,
)
from ingot.kernels.decode_attention import chunks_of_program
from ingot.kernels.kv_precision import (
    FLOAT,
    block_ids,
    encode,
    load_vectors,
    place_in_block,
    vector_places,
    vector_scale,
)

JOINED_HEADS = tl.constexpr(16)  # heads that have their chunks joined at once


@triton.jit
def rotated(
    part,
    known,
    part_stride,
    position,
    cos,
    sin,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Rotate the halves of vectors that begin at `part` [rows, 1] by their positions [rows, 1]: [rows, BLOCK_ROPE]."""
    at = tl.arange(0, BLOCK_ROPE)[None, :]
    half: tl.constexpr = ROPE // 2
    first = at < half
    mask = known & (at < ROPE)
    x = load_parts(part + at, part_stride, mask, PARTS)
    other = load_parts(part + tl.where(first, at + half, at - half), part_stride, mask, PARTS)
    angle = position * half + tl.where(first, at, at - half)
    c, s = tl.load(cos + angle, mask=mask, other=1.0), tl.load(sin + angle, mask=mask, other=0.0)
    return x * c + tl.where(first, -other, other) * s


@triton.jit
def latent_kv_write(
    latent,
    rope,
    positions,
    slots,
    cos,
    sin,
    norm,
    pool,
    scales,
    epsilon,
    latent_offset,
    rope_offset,
    x_stride,
    part_stride,
    block_stride,
    scale_block_stride,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    KIND: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (tokens,): pool[slot] = [rope(rope) | norm(latent)], in the pool's precision with one scale.

    latent, rope    rows of the same stride and split-K partials, from their offsets on, which need not be aligned
    slots           [tokens] int64: block * BLOCK_TOKENS + token in the block; negative for the bucket's padding
    """
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        at, turned = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
        inside = at < RANK
        x = load_parts(latent + latent_offset + token * x_stride + at, part_stride, inside, PARTS)
        factor = 1.0 / tl.sqrt(tl.sum(x * x) / RANK + epsilon)
        x = x * factor * tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
        own = rope + rope_offset + token * x_stride + tl.zeros([1, 1], tl.int32)
        position = tl.load(positions + token) + tl.zeros([1, 1], tl.int64)
        key = rotated(own, position >= 0, part_stride, position, cos, sin, ROPE, BLOCK_ROPE, PARTS)
        key = tl.reshape(key, [BLOCK_ROPE])
        key = tl.where(turned < ROPE, key, 0.0)
        block, inner = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
        if KIND != FLOAT:
            step = vector_scale(tl.maximum(tl.max(tl.abs(x)), tl.max(tl.abs(key))), KIND)
            x, key = encode(x, step, KIND), encode(key, step, KIND)
            tl.store(scales + block * scale_block_stride + inner, step.to(scales.dtype.element_ty))
        place = pool + block * block_stride + inner * (ROPE + RANK)
        tl.store(place + turned, key.to(pool.dtype.element_ty), mask=turned < ROPE)
        tl.store(place + ROPE + at, x.to(pool.dtype.element_ty), mask=inside)


@triton.jit
def _queries(
    q,
    absorbed,
    place,
    head,
    own,
    position,
    cos,
    sin,
    q_offset,
    q_stride,
    absorbed_stride,
    HEAD_DIM: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Rotated parts [rows, BLOCK_ROPE] and absorbed parts [rows, BLOCK_RANK] of queries `place` [rows] and heads."""
    at = tl.arange(0, BLOCK_RANK)
    part = q + q_offset + place[:, None] * q_stride + head[:, None] * HEAD_DIM
    turned = rotated(part, own[:, None], 0, position[:, None], cos, sin, ROPE, BLOCK_ROPE, 1)
    turned = tl.where(tl.arange(0, BLOCK_ROPE)[None, :] < ROPE, turned, 0.0)
    rows = absorbed + place[:, None] * absorbed_stride + head[:, None] * RANK + at[None, :]
    return turned.to(DTYPE), tl.load(rows, mask=own[:, None] & (at < RANK)[None, :], other=0.0).to(DTYPE)


@triton.jit
def _scores(
    turned,
    absorbed,
    pool,
    scales,
    rows,
    scale_rows,
    known,
    factor,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Exponents of 2 of a tile of keys [rows, tokens], and its latents [tokens, BLOCK_RANK]."""
    key = load_vectors(pool, scales, rows, scale_rows, known, ROPE + RANK, ROPE, BLOCK_ROPE, KIND, DTYPE)
    latent = load_vectors(pool, scales, rows + ROPE, scale_rows, known, ROPE + RANK, RANK, BLOCK_RANK, KIND, DTYPE)
    scores = tl.dot(turned, tl.trans(key), input_precision="ieee")
    scores = tl.dot(absorbed, tl.trans(latent), scores, input_precision="ieee")
    return scores * factor, latent


@triton.jit
def _join(
    sums,
    weights,
    out,
    place,
    first_head,
    count,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
):
    """Join `count` chunks of JOINED_HEADS heads in their order, and store them. `place` is the query's first state."""
    head, at, chunk = first_head + tl.arange(0, JOINED_HEADS), tl.arange(0, BLOCK_RANK), tl.arange(0, CHUNKS_BLOCK)
    state = place + head * CHUNKS
    mask = (head < HEADS)[:, None] & (at < RANK)[None, :]
    known = (head < HEADS)[:, None] & (chunk < count)[None, :]
    own = weights + (state[:, None] + chunk[None, :]) * 2
    theirs = tl.load(own, mask=known, other=NEVER, cache_modifier=".cg")
    largest = tl.max(theirs, 1)
    totals = tl.load(own + 1, mask=known, other=0.0, cache_modifier=".cg")
    total = tl.sum(totals * tl.exp2(theirs - largest[:, None]), 1)
    found = tl.zeros([JOINED_HEADS, BLOCK_RANK], tl.float32)
    for part in range(count):
        score = tl.load(weights + (state + part) * 2, mask=head < HEADS, other=NEVER, cache_modifier=".cg")
        vectors = sums + (state + part)[:, None] * RANK + at[None, :]
        vectors = tl.load(vectors, mask=mask, other=0.0, cache_modifier=".cg")
        found += vectors * tl.exp2(score - largest)[:, None]
    result = found / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + head[:, None] * RANK + at[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def latent_decode_attention(
    q,
    absorbed,
    cos,
    sin,
    pool,
    scales,
    tables,
    lengths,
    sums,
    weights,
    counters,
    out,
    scale,
    q_offset,
    q_stride,
    absorbed_stride,
    out_stride,
    table_stride,
    block_stride,
    scale_block_stride,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr,
    FILLING: tl.constexpr,
    USUAL_CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (sequences, ceil(HEADS / BLOCK_HEADS), programs). out [sequences, HEADS * RANK].

    q            [sequences, HEADS * HEAD_DIM]; the part of head 0 that is rotated begins at q_offset
    absorbed     [sequences, HEADS * RANK]
    tables       [sequences, blocks] int32; lengths [sequences] int32: 0 for the bucket's padding, whose rows of `out`
                 are zeros
    sums         [sequences, HEADS, CHUNKS, RANK] float32; weights [sequences, HEADS, CHUNKS, 2] float32
    counters     [sequences, tiles of heads] int32: zeros before and after
    BLOCK_HEADS  a power of two, at least 16
    """
    wait_for_inputs(DEPENDENT)
    sequence = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * BLOCK_HEADS
    length = tl.load(lengths + sequence)
    _, chunk, start, end, size, chunks, count = chunks_of_program(length, 0, CHUNKS, FILLING, USUAL_CHUNK, TILE)
    at, inner = tl.arange(0, BLOCK_RANK), tl.arange(0, TILE)
    head = first_head + tl.arange(0, BLOCK_HEADS)
    mask = (head < HEADS)[:, None] & (at < RANK)[None, :]
    if start < end:
        turned, latents = _queries(
            q, absorbed, sequence + head * 0, head, head < HEADS, length - 1 + head * 0, cos, sin,
            q_offset, q_stride, absorbed_stride, HEAD_DIM, RANK, BLOCK_RANK, ROPE, BLOCK_ROPE, DTYPE,
        )  # fmt: skip
        table = tables + sequence * table_stride
        largest = tl.zeros([BLOCK_HEADS], tl.float32) + NEVER
        total = tl.zeros([BLOCK_HEADS], tl.float32)
        found = tl.zeros([BLOCK_HEADS, BLOCK_RANK], tl.float32)
        last = start + size - TILE  # tile of the chunk
        # Blocks are read a tile ahead: a load whose address comes from another load of its turn is not pipelined.
        coming = block_ids(table, start, inner, end, BLOCK_TOKENS, TILE)
        for tile in range(start, end, TILE):
            token, block = tile + inner, coming
            coming = block_ids(table, tile + TILE, inner, end, BLOCK_TOKENS, TILE)
            within = place_in_block(tile, inner, BLOCK_TOKENS, TILE)
            rows, scale_rows = vector_places(
                block, within, 0, block_stride, 0, scale_block_stride, ROPE + RANK, BLOCK_TOKENS
            )
            scores, values = _scores(
                turned, latents, pool, scales, rows, scale_rows, token < end, scale * LOG2_E,
                RANK, BLOCK_RANK, ROPE, BLOCK_ROPE, KIND, DTYPE,
            )  # fmt: skip
            scores = tl.where((token < end)[None, :], scores, NEVER)
            new = tl.maximum(largest, tl.max(scores, 1))
            shares, fade = tl.exp2(scores - new[:, None]), tl.exp2(largest - new)
            total = total * fade + tl.sum(shares, 1)
            found = tl.dot(shares.to(DTYPE), values, found * fade[:, None], input_precision="ieee")
            largest = new
            if (tile == last) | (tile + TILE >= end):
                state = (sequence * HEADS + head) * CHUNKS + chunk
                store_sums(sums, weights, state, at, head < HEADS, mask, largest, total, found, RANK)
                chunk, last = chunk + 1, last + size
                largest, total = tl.zeros_like(largest) + NEVER, tl.zeros_like(total)
                found = tl.zeros_like(found)

        if is_last(counters + sequence * tl.num_programs(1) + tl.program_id(1), tl.cdiv(chunks, count)):
            CHUNKS_BLOCK: tl.constexpr = triton.next_power_of_2(CHUNKS)
            for joined in range(0, BLOCK_HEADS, JOINED_HEADS):
                _join(
                    sums, weights, out + sequence * out_stride, sequence * HEADS * CHUNKS, first_head + joined, chunks,
                    HEADS, RANK, BLOCK_RANK, CHUNKS, CHUNKS_BLOCK,
                )  # fmt: skip
    elif (length == 0) & (tl.program_id(2) == 0):
        target = out + sequence * out_stride + head[:, None] * RANK + at[None, :]
        tl.store(target, tl.zeros([BLOCK_HEADS, BLOCK_RANK], out.dtype.element_ty), mask=mask)


@triton.jit
def latent_ragged_attention(
    q,
    absorbed,
    cos,
    sin,
    pool,
    scales,
    tables,
    lengths,
    query_starts,
    tile_sequences,
    tile_starts,
    out,
    scale,
    q_offset,
    q_stride,
    absorbed_stride,
    out_stride,
    table_stride,
    block_stride,
    scale_block_stride,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (tiles, ceil(HEADS / BLOCK_HEADS), TILE_QUERIES / QUERIES). q, absorbed, out [queries, ...] as above.

    lengths, query_starts, tile_sequences, tile_starts    as in ragged_attention.py
    QUERIES * BLOCK_HEADS                                 rows of a program, at least 16
    """
    wait_for_inputs(DEPENDENT)
    sequence = tl.load(tile_sequences + tl.program_id(0)).to(tl.int64)
    if sequence >= 0:
        bounds = query_bounds(sequence, query_starts, lengths)
        start = tl.load(tile_starts + tl.program_id(0)) + tl.program_id(2) * QUERIES
        first_head = tl.program_id(1) * BLOCK_HEADS
        place, position, head, own = query_rows(
            bounds, start, first_head, HEADS - first_head, QUERIES * BLOCK_HEADS, BLOCK_HEADS
        )
        at, inner = tl.arange(0, BLOCK_RANK), tl.arange(0, TILE)
        turned, latents = _queries(
            q, absorbed, place, head, own, position, cos, sin,
            q_offset, q_stride, absorbed_stride, HEAD_DIM, RANK, BLOCK_RANK, ROPE, BLOCK_ROPE, DTYPE,
        )  # fmt: skip
        largest = tl.zeros([QUERIES * BLOCK_HEADS], tl.float32) + NEVER
        total = tl.zeros([QUERIES * BLOCK_HEADS], tl.float32)
        found = tl.zeros([QUERIES * BLOCK_HEADS, BLOCK_RANK], tl.float32)
        _, end = seen_tokens(bounds, start, 0, QUERIES)
        table = tables + sequence * table_stride
        # Blocks are read a tile ahead: a load whose address comes from another load of its turn is not pipelined.
        coming = block_ids(table, 0, inner, end, BLOCK_TOKENS, TILE)
        for tile in range(0, end, TILE):
            token, block = tile + inner, coming
            coming = block_ids(table, tile + TILE, inner, end, BLOCK_TOKENS, TILE)
            within = place_in_block(tile, inner, BLOCK_TOKENS, TILE)
            rows, scale_rows = vector_places(
                block, within, 0, block_stride, 0, scale_block_stride, ROPE + RANK, BLOCK_TOKENS
            )
            scores, values = _scores(
                turned, latents, pool, scales, rows, scale_rows, token < end, scale * LOG2_E,
                RANK, BLOCK_RANK, ROPE, BLOCK_ROPE, KIND, DTYPE,
            )  # fmt: skip
            seen = token[None, :] <= position[:, None]
            scores = tl.where(seen, scores, NEVER)
            new = tl.maximum(largest, tl.max(scores, 1))
            shares, fade = tl.where(seen, tl.exp2(scores - new[:, None]), 0.0), tl.exp2(largest - new)
            total = total * fade + tl.sum(shares, 1)
            found = tl.dot(shares.to(DTYPE), values, found * fade[:, None], input_precision="ieee")
            largest = new
        result = found / tl.where(total > 0, total, 1.0)[:, None]
        target = out + place[:, None] * out_stride + head[:, None] * RANK + at[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=own[:, None] & (at < RANK)[None, :])
