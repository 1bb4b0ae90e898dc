"""Quantizes the input of a linear layer to 8 bits: each row by its own largest value, or all by one static scale.

    INT8    round(x / scale), -128..127         dynamic: scale = max(max|x|, 1e-30) / 127
    FP8     e4m3fn of x / scale, up to 448      dynamic: scale = max(max|x|, 1e-30) / 448

A row does not depend on other rows. If the weight has a form that 8-bit matmuls do not support (4 bits, blocks, zero
points), the codes are scaled back and stored as floats: that layer reads the rounded values.
"""

import triton
import triton.language as tl

from ingot.kernels.common import wait_for_inputs
from ingot.kernels.kv_precision import FP8, round_to_e4m3, round_to_nearest

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
