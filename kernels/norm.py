"""Norms of rows with the residual addition before them, and the rounding to 8 bits after them, or alone.

    b = rms(x, inner_weight)             where the branch is normed before the residual addition; else x
    h = b + residual                     where there is a residual; stored for the next addition
    y = rms(h, weight)                   where something reads it; or layer(h, weight, bias)
    codes, scale = round(y)              where layers multiply 8-bit codes (quantize_rows has this alone)

    rms(v, w) = v / sqrt(mean(v^2) + epsilon) * w                       (Zhang and Sennrich, arXiv:1910.07467)
    layer(v, w, b) = rms(v - mean(v), w) + b                            (Ba et al., arXiv:1607.06450)

Everything is computed in float32 and rounded once, when it is stored; y is computed from the stored h, as it would be
with a separate addition, and the codes from the stored y. With GATHERS the rows are those whose logits are wanted:
row i is that of indices[i], and zeros for a negative index.

Codes of a row do not depend on other rows: by its own largest value, or all by one static scale.

    INT8    round(x / scale), -128..127         dynamic: scale = max(max|x|, 1e-30) / 127
    FP8     e4m3fn of x / scale, up to 448      dynamic: scale = max(max|x|, 1e-30) / 448

If the weight has a form that 8-bit matmuls do not support (4 bits, blocks, zero points), the codes are scaled back and
stored as floats: that layer reads the rounded values.
"""

import triton
import triton.language as tl

from ingot.kernels.common import load_parts, wait_for_inputs
from ingot.kernels.kv_precision import FLOAT, FP8, round_to_e4m3, round_to_nearest

LEAST_PEAK = tl.constexpr(1e-30)


@triton.jit
def rounded_row(values, static_scale, KIND: tl.constexpr, IS_STATIC: tl.constexpr):
    """A row's codes as floats, and their scale; places after the last column hold zeros."""
    if IS_STATIC:
        scale = static_scale
    else:
        scale = tl.maximum(tl.max(tl.abs(values)), LEAST_PEAK) / (448.0 if KIND == FP8 else 127.0)
    if KIND == FP8:
        rounded = round_to_e4m3(tl.minimum(tl.maximum(values / scale, -448.0), 448.0))
    else:  # clamp first: round_to_nearest needs values below 2^22
        rounded = round_to_nearest(tl.minimum(tl.maximum(values / scale, -128.0), 127.0))
    return rounded, scale


@triton.jit
def _normed(v, weight, at, inside, epsilon, COLUMNS: tl.constexpr):
    scale = 1.0 / tl.sqrt(tl.sum(v * v) / COLUMNS + epsilon)
    return v * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _source(indices, row, at, COLUMNS: tl.constexpr, GATHERS: tl.constexpr):
    """The row of x and of the residual, and which of its columns exist."""
    source, inside = row, at < COLUMNS
    if GATHERS:
        source = tl.load(indices + row)
        inside &= source >= 0
    return source, inside


@triton.jit
def _added(h, residual, sum_out, at, inside, residual_inside):
    """Store h + residual; return it rounded to the stored type."""
    h += tl.load(residual + at, mask=residual_inside, other=0.0).to(tl.float32)
    stored = h.to(sum_out.dtype.element_ty)
    tl.store(sum_out + at, stored, mask=inside)
    return stored.to(tl.float32)


@triton.jit
def _store(
    y,
    out,
    codes,
    scales,
    row,
    at,
    inside,
    out_stride,
    static_scale,
    COLUMNS: tl.constexpr,
    STORES: tl.constexpr,
    KIND: tl.constexpr,
    IS_STATIC: tl.constexpr,
):
    """Store y where STORES, and its codes with their scale where KIND is not FLOAT."""
    stored = y.to(out.dtype.element_ty)
    if STORES:
        tl.store(out + row * out_stride + at, stored, mask=inside)
    if KIND != FLOAT:
        rounded, scale = rounded_row(stored.to(tl.float32), static_scale, KIND, IS_STATIC)
        tl.store(scales + row, scale)
        tl.store(codes + row * COLUMNS + at, rounded.to(codes.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm(
    x,
    residual,
    inner_weight,
    weight,
    out,
    sum_out,
    indices,
    codes,
    scales,
    x_stride,
    part_stride,
    residual_stride,
    sum_stride,
    out_stride,
    inner_epsilon,
    epsilon,
    static_scale,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_INNER: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_OUTER: tl.constexpr,
    GATHERS: tl.constexpr = False,
    STORES: tl.constexpr = True,
    KIND: tl.constexpr = FLOAT,
    IS_STATIC: tl.constexpr = False,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (rows,). BLOCK: the next power of two of COLUMNS. PARTS of x; sum_out and out [rows, COLUMNS].

    indices          [rows] int64 where GATHERS: x and residual have other rows, and sum_out has these
    codes, scales    [rows, COLUMNS] e4m3fn or int8, and [rows] float32, where KIND is not FLOAT (kv_precision.py)
    """
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < COLUMNS
    source, known = _source(indices, row, at, COLUMNS, GATHERS)
    h = load_parts(x + source * x_stride + at, part_stride, known, PARTS)
    if HAS_INNER:
        h = _normed(h, inner_weight, at, inside, inner_epsilon, COLUMNS)
    if HAS_RESIDUAL:
        h = _added(h, residual + source * residual_stride, sum_out + row * sum_stride, at, inside, known)
    if HAS_OUTER:
        y = _normed(h, weight, at, inside, epsilon, COLUMNS)
        _store(
            y, out, codes, scales, row, at, inside, out_stride, static_scale, COLUMNS, STORES, KIND, IS_STATIC
        )  # fmt: skip


@triton.jit
def layer_norm(
    x,
    residual,
    weight,
    bias,
    out,
    sum_out,
    indices,
    codes,
    scales,
    x_stride,
    part_stride,
    residual_stride,
    sum_stride,
    out_stride,
    epsilon,
    static_scale,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATHERS: tl.constexpr = False,
    STORES: tl.constexpr = True,
    KIND: tl.constexpr = FLOAT,
    IS_STATIC: tl.constexpr = False,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (rows,). Sizes as in rms_norm."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < COLUMNS
    source, known = _source(indices, row, at, COLUMNS, GATHERS)
    h = load_parts(x + source * x_stride + at, part_stride, known, PARTS)
    if HAS_RESIDUAL:
        h = _added(h, residual + source * residual_stride, sum_out + row * sum_stride, at, inside, known)
    centred = tl.where(inside, h - tl.sum(h) / COLUMNS, 0.0)
    y = _normed(centred, weight, at, inside, epsilon, COLUMNS)
    if HAS_BIAS:
        y += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    _store(
        y, out, codes, scales, row, at, inside, out_stride, static_scale, COLUMNS, STORES, KIND, IS_STATIC
    )  # fmt: skip


@triton.jit
def quantize_rows(
    x,
    codes,
    scales,
    x_stride,
    static_scale,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    IS_STATIC: tl.constexpr,
    SCALES_BACK: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (rows,). codes [rows, COLUMNS] e4m3fn or int8, or floats when SCALES_BACK; scales [rows] float32."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < COLUMNS
    values = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    rounded, scale = rounded_row(values, static_scale, KIND, IS_STATIC)
    if SCALES_BACK:
        rounded *= scale
    else:
        tl.store(scales + row, scale)
    tl.store(codes + row * COLUMNS + at, rounded.to(codes.dtype.element_ty), mask=inside)
