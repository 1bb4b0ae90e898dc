"""Attention of many queries over their paged keys and values, for SM 90: warps that copy, and warps that compute.

What ragged_attention.py computes, for pools of 16 bits, as FlashAttention-3 does (Shah et al., arXiv:2407.08608). A
program has 128 rows, queries by heads that share keys, and 12 warps:

    4 warps copy       tiles of keys and of values to shared memory, each when all who read the stage before are done
    4 + 4 warps        64 rows each. Scores of the next tile and values of this one are multiplied (wgmma) while the
                       softmax of the next tile is computed; the two groups begin their multiplications in turn, so
                       that one's softmax runs during the other's multiplications

A stage of keys, or of values, has two barriers: `full` counts the threads whose copies have arrived, `empty` the groups
that have read it. Copies and stores are ordered before multiplications, which read shared memory by another way (the
async proxy of the PTX ISA), by a fence after each wait. Nothing else is shared between warps of different roles.

Where heads that share keys are few, a program has more queries than a tile of the launch's list: it computes those of
the tiles after its own, too, whose programs end at once.

Keys are read in tiles of TILE tokens that begin at multiples of TILE; a row's sums have the order of its own tokens,
wherever its tile of queries begins, and tokens that it does not see change nothing: they add 0 and multiply by 1.
"""

import triton.language as tl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ingot.kernels import common
from ingot.kernels.common import LOG2_E, NEVER
from ingot.kernels.gluon import async_copy, async_load, gl, jit, left_of, scores_layout, tile_layout, vectors_layout

ROWS = tl.constexpr(64)  # rows of a group of four warps, and of one wgmma
GROUPS = tl.constexpr(2)  # groups of warps that compute
COPY_THREADS = tl.constexpr(128)
_HIDDEN = tl.constexpr(float("-inf"))  # a score of a token that is not seen

wait_for_inputs = jit(common.wait_for_inputs.fn)


@jit
def _next(stage, phase, STAGES: tl.constexpr):
    """The stage after this one, and the parity of its barriers: it changes each time around."""
    is_last = stage == STAGES - 1
    return gl.where(is_last, 0, stage + 1), gl.where(is_last, phase ^ 1, phase)


@jit
def _softmax(scores, factor, largest, total):
    """Shares of a tile, and the running state: largest exponent, sum of shares, and the factor for older sums."""
    new = gl.maximum(largest, gl.max(scores, 1) * factor)
    shares = gl.exp2(scores * factor - new[:, None])
    fade = gl.exp2(largest - new)
    return shares, fade, new, total * fade + gl.sum(shares, 1)


