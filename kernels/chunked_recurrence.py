"""The gated delta rule and the scan of Mamba-2 over prompts: chunks of tokens at once, as matmuls.

With G the sums of decays from a chunk's first token on, S the state before it and u as in recurrence.py,

    A[i, j] = gate[i] exp(G[i] - G[j]) k[i]^T k[j]  for j < i          T = (I + A)^-1
    P[i, j] = scale exp(G[i] - G[j]) q[i]^T k[j]    for j <= i
    u = T gate (v - exp(G) k S)                                        a scan: u = gate v
    o = scale exp(G) q S + P u
    S = exp(G[last]) S + (exp(G[last] - G) k)^T u

(the WY form of Yang et al., arXiv:2406.06484 and 2412.06464; Dao and Gu, arXiv:2405.21060). recurrence_chunks computes
T and P of all chunks at once; chunked_recurrence goes from chunk to chunk, a program for some columns of S.

A chunk is CHUNK positions of the sequence, from a multiple of CHUNK on: steps of a prompt that end at such multiples
give the same bits as one step. Others do not, because the state is rounded where a step ends. Sequences with few tokens
in the step are left to recurrence.py, so that a token of decoding has the same bits in any step.
"""

import triton
import triton.language as tl

from ingot.kernels.common import wait_for_inputs
from ingot.kernels.recurrence import state_tile, unit_factor

SIDE = tl.constexpr(16)  # side of the blocks that are inverted row by row


