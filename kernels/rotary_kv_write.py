"""Rotary position embedding of queries and keys, and keys and values written into their slots of the KV pool.

    q, k = rope(q), rope(k)            the first ROTARY dims of a head: pairs (i, i + ROTARY / 2), angle by position
    pool[slot] = k, v                  in the pool's precision, see kv_precision.py

(Su et al., RoFormer, arXiv:2104.09864; pairs as in GPT-NeoX.) One program for each token and head; a token whose slot
is negative belongs to the bucket's padding: its query is written, its key and value are not.
"""

import triton
import triton.language as tl

from ingot.kernels.kv_precision import FLOAT, INT4, encode, vector_scale


@triton.jit
def _rotated(head, at, position, cos, sin, DIM: tl.constexpr, ROTARY: tl.constexpr):
    """rope(head)[at] in float32, zeros beyond DIM. cos, sin [positions, ROTARY / 2] float32."""
    x = tl.load(head + at, mask=at < DIM, other=0.0).to(tl.float32)
    if ROTARY == 0:
        return x
    half: tl.constexpr = ROTARY // 2
    first, turns = at < half, at < ROTARY
    other = tl.load(head + tl.where(first, at + half, at - half), mask=turns, other=0.0).to(tl.float32)
    angle = position * half + tl.where(first, at, at - half)
    c = tl.load(cos + angle, mask=turns, other=1.0)
    s = tl.load(sin + angle, mask=turns, other=0.0)
    return x * c + tl.where(first, -other, other) * s


@triton.jit
def _write(
    head,
    position,
    cos,
    sin,
    pool,
    scale,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    KIND: tl.constexpr,
):
    """One vector into the pool at `pool`, its scale at `scale`."""
    if KIND == INT4:
        half = tl.arange(0, BLOCK_DIM // 2)
        low = _rotated(head, 2 * half, position, cos, sin, DIM, ROTARY)
        high = _rotated(head, 2 * half + 1, position, cos, sin, DIM, ROTARY)
        step = vector_scale(tl.maximum(tl.max(tl.abs(low)), tl.max(tl.abs(high))), KIND)
        codes = (encode(low, step, KIND).to(tl.int32) & 15) | ((encode(high, step, KIND).to(tl.int32) & 15) << 4)
        tl.store(pool + half, codes.to(pool.dtype.element_ty), mask=half < DIM // 2)
        tl.store(scale, step.to(scale.dtype.element_ty))
    else:
        at = tl.arange(0, BLOCK_DIM)
        x = _rotated(head, at, position, cos, sin, DIM, ROTARY)
        if KIND != FLOAT:
            step = vector_scale(tl.max(tl.abs(x)), KIND)
            x = encode(x, step, KIND)
            tl.store(scale, step.to(scale.dtype.element_ty))
        tl.store(pool + at, x.to(pool.dtype.element_ty), mask=at < DIM)


@triton.jit
def rotary_kv_write(
    qkv,
    positions,
    slots,
    cos,
    sin,
    q_out,
    pool,
    scales,
    qkv_stride,
    q_out_stride,
    block_stride,
    head_stride,
    value_offset,
    scale_block_stride,
    scale_value_offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Grid (tokens, HEADS + KV_HEADS). qkv [tokens, (HEADS + 2 KV_HEADS) * DIM]: all queries, keys, values.

    slots [tokens] int64: block * BLOCK_TOKENS + token in the block, or negative. Pool and scales point at this layer's
    keys in block 0; strides and offsets are in their elements. Within a head tokens follow each other: DIM elements
    (DIM / 2 bytes for INT4), and one scale each.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + token)
    row = qkv + token * qkv_stride
    if head < HEADS:
        at = tl.arange(0, BLOCK_DIM)
        x = _rotated(row + head * DIM, at, position, cos, sin, DIM, ROTARY)
        tl.store(q_out + token * q_out_stride + head * DIM + at, x.to(q_out.dtype.element_ty), mask=at < DIM)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            kv_head = head - HEADS
            width: tl.constexpr = DIM // 2 if KIND == INT4 else DIM
            block, inner = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
            place = pool + block * block_stride + kv_head * head_stride + inner * width
            scale = scales + block * scale_block_stride + kv_head * BLOCK_TOKENS + inner
            _write(row + (HEADS + kv_head) * DIM, position, cos, sin, place, scale, DIM, BLOCK_DIM, ROTARY, KIND)
            value = row + (HEADS + KV_HEADS + kv_head) * DIM
            place, scale = place + value_offset, scale + scale_value_offset
            _write(value, position, cos, sin, place, scale, DIM, BLOCK_DIM, 0, KIND)
