"""The gated activation of a feed-forward layer: y = act(gate) * up.

SwiGLU   act(x) = x * sigmoid(x)                                     (Shazeer, arXiv:2002.05202)
GeGLU    act(x) = x * (1 + erf(x / sqrt(2))) / 2, or its tanh form   (Hendrycks and Gimpel, arXiv:1606.08415)
"""

import triton
import triton.language as tl

from ingot.kernels.common import load_parts, sigmoid

SILU, GELU_ERF, GELU_TANH, IDENTITY, SIGMOID, RELU = (tl.constexpr(kind) for kind in range(6))


@triton.jit
def activated(x, KIND: tl.constexpr):
    """act(x) in float32."""
    if KIND == SILU:
        x = x * sigmoid(x)
    elif KIND == GELU_ERF:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == GELU_TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * sigmoid(2.0 * inner)  # which is (1 + tanh(inner)) / 2
    elif KIND == SIGMOID:
        x = sigmoid(x)
    elif KIND == RELU:
        x = tl.maximum(x, 0.0)
    return x


@triton.jit
def gated_activation(
    gate,
    up,
    out,
    gate_stride,
    gate_part_stride,
    up_offset,
    up_stride,
    up_part_stride,
    out_stride,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Grid (rows, ceil(COLUMNS / BLOCK)). gate, up and out [rows, COLUMNS]; PARTS of gate and of up.

    up_offset    elements from up to its first row: COLUMNS where gate and up share rows of one buffer
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < COLUMNS
    x = load_parts(gate + row * gate_stride + at, gate_part_stride, inside, PARTS)
    y = load_parts(up + up_offset + row * up_stride + at, up_part_stride, inside, PARTS)
    tl.store(out + row * out_stride + at, (activated(x, KIND) * y).to(out.dtype.element_ty), mask=inside)