@triton.jit
def _inverse(lower, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 of a strictly lower triangular matrix [CHUNK, CHUNK].

    Blocks D on the diagonal are inverted by forward substitution. With N the rest and M = D^-1 N, whose fourth power is
    zero, (D + N)^-1 = (I - M)(I + M^2) D^-1. Powers of all of `lower` would cancel: where keys repeat, they grow beyond
    10^16 (binomial coefficients), while the inverse stays small.
    """
    COUNT: tl.constexpr = CHUNK // SIDE
    tl.static_assert(COUNT <= 4)
    own = tl.arange(0, COUNT)[:, None, None, None] == tl.arange(0, COUNT)[None, None, :, None]
    blocks = tl.reshape(lower, [COUNT, SIDE, COUNT, SIDE])
    diagonal = tl.sum(tl.where(own, blocks, 0.0), 2)  # [COUNT, SIDE, SIDE]
    row = tl.arange(0, SIDE)[None, :, None]
    inverse = tl.zeros([COUNT, SIDE, SIDE], tl.float32)
    inverse += tl.where(row == tl.arange(0, SIDE)[None, None, :], 1.0, 0.0)
    for at in range(1, SIDE):
        line = tl.sum(tl.where(row == at, diagonal, 0.0), 1)  # [COUNT, SIDE]
        change = tl.sum(line[:, :, None] * inverse, 1)
        inverse -= tl.where(row == at, change[:, None, :], 0.0)
    whole = tl.reshape(tl.where(own, inverse[:, :, None, :], 0.0), [CHUNK, CHUNK])
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    rest = tl.where(i // SIDE == j // SIDE, 0.0, lower)
    m = tl.dot(whole, rest, input_precision=PRECISION)
    squared = tl.dot(m, m, input_precision=PRECISION)
    series = squared - m - tl.dot(m, squared, input_precision=PRECISION)
    return whole + tl.dot(series, whole, input_precision=PRECISION)


@triton.jit
def _chunk(lengths, query_starts, SEQUENCES: tl.constexpr, BLOCK_SEQUENCES: tl.constexpr, CHUNK: tl.constexpr,
           LEAST: tl.constexpr):  # fmt: skip
    """First row and tokens of chunk program_id(0), counted over all sequences; no tokens beyond the last."""
    at = tl.arange(0, BLOCK_SEQUENCES)
    inside = at < SEQUENCES
    first = tl.load(query_starts + at, mask=inside, other=0)
    end = tl.load(lengths + at, mask=inside, other=0)  # positions
    count = tl.load(query_starts + at + 1, mask=inside, other=0) - first
    begin = end - count
    chunks = tl.where(inside & (count >= LEAST), (end + CHUNK - 1) // CHUNK - begin // CHUNK, 0)
    after = tl.cumsum(chunks, 0)
    number = tl.program_id(0)
    own = (number >= after - chunks) & (number < after)
    position = tl.where(own, (begin // CHUNK + number - (after - chunks)) * CHUNK, 0)
    start = tl.maximum(position, begin)
    tokens = tl.sum(tl.where(own, tl.minimum(position + CHUNK, end) - start, 0))
    return tl.sum(tl.where(own, first + start - begin, 0)), tokens


@triton.jit
def _decays(decay, gate, rate, row, known, head, HEADS: tl.constexpr, IS_SCAN: tl.constexpr):
    """Gates of a chunk's tokens, the sums of decays up to each, and what float32 lacks of these, [CHUNK].

    Tokens beyond the last have gates and decays of zero. Of sums of hundreds float32 lacks 1e-5, which would be an
    error of the difference of two of them.
    """
    g = tl.load(gate + row * HEADS + head, mask=known, other=0.0)
    at = decay + row * HEADS + head
    steps = g * tl.load(rate + head) if IS_SCAN else tl.load(at, mask=known, other=0.0)
    exact = tl.cumsum(steps.to(tl.float64), 0)
    sums = exact.to(tl.float32)
    return g, sums, (exact - sums.to(tl.float64)).to(tl.float32)


@triton.jit
def recurrence_chunks(
    q,
    k,
    decay,
    gate,
    rate,
    inverses,
    weights,
    factors,
    lengths,
    query_starts,
    q_stride,
    k_stride,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,
    CHUNK: tl.constexpr,
    LEAST: tl.constexpr,
    IS_SCAN: tl.constexpr,
    NORMALIZES: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (chunks, HEADS): T and P of each chunk, row by row.

    inverses   [rows, HEADS, CHUNK] float32, rows of T; not for a scan
    weights    [rows, HEADS, CHUNK] float32, rows of P
    factors    [rows, HEADS, 2] float32: 1 / lengths of q and k
    SEQUENCES  of the bucket; LEAST: tokens of the step from which on a sequence is computed by chunks
    """
    wait_for_inputs(DEPENDENT)
    first, tokens = _chunk(lengths, query_starts, SEQUENCES, BLOCK_SEQUENCES, CHUNK, LEAST)
    if tokens == 0:
        return
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32x3"
    head = tl.program_id(1)
    i, key = tl.arange(0, CHUNK), tl.arange(0, BLOCK_KEYS)
    row, known = (first + i).to(tl.int64), i < tokens
    mask = known[:, None] & (key < KEYS)[None, :]
    key_head = head // (HEADS // KEY_HEADS)
    query = tl.load(q + row[:, None] * q_stride + key_head * KEYS + key[None, :], mask=mask, other=0.0)
    inner = tl.load(k + row[:, None] * k_stride + key_head * KEYS + key[None, :], mask=mask, other=0.0)
    if EXACT:
        query, inner = query.to(tl.float32), inner.to(tl.float32)
    g, sums, rest = _decays(decay, gate, rate, row, known, head, HEADS, IS_SCAN)
    of_query = unit_factor(query.to(tl.float32), 1, NORMALIZES)
    of_key = unit_factor(inner.to(tl.float32), 1, NORMALIZES)
    is_before = i[:, None] >= i[None, :]
    between = sums[:, None] - sums[None, :] + (rest[:, None] - rest[None, :])
    decayed = tl.exp(tl.where(is_before, between, 0.0)) * of_key[None, :]
    turned = tl.trans(inner)
    p = tl.dot(query, turned, input_precision=PRECISION) * (scale * of_query[:, None]) * decayed
    at = (row * HEADS + head)[:, None] * CHUNK + i[None, :]
    tl.store(weights + at, tl.where(is_before, p, 0.0), mask=known[:, None])
    place = (row * HEADS + head) * 2
    tl.store(factors + place, of_query, mask=known)
    tl.store(factors + place + 1, of_key, mask=known)
    if not IS_SCAN:
        a = tl.dot(inner, turned, input_precision=PRECISION) * (g * of_key)[:, None] * decayed
        a = tl.where(i[:, None] > i[None, :], a, 0.0)
        tl.store(inverses + at, _inverse(a, CHUNK, PRECISION), mask=known[:, None])


@triton.jit
def chunked_recurrence(
    q,
    k,
    v,
    decay,
    gate,
    rate,
    skip,
    inverses,
    weights,
    factors,
    out,
    states,
    state_slots,
    lengths,
    query_starts,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    slot_stride,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    LEAST: tl.constexpr,
    IS_SCAN: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (sequences, HEADS, ceil(VALUES / TILE)). Operands as in recurrence.py and recurrence_chunks."""
    wait_for_inputs(DEPENDENT)
    sequence, head = tl.program_id(0), tl.program_id(1)
    end = tl.load(lengths + sequence)  # positions
    first = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - first
    if end == 0 or count < LEAST:
        return
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"
    begin = end - count
    i, key = tl.arange(0, CHUNK), tl.arange(0, BLOCK_KEYS)
    column = tl.program_id(2) * TILE + tl.arange(0, TILE)
    of_values = (column < VALUES)[None, :]
    key_head = head // (HEADS // KEY_HEADS)
    places, exists = state_tile(KEYS, BLOCK_KEYS, VALUES, TILE)
    state = states + tl.load(state_slots + sequence).to(tl.int64) * slot_stride + places
    s = tl.load(state, mask=exists & (begin > 0), other=0.0)
    for chunk in range(begin // CHUNK, (end + CHUNK - 1) // CHUNK):
        start = tl.maximum(chunk * CHUNK, begin)
        tokens = tl.minimum((chunk + 1) * CHUNK, end) - start
        row, known = (first + start - begin + i).to(tl.int64), i < tokens
        mask = known[:, None] & (key < KEYS)[None, :]
        inner = tl.load(k + row[:, None] * k_stride + key_head * KEYS + key[None, :], mask=mask, other=0.0)
        query = tl.load(q + row[:, None] * q_stride + key_head * KEYS + key[None, :], mask=mask, other=0.0)
        place = v + row[:, None] * v_stride + head * VALUES + column[None, :]
        value = tl.load(place, mask=known[:, None] & of_values, other=0.0).to(tl.float32)
        at = (row * HEADS + head)[:, None] * CHUNK + i[None, :]
        p = tl.load(weights + at, mask=known[:, None], other=0.0)
        of_query = tl.load(factors + (row * HEADS + head) * 2, mask=known, other=0.0)
        of_key = tl.load(factors + (row * HEADS + head) * 2 + 1, mask=known, other=0.0)
        g, sums, rest = _decays(decay, gate, rate, row, known, head, HEADS, IS_SCAN)
        inner, query = inner.to(tl.float32), query.to(tl.float32)
        if IS_SCAN:
            change = g[:, None] * value
        else:
            t = tl.load(inverses + at, mask=known[:, None], other=0.0)
            seen = tl.dot(inner, s, input_precision=PRECISION) * (tl.exp(sums) * of_key)[:, None]
            change = tl.dot(t, g[:, None] * (value - seen), input_precision=PRECISION)
        result = tl.dot(query, s, input_precision=PRECISION) * (scale * tl.exp(sums) * of_query)[:, None]
        result += tl.dot(p, change, input_precision=PRECISION)
        if IS_SCAN:
            result += tl.load(skip + head) * value
        target = out + row[:, None] * out_stride + head * VALUES + column[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=known[:, None] & of_values)
        # Sums stay the same beyond the last token.
        whole, whole_rest = tl.sum(tl.where(i == CHUNK - 1, sums, 0.0)), tl.sum(tl.where(i == CHUNK - 1, rest, 0.0))
        fed = (tl.exp(whole - sums + (whole_rest - rest)) * of_key)[:, None] * change
        s = s * tl.exp(whole) + tl.dot(tl.trans(inner), fed, input_precision=PRECISION)
    tl.store(state, s, mask=exists)
