"""Attention of many queries per sequence over its paged keys and values: prefill, chunks, and mixed batches.

Queries of all sequences are stored end to end. A tile is TILE_QUERIES of one sequence for one KV head, and a program
has QUERIES of these; the heads that share keys are adjacent rows: a row is query // GROUP, head % GROUP. Keys are
read in tiles of TILE tokens with a running softmax (Dao, FlashAttention-2, arXiv:2307.08691), from the first token of
the program's window to the last that its last query attends to. Tiles that all of its queries attend to need no mask;
they have a loop of their own. Powers are of base 2: a score's scale and its exponent are one multiplication.
"""

import triton
import triton.language as tl

from ingot.kernels.common import LOG2_E, NEVER, capped, query_bounds, query_rows, seen_tokens, wait_for_inputs
from ingot.kernels.kv_precision import block_ids, load_vectors, place_in_block, vector_places


@triton.jit
def _scores(vectors, key, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Queries times keys, and the positive factor that makes them exponents of 2; capped ones are scaled."""
    scores = tl.dot(vectors, tl.trans(key), input_precision="ieee")
    if HAS_SOFTCAP:
        return capped(scores * scale, softcap), LOG2_E
    else:  # noqa: RET505  a branch of the compiler
        return scores, scale * LOG2_E


@triton.jit
def ragged_attention(
    q,
    pool,
    scales,
    tables,
    lengths,
    query_starts,
    tile_sequences,
    tile_starts,
    sinks,
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
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DTYPE: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (tiles, KV heads, TILE_QUERIES / QUERIES). q, out [queries, heads * DIM]; the pool as decode_attention's.

    lengths           [sequences] int32: tokens of the sequence, its new ones included
    query_starts      [sequences + 1] int32: where each sequence's queries begin; its last is its last token
    tile_sequences    [tiles] int32: the sequence of the tile, or negative for none
    tile_starts       [tiles] int32: the tile's first query within the sequence's queries
    scale             positive
    BLOCK_GROUP       GROUP's next power of two; QUERIES * BLOCK_GROUP rows, at least 16
    """
    wait_for_inputs(DEPENDENT)
    tile_index = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.load(tile_sequences + tile_index).to(tl.int64)
    if sequence >= 0:
        bounds = query_bounds(sequence, query_starts, lengths)
        _, count, length = bounds
        start = tl.load(tile_starts + tile_index) + tl.program_id(2) * QUERIES
        place, position, head, own = query_rows(
            bounds, start, kv_head * GROUP, GROUP, QUERIES * BLOCK_GROUP, BLOCK_GROUP
        )
        at, inner = tl.arange(0, BLOCK_DIM), tl.arange(0, TILE)
        mask, place = own[:, None] & (at < DIM)[None, :], place[:, None]
        vectors = tl.load(q + place * q_stride + head[:, None] * DIM + at[None, :], mask=mask, other=0.0)
        vectors = vectors.to(DTYPE)
        largest = tl.zeros([QUERIES * BLOCK_GROUP], tl.float32) + NEVER
        total = tl.zeros([QUERIES * BLOCK_GROUP], tl.float32)
        if HAS_SINKS:
            largest = tl.load(sinks + head, mask=own, other=0.0).to(tl.float32) * LOG2_E
            total += 1.0
        found = tl.zeros([QUERIES * BLOCK_GROUP, BLOCK_DIM], tl.float32)
        first, end = seen_tokens(bounds, start, window, QUERIES)
        first = first // TILE * TILE
        whole = (length - count + start + 1) // TILE * TILE  # tokens of tiles that the first query attends to
        whole = tl.where((window > 0) | (start >= count), first, whole)
        table = tables + sequence * table_stride
        # Blocks are read a tile ahead: a load whose address comes from another load of its turn is not pipelined.
        coming = block_ids(table, first, inner, end, BLOCK_TOKENS, TILE)
        for masked in tl.static_range(2):  # tiles that all queries attend to, then the others
            for tile in range(whole if masked else first, end if masked else whole, TILE):
                token, block = tile + inner, coming
                coming = block_ids(table, tile + TILE, inner, end, BLOCK_TOKENS, TILE)
                within = place_in_block(tile, inner, BLOCK_TOKENS, TILE)
                rows, scale_rows = vector_places(
                    block, within, kv_head, block_stride, head_stride, scale_block_stride, WIDTH, BLOCK_TOKENS
                )
                known = token < end if masked else inner < TILE
                key = load_vectors(pool, scales, rows, scale_rows, known, WIDTH, DIM, BLOCK_DIM, KIND, DTYPE)
                scores, factor = _scores(vectors, key, scale, softcap, HAS_SOFTCAP)
                if masked:
                    distance = position[:, None] - token[None, :]
                    seen = (distance >= 0) & ((distance < window) | (window == 0))
                    scores = tl.where(seen, scores, NEVER)
                new = tl.maximum(largest, tl.max(scores, 1) * factor)
                shares, fade = tl.exp2(scores * factor - new[:, None]), tl.exp2(largest - new)
                if masked:
                    shares = tl.where(seen, shares, 0.0)
                rows, scale_rows = rows + value_offset, scale_rows + scale_value_offset
                value = load_vectors(pool, scales, rows, scale_rows, known, WIDTH, DIM, BLOCK_DIM, KIND, DTYPE)
                total = total * fade + tl.sum(shares, 1)
                found = found * fade[:, None] + tl.dot(shares.to(DTYPE), value, input_precision="ieee")
                largest = new
        result = found / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            out + place * out_stride + head[:, None] * DIM + at[None, :], result.to(out.dtype.element_ty), mask=mask
        )
