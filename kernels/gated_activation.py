"""The gated activation of a feed-forward layer: y = act(gate) * up, with gate and up side by side.

SwiGLU   act(x) = x * sigmoid(x)                                     (Shazeer, arXiv:2002.05202)
GeGLU    act(x) = x * (1 + erf(x / sqrt(2))) / 2, or its tanh form   (Hendrycks and Gimpel, arXiv:1606.08415)
"""

import triton
import triton.language as tl

SILU, GELU_ERF, GELU_TANH = (tl.constexpr(kind) for kind in range(3))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) for any x."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, small, 1.0) / (1.0 + small)


@triton.jit
def gated_activation(
    gate_up, out, gate_up_stride, out_stride, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr
):
    """Grid (rows, ceil(COLUMNS / BLOCK)). gate_up [rows, 2 * COLUMNS]: gate first; out [rows, COLUMNS]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < COLUMNS
    gate = tl.load(gate_up + row * gate_up_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + COLUMNS + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == SILU:
        active = gate * sigmoid(gate)
    elif KIND == GELU_ERF:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * sigmoid(2.0 * inner)  # which is (1 + tanh(inner)) / 2
    tl.store(out + row * out_stride + at, (active * up).to(out.dtype.element_ty), mask=inside)
