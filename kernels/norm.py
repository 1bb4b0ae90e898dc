"""RMS norm of rows, with the residual added before: one program a row.

    h = x + residual                     [rows, columns], where there is a residual; written out for the next addition
    y = h / sqrt(mean(h^2) + epsilon) * weight

(Zhang and Sennrich, arXiv:1910.07467.) Everything is computed in float32 and rounded once, when it is stored; y is of
the h that was stored, as it is where the addition is an operator of its own.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x,
    residual,
    weight,
    out,
    sum_out,
    x_stride,
    residual_stride,
    out_stride,
    epsilon,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Grid (rows,). BLOCK: the next power of two of COLUMNS. sum_out [rows, COLUMNS] lies as residual does."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < COLUMNS
    h = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        h += tl.load(residual + row * residual_stride + at, mask=inside, other=0.0).to(tl.float32)
        stored = h.to(sum_out.dtype.element_ty)
        tl.store(sum_out + row * residual_stride + at, stored, mask=inside)
        h = stored.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(h * h) / COLUMNS + epsilon)
    y = h * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, y.to(out.dtype.element_ty), mask=inside)
