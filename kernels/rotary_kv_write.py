"""Norms queries and keys by head, rotates them, and writes keys and values into their slots of the KV pool.

    q, k = norm(q), norm(k)            where the model has such norms: each head separately, times a weight [dim]
    q, k = rope(q), rope(k)            the first ROTARY dims of a head: pairs (i, i + ROTARY / 2), angle by position
    pool[slot] = k, v                  in the pool's precision, see kv_precision.py

(Su et al., RoFormer, arXiv:2104.09864; pairs as in GPT-NeoX.) A program takes HEADS_AT_ONCE heads of a token: tiles are
[heads, dims], and `head` points at the first dim of each, [heads, 1]. A token whose slot is negative belongs to the
bucket's padding: its query is written, its key and value are not.
"""

import triton
import triton.language as tl

from ingot.kernels.common import load_parts, wait_for_inputs
from ingot.kernels.kv_precision import FLOAT, INT4, encode, vector_scale


@triton.jit
def _norm_factor(head, known, part_stride, epsilon, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PARTS: tl.constexpr):
    """1 / sqrt(mean(head^2) + epsilon), [heads, 1]."""
    at = tl.arange(0, BLOCK_DIM)[None, :]
    x = load_parts(head + at, part_stride, known & (at < DIM), PARTS)
    return 1.0 / tl.sqrt(tl.sum(x * x, 1) / DIM + epsilon)[:, None]


