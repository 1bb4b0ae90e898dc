"""Elementwise operators that are not fused into another kernel.

combine_rows   left + right, or left * right; a stride of 0 uses one vector for all rows
map_rows       an activation or the identity: copies, converts, adds split-K partials, scales
gather_columns x[:, columns]
"""

import triton
import triton.language as tl

from ingot.kernels.common import capped, load_parts, wait_for_inputs
from ingot.kernels.gated_activation import activated

ADD, MULTIPLY = (tl.constexpr(kind) for kind in range(2))


@triton.jit
def combine_rows(
    left,
    right,
    out,
    left_stride,
    left_part_stride,
    right_stride,
    out_stride,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    KIND: tl.constexpr,
    SPREADS: tl.constexpr = False,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (rows, ceil(COLUMNS / BLOCK)). [rows, COLUMNS] each; PARTS of left. SPREADS: one column of right."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < COLUMNS
    x = load_parts(left + row * left_stride + at, left_part_stride, inside, PARTS)
    column = at * 0 if SPREADS else at
    y = tl.load(right + row * right_stride + column, mask=inside, other=0.0).to(tl.float32)
    result = x + y if KIND == ADD else x * y
    tl.store(out + row * out_stride + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def map_rows(
    x,
    numbers,
    out,
    x_offset,
    x_stride,
    part_stride,
    out_stride,
    alpha,
    softcap,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (rows, ceil(COLUMNS / BLOCK)). out = softcap of act(x * alpha); KIND: gated_activation.py's.

    numbers     [4] float32 of the activation; none for most kinds
    x_offset    elements from x to its first row, of any alignment
    """
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < COLUMNS
    values = load_parts(x + x_offset + row * x_stride + at, part_stride, inside, PARTS) * alpha
    values = activated(values, numbers, KIND)
    if HAS_SOFTCAP:
        values = capped(values, softcap)
    tl.store(out + row * out_stride + at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gather_columns(
    x,
    columns,
    out,
    x_stride,
    out_stride,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (rows, ceil(COLUMNS / BLOCK)). out [rows, COLUMNS] = x[:, columns]; columns [COLUMNS] int64."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < COLUMNS
    values = tl.load(x + row * x_stride + tl.load(columns + at, mask=inside, other=0), mask=inside, other=0.0)
    tl.store(out + row * out_stride + at, values.to(tl.float32).to(out.dtype.element_ty), mask=inside)
