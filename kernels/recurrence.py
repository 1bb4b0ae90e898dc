"""The gated delta rule and the scan of Mamba-2, token by token, with a matrix of state for each sequence and head.

    S = exp(decay) S + k u^T;  o = scale S^T q                  S [KEYS, VALUES]

    delta rule    u = gate (v - exp(decay) S^T k)               Yang et al., arXiv:2412.06464
    scan          u = gate v, decay = gate * rate, o + skip v   Dao and Gu, arXiv:2405.21060: k, q, v, gate, rate, skip
                                                                are its B, C, x, dt, A, D

recurrence_rates computes decay and gate from the layers that make them, in float32. recurrence keeps a tile of S in
registers from a sequence's first token of the step to its last: the bits of a token do not depend on where a step ends,
on the other sequences or on the number of rows. For prompts chunked_recurrence.py is faster, and rounds otherwise.

The columns of S are padded to 16 and stored in tiles of 64, the last one narrower, each [KEYS, width]
(artifact/programs/recurrent.py). passes/numerics/recurrences.py defines the numbers.
"""

import triton
import triton.language as tl

from ingot.kernels.common import load_parts, sigmoid, wait_for_inputs

NO_CURVE, SOFTPLUS, SIGMOID = (tl.constexpr(kind) for kind in range(3))
STATE_TILE = tl.constexpr(64)
L2_EPSILON = tl.constexpr(1e-6)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) for any x, in full relative precision: log(w) * e / (w - 1) is log(1 + e) for w = 1 + e."""
    small = tl.exp(-tl.abs(x))
    whole = 1.0 + small
    rest = tl.where(whole == 1.0, small, tl.log(whole) * (small / tl.where(whole == 1.0, 1.0, whole - 1.0)))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def recurrence_rates(
    x,
    bias,
    factors,
    out,
    x_offset,
    x_stride,
    part_stride,
    least,
    most,
    alpha,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    CURVE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (rows,). out [rows, COLUMNS] float32 = alpha * factors * min(max(curve(x + bias), least), most).

    x               from x_offset on, [rows, COLUMNS] in PARTS
    bias, factors   [COLUMNS] float32
    """
    wait_for_inputs(DEPENDENT)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < COLUMNS
    y = load_parts(x + x_offset + row * x_stride + at, part_stride, inside, PARTS)
    if HAS_BIAS:
        y += tl.load(bias + at, mask=inside, other=0.0)
    if CURVE == SOFTPLUS:
        y = _softplus(y)
    if CURVE == SIGMOID:
        y = sigmoid(y)
    y = alpha * tl.minimum(tl.maximum(y, least), most)
    if HAS_FACTORS:
        y *= tl.load(factors + at, mask=inside, other=0.0)
    tl.store(out + row * COLUMNS + at, y, mask=inside)


@triton.jit
def state_tile(KEYS: tl.constexpr, BLOCK_KEYS: tl.constexpr, VALUES: tl.constexpr, TILE: tl.constexpr):
    """Places of a program's tile [BLOCK_KEYS, TILE] in the state of its head, and which of them exist.

    The tile's columns are TILE from program_id(2) * TILE on; TILE divides 64.
    """
    PADDED: tl.constexpr = (VALUES + 15) // 16 * 16
    start = tl.program_id(2) * TILE
    tile = start // STATE_TILE * STATE_TILE
    width = tl.minimum(PADDED - tile, STATE_TILE)
    key, column = tl.arange(0, BLOCK_KEYS)[:, None], start + tl.arange(0, TILE)[None, :]
    places = tl.program_id(1) * (KEYS * PADDED) + tile * KEYS + key * width + (column - tile)
    return places, (key < KEYS) & (column < VALUES)


@triton.jit
def unit_factor(x, axis: tl.constexpr, NORMALIZES: tl.constexpr):
    """1 / sqrt(sum x^2 + 1e-6) along an axis; ones without NORMALIZES."""
    squares = tl.sum(x * x, axis)
    return 1.0 / tl.sqrt(squares + L2_EPSILON) if NORMALIZES else tl.zeros_like(squares) + 1.0


@triton.jit
def recurrence(
    q,
    k,
    v,
    decay,
    gate,
    rate,
    skip,
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
    IS_SCAN: tl.constexpr,
    NORMALIZES: tl.constexpr,
    RAGGED: tl.constexpr,
    MOST: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (sequences, HEADS, ceil(VALUES / TILE)); without RAGGED row s is the one token of sequence s.

    q, k          [rows, KEY_HEADS * KEYS]; head h reads the key head h // (HEADS / KEY_HEADS)
    v, out        [rows, HEADS * VALUES]
    decay, gate   [rows, HEADS] float32; a scan has no decay, but rate [HEADS] and skip [HEADS]
    states        [slots, slot_stride] float32, of which the first HEADS * KEYS * padded VALUES are used
    MOST          sequences with more tokens of the step are left to another kernel; 0: none
    BLOCK_KEYS    the next power of two of KEYS
    """
    wait_for_inputs(DEPENDENT)
    sequence, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + sequence)
    if RAGGED:
        first = tl.load(query_starts + sequence)
        count = tl.load(query_starts + sequence + 1) - first
    else:
        first, count = sequence, 1
    if length == 0 or (MOST > 0 and count > MOST):
        return
    key, column = tl.arange(0, BLOCK_KEYS), tl.program_id(2) * TILE + tl.arange(0, TILE)
    known, inside = key < KEYS, column < VALUES
    key_head = head // (HEADS // KEY_HEADS)
    row = first.to(tl.int64)
    q += row * q_stride + key_head * KEYS + key
    k += row * k_stride + key_head * KEYS + key
    v += row * v_stride + head * VALUES + column
    out += row * out_stride + head * VALUES + column
    gate += row * HEADS + head
    decay += row * HEADS + head
    places, exists = state_tile(KEYS, BLOCK_KEYS, VALUES, TILE)
    state = states + tl.load(state_slots + sequence).to(tl.int64) * slot_stride + places
    s = tl.load(state, mask=exists & (length > count), other=0.0)
    a, d = 0.0, 0.0
    if IS_SCAN:
        a, d = tl.load(rate + head), tl.load(skip + head)
    for _ in range(count):
        query, inner = (
            tl.load(q, mask=known, other=0.0).to(tl.float32),
            tl.load(k, mask=known, other=0.0).to(tl.float32),
        )
        value, g = tl.load(v, mask=inside, other=0.0).to(tl.float32), tl.load(gate)
        inner *= unit_factor(inner, 0, NORMALIZES)
        query *= unit_factor(query, 0, NORMALIZES)
        if IS_SCAN:
            s *= tl.exp(g * a)
            change = g * value
        else:
            s *= tl.exp(tl.load(decay))
            change = g * (value - tl.sum(inner[:, None] * s, 0))
        s += inner[:, None] * change[None, :]
        result = scale * tl.sum(query[:, None] * s, 0)
        if IS_SCAN:
            result += d * value
        tl.store(out, result.to(out.dtype.element_ty), mask=inside)
        q += q_stride
        k += k_stride
        v += v_stride
        out += out_stride
        gate += HEADS
        decay += HEADS
    tl.store(state, s, mask=exists)
