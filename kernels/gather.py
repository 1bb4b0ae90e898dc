"""Rows of a table by index: the embedding, and the hidden states whose logits are asked for.

    out[i] = table[indices[i]]                                     16- or 32-bit table
    out[i] = (codes[indices[i]] - zero_point) * scale              8-bit table, scales in blocks of columns

A negative index gives a row of zeros: a batch that is padded to its bucket's size has such rows.
"""

import triton
import triton.language as tl


@triton.jit
def gather_rows(indices, table, out, table_stride, out_stride, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, ceil(COLUMNS / BLOCK)). indices [rows] int64."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + row)
    mask = (at < COLUMNS) & (index >= 0)
    values = tl.load(table + index * table_stride + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, values.to(out.dtype.element_ty), mask=at < COLUMNS)


@triton.jit
def gather_quantized_rows(
    indices,
    codes,
    scales,
    zero_points,
    out,
    codes_stride,
    scales_stride,
    out_stride,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
):
    """Grid (rows, ceil(COLUMNS / BLOCK)). codes [vocabulary, COLUMNS] int8, or uint8 with zero points.

    scales, zero_points    [vocabulary, ceil(COLUMNS / GROUP)], a row every scales_stride
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + row)
    mask = (at < COLUMNS) & (index >= 0)
    values = tl.load(codes + index * codes_stride + at, mask=mask, other=0).to(tl.float32)
    group = index * scales_stride + at // GROUP
    if HAS_ZERO_POINTS:
        values -= tl.load(zero_points + group, mask=mask, other=0).to(tl.float32)
    values *= tl.load(scales + group, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, values.to(out.dtype.element_ty), mask=at < COLUMNS)