@jit
def _capped(scores, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """softcap * tanh(score / softcap), by one power of 2 and one quotient; common.capped takes three times as many."""
    if HAS_SOFTCAP:
        power = gl.exp2(scores * (2.0 * LOG2_E * scale / softcap))  # may be infinite: the quotient is 0
        scores = softcap - 2.0 * softcap / (power + 1.0)
    return scores


@jit
def _hidden(scores, tile, position, window, TILE: tl.constexpr, LAYOUT: tl.constexpr):
    """Scores of a tile, those of tokens that a row does not see minus infinity."""
    token = tile + gl.arange(0, TILE, layout=gl.SliceLayout(0, LAYOUT))
    distance = position[:, None] - token[None, :]
    seen = (distance >= 0) & ((distance < window) | (window == 0))
    return gl.where(seen, scores, _HIDDEN)


@jit
def _rows(part, bounds, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, LAYOUT: tl.constexpr):
    """Return the query's index in the batch, head, position and validity for a group's rows in a layout [rows, ..]."""
    begin, count, length, start, kv_head = bounds
    row = part * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    query, member = start + row // BLOCK_GROUP, row % BLOCK_GROUP
    own = (query < count) & (member < GROUP)
    return begin + query, kv_head * GROUP + member, length - count + query, own


@jit
def _compute(
    part,
    given,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One of the groups that compute: rows part * ROWS and following."""
    SCORES: tl.constexpr = scores_layout(TILE)
    FOUND: tl.constexpr = scores_layout(DIM)
    COPIED: tl.constexpr = vectors_layout(DIM)
    q, out, sinks, bounds, span, buffers, barriers, scale, softcap, window, q_stride, out_stride = given
    first, clear, whole, end = span
    queries, keys, values = buffers
    key_full, key_empty, value_full, value_empty, turns = barriers
    queries = queries.index(part)
    place, head, position, own = _rows(part, bounds, GROUP, BLOCK_GROUP, COPIED)
    at = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPIED))
    source = q + place.to(gl.int64)[:, None] * q_stride + (head * DIM)[:, None] + at[None, :]
    queries.store(gl.load(source, mask=own[:, None], other=0.0))
    fence_async_shared()
    gl.barrier()
    place, head, position, own = _rows(part, bounds, GROUP, BLOCK_GROUP, SCORES)
    if HAS_SINKS:
        largest = gl.load(sinks + head, mask=own, other=0.0) * LOG2_E
        total = gl.full((ROWS,), 1.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
    else:
        largest = gl.full((ROWS,), NEVER, gl.float32, layout=gl.SliceLayout(1, SCORES))
        total = gl.full((ROWS,), 0.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
    factor = LOG2_E if HAS_SOFTCAP else scale * LOG2_E
    zeros = gl.full((ROWS, TILE), 0.0, gl.float32, layout=SCORES)
    found = gl.full((ROWS, DIM), 0.0, gl.float32, layout=FOUND)
    if first < end:
        mbarrier.wait(key_full.index(0), 0)
        fence_async_shared()
        scores = warpgroup_mma(queries, keys.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(key_empty.index(0))
        scores = _hidden(_capped(scores, scale, softcap, HAS_SOFTCAP), first, position, window, TILE, SCORES)
        shares, fade, largest, total = _softmax(scores, factor, largest, total)
        shares = gl.convert_layout(shares.to(keys.dtype), left_of(FOUND))
        before, before_phase, turn = 0, 0, 1 - part
        stage, phase = _next(before, before_phase, STAGES)
        mbarrier.wait(key_full.index(stage), phase, pred=first + TILE < end)
        for tile in range(first + TILE, end, TILE):
            mbarrier.wait(value_full.index(before), before_phase)
            # This covers the keys, too: they were waited for at the end of the turn before.
            fence_async_shared()
            mbarrier.wait(turns.index(part), turn)
            scores = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            found = warpgroup_mma(shares, values.index(before), found, is_async=True)
            mbarrier.arrive(turns.index(1 - part))
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(key_empty.index(stage))
            scores = _capped(scores, scale, softcap, HAS_SOFTCAP)
            if (tile < clear) | (tile >= whole):
                scores = _hidden(scores, tile, position, window, TILE, SCORES)
            coming, fade, largest, total = _softmax(scores, factor, largest, total)
            after, after_phase = _next(stage, phase, STAGES)
            # This wait parts blocks of code: ptxas would move the next one before the softmax.
            mbarrier.wait(key_full.index(after), after_phase, pred=tile + TILE < end)
            found, coming = warpgroup_mma_wait(0, deps=[found, coming])
            mbarrier.arrive(value_empty.index(before))
            shares = gl.convert_layout(coming.to(keys.dtype), left_of(FOUND))
            found = found * gl.convert_layout(fade, gl.SliceLayout(1, FOUND))[:, None]
            before, before_phase, stage, phase, turn = stage, phase, after, after_phase, turn ^ 1
        mbarrier.wait(value_full.index(before), before_phase)
        fence_async_shared()
        found = warpgroup_mma(shares, values.index(before), found, is_async=True)
        found = warpgroup_mma_wait(0, deps=[found])
    total = gl.convert_layout(total, gl.SliceLayout(1, FOUND))
    result = found / gl.where(total > 0, total, 1.0)[:, None]
    place, head, position, own = _rows(part, bounds, GROUP, BLOCK_GROUP, FOUND)
    at = gl.arange(0, DIM, layout=gl.SliceLayout(0, FOUND))
    target = out + place.to(gl.int64)[:, None] * out_stride + (head * DIM)[:, None] + at[None, :]
    gl.store(target, result.to(out.dtype.element_ty), mask=own[:, None])


@jit
def _copied(blocks, offset, to, left, MASKED: tl.constexpr, DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Begin to copy blocks from these pointers; with MASKED, tokens from `left` on become zeros."""
    inner = gl.arange(0, BLOCK_TOKENS, layout=gl.SliceLayout(1, vectors_layout(DIM)))
    for number in gl.static_range(len(blocks)):
        target = to.slice(number * BLOCK_TOKENS, BLOCK_TOKENS)
        if MASKED:
            known = number * BLOCK_TOKENS + inner < left
            async_load(target, blocks[number] + offset, mask=known[:, None])
        else:
            async_load(target, blocks[number] + offset)


@jit
def _copy(given, DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr):
    """The warps that copy. Keys after the last token are not masked, but their scores."""
    pool, table, span, buffers, barriers, block_stride, value_offset = given
    first, _, _, end = span
    _, keys, values = buffers
    key_full, key_empty, value_full, value_empty, _ = barriers
    LAYOUT: tl.constexpr = vectors_layout(DIM)
    inner = gl.arange(0, BLOCK_TOKENS, layout=gl.SliceLayout(1, LAYOUT))
    offset = inner[:, None] * DIM + gl.arange(0, DIM, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    last = (end - 1) // BLOCK_TOKENS
    stage, phase = 0, 1
    for tile in range(first, end, TILE):
        blocks = ()
        for piece in gl.static_range(TILE // BLOCK_TOKENS):
            block = gl.load(table + gl.minimum(tile // BLOCK_TOKENS + piece, last)).to(gl.uint32)
            blocks = blocks + (pool + block.to(gl.uint64) * block_stride.to(gl.uint32),)  # type: ignore[assignment]  # noqa: RUF005
        left = end - tile
        mbarrier.wait(key_empty.index(stage), phase)
        _copied(blocks, offset, keys.index(stage), left, False, DIM, BLOCK_TOKENS)
        async_copy.mbarrier_arrive(key_full.index(stage), increment_count=False)
        mbarrier.wait(value_empty.index(stage), phase)
        if left >= TILE:
            _copied(blocks, offset + value_offset, values.index(stage), left, False, DIM, BLOCK_TOKENS)
        else:
            _copied(blocks, offset + value_offset, values.index(stage), left, True, DIM, BLOCK_TOKENS)
        async_copy.mbarrier_arrive(value_full.index(stage), increment_count=False)
        stage, phase = _next(stage, phase, STAGES)


@jit
def prefill_attention(
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
    """Grid, arguments and constants are those of ragged_attention; no scales, KIND 0.

    DIM, BLOCK_DIM, WIDTH    64 or 128, one number
    BLOCK_TOKENS             a power of two, 8 to TILE
    QUERIES                  128 / BLOCK_GROUP; may be more than TILE_QUERIES
    tile_starts              multiples of TILE_QUERIES, all of a sequence's
    """
    gl.static_assert(QUERIES * BLOCK_GROUP == GROUPS * ROWS)
    STAGES: tl.constexpr = 256 // DIM  # what fits shared memory next to the queries, with tiles of 128 tokens
    SHARED: tl.constexpr = tile_layout()
    wait_for_inputs(DEPENDENT)
    tile_index = gl.num_programs(0) - 1 - gl.program_id(0)  # a prompt's last tile has most keys, and begins first
    kv_head = gl.program_id(1)
    named = gl.load(tile_sequences + tile_index)
    sequence = gl.maximum(named, 0).to(gl.int64)
    begin = gl.load(query_starts + sequence)
    tile_start = gl.load(tile_starts + tile_index)
    is_other = (named < 0) | (tile_start % QUERIES != 0) if QUERIES > TILE_QUERIES else named < 0
    count = gl.where(is_other, 0, gl.load(query_starts + sequence + 1) - begin)
    length = gl.load(lengths + sequence)
    start = tile_start + gl.program_id(2) * QUERIES
    position = length - count + start  # position of the program's first query
    end = gl.where(start < count, gl.minimum(position + QUERIES, length), 0)
    first = gl.where(window > 0, gl.maximum(position - window + 1, 0), 0) // TILE * TILE
    clear = gl.where(window > 0, position + QUERIES - window, 0)  # all queries see tiles from here on
    whole = (position + 1) // TILE * TILE  # all queries see tiles before
    queries = gl.allocate_shared_memory(DTYPE, [GROUPS, ROWS, DIM], SHARED)
    keys = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, DIM], SHARED)
    values = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, DIM], SHARED)
    key_full = mbarrier.allocate_mbarrier(batch=STAGES)
    key_empty = mbarrier.allocate_mbarrier(batch=STAGES)
    value_full = mbarrier.allocate_mbarrier(batch=STAGES)
    value_empty = mbarrier.allocate_mbarrier(batch=STAGES)
    turns = mbarrier.allocate_mbarrier(batch=GROUPS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_full.index(stage), COPY_THREADS)
        mbarrier.init(key_empty.index(stage), GROUPS)
        mbarrier.init(value_full.index(stage), COPY_THREADS)
        mbarrier.init(value_empty.index(stage), GROUPS)
    for group in gl.static_range(GROUPS):
        mbarrier.init(turns.index(group), 1)
    bounds, span = (begin, count, length, start, kv_head), (first, clear, whole, end)
    buffers, barriers = (queries, keys, values), (key_full, key_empty, value_full, value_empty, turns)
    given = (q, out, sinks, bounds, span, buffers, barriers, scale, softcap, window, q_stride, out_stride)
    table = tables + sequence * table_stride
    of_copies = (pool + kv_head * head_stride, table, span, buffers, barriers, block_stride, value_offset)
    gl.warp_specialize(
        [
            (_compute, (0, given, GROUP, BLOCK_GROUP, DIM, TILE, STAGES, HAS_SOFTCAP, HAS_SINKS)),
            (_compute, (1, given, GROUP, BLOCK_GROUP, DIM, TILE, STAGES, HAS_SOFTCAP, HAS_SINKS)),
            (_copy, (of_copies, DIM, BLOCK_TOKENS, TILE, STAGES)),
        ],
        [4, 4],
        [216, 72],
    )
