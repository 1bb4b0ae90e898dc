"""Causal convolution of each channel with its last inputs, and the state that carries them to the next step.

    y[t] = act(bias + sum over j of weight[:, j] * x[t - TAPS + 1 + j])          act: none, or silu

The state is the last TAPS - 1 inputs before the step, in float32, the oldest first. Inputs before a sequence's first
token are zeros, and its slot is not read. A tile of tokens has at least TAPS - 1 of them, so that the first tile of a
sequence alone reads the state; the same program replaces it afterwards, and nothing races.

passes/numerics/recurrences.py defines the numbers.
"""

import triton
import triton.language as tl

from ingot.kernels.common import load_parts, sigmoid, wait_for_inputs


@triton.jit
def short_convolution(
    x,
    weight,
    bias,
    out,
    states,
    state_slots,
    lengths,
    query_starts,
    tile_sequences,
    tile_starts,
    x_stride,
    part_stride,
    out_stride,
    slot_stride,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    RAGGED: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (tiles, ceil(CHANNELS / BLOCK)); without RAGGED a tile is one token of the sequence of its number.

    x, out         [rows, CHANNELS], x in PARTS
    weight, bias   [TAPS, CHANNELS] and [CHANNELS], float32
    states         [slots, slot_stride] float32, of which the first [TAPS - 1, CHANNELS] are used
    lengths        [sequences] tokens of each sequence after the step; 0 for padding
    TILE           tokens of a tile, TAPS - 1 or more; 1 without RAGGED
    BLOCK_TAPS     the next power of two of TAPS - 1
    """
    wait_for_inputs(DEPENDENT)
    if RAGGED:
        sequence = tl.load(tile_sequences + tl.program_id(0))
        if sequence < 0:
            return
        begin = tl.load(tile_starts + tl.program_id(0))
        first = tl.load(query_starts + sequence)
        count = tl.load(query_starts + sequence + 1) - first
    else:
        sequence, begin, first, count = tl.program_id(0), 0, tl.program_id(0), 1
    length = tl.load(lengths + sequence)
    if length == 0:
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (channel < CHANNELS)[None, :]
    rows = x + first.to(tl.int64) * x_stride + channel[None, :]
    state = states + tl.load(state_slots + sequence).to(tl.int64) * slot_stride + channel[None, :]
    has_state = length > count
    token = begin + tl.arange(0, TILE)[:, None]
    total = tl.zeros([TILE, BLOCK], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=channel < CHANNELS, other=0.0)[None, :]
    for j in tl.static_range(TAPS):
        at = token - (TAPS - 1) + j
        given = load_parts(rows + at * x_stride, part_stride, inside & (at >= 0) & (token < count), PARTS)
        kept = tl.load(state + (at + (TAPS - 1)) * CHANNELS, mask=inside & (at < 0) & has_state, other=0.0)
        taps = tl.load(weight + j * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)
        total += taps[None, :] * tl.where(at < 0, kept, given)
    if HAS_SILU:
        total *= sigmoid(total)
    place = out + (first + token).to(tl.int64) * out_stride + channel[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=inside & (token < count))
    if begin == 0:
        tap = tl.arange(0, BLOCK_TAPS)[:, None]
        last = count - (TAPS - 1) + tap
        known = inside & (tap < TAPS - 1)
        new = load_parts(rows + last * x_stride, part_stride, known & (last >= 0), PARTS)
        old = tl.load(state + (count + tap) * CHANNELS, mask=known & (last < 0) & has_state, other=0.0)
        tl.debug_barrier()  # all threads have read the state
        tl.store(state + tap * CHANNELS, tl.where(last < 0, old, new), mask=known)
