"""Rows of a table by index: the embedding, and the hidden states whose logits are wanted.

    out[i] = table[indices[i]] * alpha                             16- or 32-bit table
    out[i] = (codes[indices[i]] - zero_point) * scale * alpha      4- or 8-bit table, scales in blocks of columns

A negative index gives a row of zeros: the padding of a batch to its bucket's size. With CARRIES an index may be a
token that the step before chose, still on the GPU: tokens[carried[i]] in place of indices[i], as in carry_tokens.py.
"""

import triton
import triton.language as tl

from ingot.kernels.common import wait_for_inputs


@triton.jit
def _index(indices, carried, tokens, row, CARRIES: tl.constexpr):
    """The index of a row; a token of -1, of a row without finite logits, becomes 0."""
    index = tl.load(indices + row)
    if CARRIES:
        source = tl.load(carried + row)
        token = tl.load(tokens + source, mask=source >= 0, other=0)
        index = tl.where(source >= 0, tl.maximum(token, 0), index)
    return index


@triton.jit
def gather_rows(
    indices,
    carried,
    tokens,
    table,
    out,
    table_stride,
    out_stride,
    alpha,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    CARRIES: tl.constexpr = False,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (rows, ceil(COLUMNS / BLOCK)). indices [rows] int64; where CARRIES, carried [rows] int32, tokens int64."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = _index(indices, carried, tokens, row, CARRIES)
    mask = (at < COLUMNS) & (index >= 0)
    values = tl.load(table + index * table_stride + at, mask=mask, other=0.0).to(tl.float32) * alpha
    tl.store(out + row * out_stride + at, values.to(out.dtype.element_ty), mask=at < COLUMNS)


@triton.jit
def gather_quantized_rows(
    indices,
    carried,
    tokens,
    codes,
    scales,
    zero_points,
    out,
    out_stride,
    alpha,
    TABLE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    CARRIES: tl.constexpr = False,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (rows, ceil(COLUMNS / BLOCK)). codes [TABLE_ROWS, SPANS * 64] uint8, as in matmul_nbits.py.

    scales, zero_points    [GROUPS, TABLE_ROWS], any float and uint8; the middle code without zero points
    """
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = _index(indices, carried, tokens, row, CARRIES)
    mask = (at < COLUMNS) & (index >= 0)
    if BITS == 4:
        place = at // 128 * 64 + at % 32 // 8 * 16 + at % 128 // 32 * 4 + at % 2 * 2 + at % 8 // 4
        packed = tl.load(codes + index * (SPANS * 64) + place, mask=mask, other=0).to(tl.int32)
        code = tl.where(at % 4 < 2, packed & 15, packed >> 4)
    else:
        code = tl.load(codes + index * (SPANS * 64) + at, mask=mask, other=0).to(tl.int32)
    group = at // GROUP * TABLE_ROWS + index
    values = code.to(tl.float32)
    if HAS_ZERO_POINTS:
        values -= tl.load(zero_points + group, mask=mask, other=0).to(tl.float32)
    else:
        values -= 8.0 if BITS == 4 else 128.0
    values *= tl.load(scales + group, mask=mask, other=0.0).to(tl.float32) * alpha
    tl.store(out + row * out_stride + at, values.to(out.dtype.element_ty), mask=at < COLUMNS)