@triton.jit
def _elements(head, part_stride, norm, factor, at, mask, PARTS: tl.constexpr, HAS_NORM: tl.constexpr):
    """The normed heads at these elements; zeros where the mask is false."""
    x = load_parts(head + at, part_stride, mask, PARTS)
    if HAS_NORM:
        x = x * factor * tl.load(norm + at, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _rotated(
    head,
    known,
    part_stride,
    norm,
    factor,
    at,
    position,
    cos,
    sin,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """rope(norm(head))[:, at] in float32, zeros beyond DIM. cos, sin [positions, ROTARY / 2] float32."""
    at = at[None, :]
    x = _elements(head, part_stride, norm, factor, at, known & (at < DIM), PARTS, HAS_NORM)
    if ROTARY > 0:
        half: tl.constexpr = ROTARY // 2
        first, turns = at < half, at < ROTARY
        partner = tl.where(first, at + half, at - half)
        other = _elements(head, part_stride, norm, factor, partner, known & turns, PARTS, HAS_NORM)
        angle = position * half + tl.where(first, at, at - half)
        c = tl.load(cos + angle, mask=turns, other=1.0)
        s = tl.load(sin + angle, mask=turns, other=0.0)
        x = x * c + tl.where(first, -other, other) * s
    return x


@triton.jit
def _write(
    head,
    known,
    part_stride,
    norm,
    epsilon,
    position,
    cos,
    sin,
    pool,
    scale,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    KIND: tl.constexpr,
):
    """Write vectors into the pool at `pool` [heads, 1], their scales at `scale` [heads, 1]."""
    factor = 1.0
    if HAS_NORM:
        factor = _norm_factor(head, known, part_stride, epsilon, DIM, BLOCK_DIM, PARTS)
    if KIND == INT4:
        half = tl.arange(0, BLOCK_DIM // 2)
        even, odd = 2 * half, 2 * half + 1
        low = _rotated(head, known, part_stride, norm, factor, even, position, cos, sin, DIM, ROTARY, PARTS, HAS_NORM)
        high = _rotated(head, known, part_stride, norm, factor, odd, position, cos, sin, DIM, ROTARY, PARTS, HAS_NORM)
        step = vector_scale(tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1)), KIND)[:, None]
        codes = (encode(low, step, KIND).to(tl.int32) & 15) | ((encode(high, step, KIND).to(tl.int32) & 15) << 4)
        tl.store(pool + half[None, :], codes.to(pool.dtype.element_ty), mask=known & (half < DIM // 2)[None, :])
        tl.store(scale, step.to(scale.dtype.element_ty), mask=known)
    else:
        at = tl.arange(0, BLOCK_DIM)
        x = _rotated(head, known, part_stride, norm, factor, at, position, cos, sin, DIM, ROTARY, PARTS, HAS_NORM)
        if KIND != FLOAT:
            step = vector_scale(tl.max(tl.abs(x), 1), KIND)[:, None]
            x = encode(x, step, KIND)
            tl.store(scale, step.to(scale.dtype.element_ty), mask=known)
        tl.store(pool + at[None, :], x.to(pool.dtype.element_ty), mask=known & (at < DIM)[None, :])


@triton.jit
def rotary_kv_write(
    q,
    k,
    v,
    positions,
    slots,
    cos,
    sin,
    q_norm,
    k_norm,
    q_out,
    pool,
    scales,
    epsilon,
    q_stride,
    k_stride,
    v_stride,
    part_stride,
    q_out_stride,
    block_stride,
    head_stride,
    value_offset,
    scale_block_stride,
    scale_value_offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    KIND: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (tokens, ceil(HEADS / HEADS_AT_ONCE) + ceil(KV_HEADS / HEADS_AT_ONCE)). q [tokens, HEADS * DIM].

    k, v [tokens, KV_HEADS * DIM], as many PARTS as q; slots [tokens] int64: block * BLOCK_TOKENS + token in the block,
    or negative. Pool and scales point at this layer's keys in block 0; strides and offsets are in their elements.
    Within a head tokens follow each other: DIM elements (DIM / 2 bytes for INT4), and one scale each.
    """
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    tiles: tl.constexpr = (HEADS + HEADS_AT_ONCE - 1) // HEADS_AT_ONCE
    head = tl.arange(0, HEADS_AT_ONCE)[:, None]
    if tl.program_id(1) < tiles:
        head += tl.program_id(1) * HEADS_AT_ONCE
        known, at = head < HEADS, tl.arange(0, BLOCK_DIM)
        own = q + token * q_stride + head * DIM
        factor = 1.0
        if HAS_NORM:
            factor = _norm_factor(own, known, part_stride, epsilon, DIM, BLOCK_DIM, PARTS)
        x = _rotated(own, known, part_stride, q_norm, factor, at, position, cos, sin, DIM, ROTARY, PARTS, HAS_NORM)
        place = q_out + token * q_out_stride + head * DIM + at[None, :]
        tl.store(place, x.to(q_out.dtype.element_ty), mask=known & (at < DIM)[None, :])
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            head += (tl.program_id(1) - tiles) * HEADS_AT_ONCE
            known = head < KV_HEADS
            width: tl.constexpr = DIM // 2 if KIND == INT4 else DIM
            block, inner = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
            place = pool + block * block_stride + head * head_stride + inner * width
            scale = scales + block * scale_block_stride + head * BLOCK_TOKENS + inner
            own = k + token * k_stride + head * DIM
            _write(
                own, known, part_stride, k_norm, epsilon, position, cos, sin, place, scale,
                DIM, BLOCK_DIM, ROTARY, PARTS, HAS_NORM, KIND,
            )  # fmt: skip
            own, place, scale = v + token * v_stride + head * DIM, place + value_offset, scale + scale_value_offset
            _write(
                own, known, part_stride, k_norm, epsilon, position, cos, sin, place, scale,
                DIM, BLOCK_DIM, 0, PARTS, False, KIND,
            )  # fmt: skip


@triton.jit
def rotate_heads(
    x,
    positions,
    cos,
    sin,
    out,
    x_stride,
    out_stride,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (tokens, heads): a rotary embedding alone. x, out [tokens, heads * DIM]."""
    wait_for_inputs(DEPENDENT)
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_DIM)
    head = tl.program_id(1) * DIM + tl.zeros([1, 1], tl.int32)
    position, known = tl.load(positions + token), head >= 0
    turned = _rotated(x + token * x_stride + head, known, 0, x, 1.0, at, position, cos, sin, DIM, ROTARY, 1, False)
    place = out + token * out_stride + head + at[None, :]
    tl.store(place, turned.to(out.dtype.element_ty), mask=(at < DIM)[None, :])
