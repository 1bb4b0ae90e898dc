"""Norms of rows with the residual addition before them: one program a row.

    b = rms(x, inner_weight)             where the branch is normed before the residual addition; else x
    h = b + residual                     where there is a residual; stored for the next addition
    y = rms(h, weight)                   where something reads it; or layer(h, weight, bias)

    rms(v, w) = v / sqrt(mean(v^2) + epsilon) * w                       (Zhang and Sennrich, arXiv:1910.07467)
    layer(v, w, b) = rms(v - mean(v), w) + b                            (Ba et al., arXiv:1607.06450)

Everything is computed in float32 and rounded once, when it is stored; y is computed from the stored h, as it would be
with a separate addition.
"""

import triton
import triton.language as tl

from ingot.kernels.common import load_parts, wait_for_inputs


@triton.jit
def _normed(v, weight, at, inside, epsilon, COLUMNS: tl.constexpr):
    scale = 1.0 / tl.sqrt(tl.sum(v * v) / COLUMNS + epsilon)
    return v * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def rms_norm(
    x,
    residual,
    inner_weight,
    weight,
    out,
    sum_out,
    x_stride,
    part_stride,
    residual_stride,
    sum_stride,
    out_stride,
    inner_epsilon,
    epsilon,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_INNER: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_OUTER: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (rows,). BLOCK: the next power of two of COLUMNS. PARTS of x; sum_out and out [rows, COLUMNS]."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < COLUMNS
    h = load_parts(x + row * x_stride + at, part_stride, inside, PARTS)
    if HAS_INNER:
        h = _normed(h, inner_weight, at, inside, inner_epsilon, COLUMNS)
    if HAS_RESIDUAL:
        h += tl.load(residual + row * residual_stride + at, mask=inside, other=0.0).to(tl.float32)
        stored = h.to(sum_out.dtype.element_ty)
        tl.store(sum_out + row * sum_stride + at, stored, mask=inside)
        h = stored.to(tl.float32)
    if HAS_OUTER:
        y = _normed(h, weight, at, inside, epsilon, COLUMNS)
        tl.store(out + row * out_stride + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm(
    x,
    residual,
    weight,
    bias,
    out,
    sum_out,
    x_stride,
    part_stride,
    residual_stride,
    sum_stride,
    out_stride,
    epsilon,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (rows,). BLOCK: the next power of two of COLUMNS. PARTS of x; sum_out and out [rows, COLUMNS]."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < COLUMNS
    h = load_parts(x + row * x_stride + at, part_stride, inside, PARTS)
    if HAS_RESIDUAL:
        h += tl.load(residual + row * residual_stride + at, mask=inside, other=0.0).to(tl.float32)
        stored = h.to(sum_out.dtype.element_ty)
        tl.store(sum_out + row * sum_stride + at, stored, mask=inside)
        h = stored.to(tl.float32)
    centred = tl.where(inside, h - tl.sum(h) / COLUMNS, 0.0)
    y = _normed(centred, weight, at, inside, epsilon, COLUMNS)
    if HAS_BIAS:
        y += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, y.to(out.dtype.element_ty), mask=inside)
