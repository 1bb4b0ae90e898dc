"""The gated activation of a feed-forward layer: y = act(gate) * up.

SwiGLU   act(x) = x * sigmoid(x)                                     (Shazeer, arXiv:2002.05202)
GeGLU    act(x) = x * (1 + erf(x / sqrt(2))) / 2, or its tanh form   (Hendrycks and Gimpel, arXiv:1606.08415)
xIELU    act(x) = a * x^2 + beta * x above 0, else b * (exp(min(x, eps)) - 1 - x) + beta * x    (arXiv:2411.13010)
clamped SwiGLU    y = g * sigmoid(alpha * g) * (u + 1), g = min(gate, limit), u = up within -limit .. limit

Gates and ups of one matmul may be interleaved: column 16 i + j of its result is gate 8 i + j, and 16 i + 8 + j the up
of that gate, for j < 8. A thread has both in its registers after a multiplication of tensor cores: where one program
has the whole sum, the matmul itself stores y (`gated`).
"""

import triton
import triton.language as tl

from ingot.kernels.common import load_parts, sigmoid, wait_for_inputs

SILU, GELU_ERF, GELU_TANH, IDENTITY, SIGMOID, RELU, XIELU, CLAMPED_SWIGLU, CLAMP = (
    tl.constexpr(kind) for kind in range(9)
)


@triton.jit
def _xielu(x, numbers):
    """numbers: a, b, beta, eps. Near 0, exp(m) - 1 - m is m^2 times its series, which does not cancel."""
    a, b, beta = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    eps = tl.load(numbers + 3)
    m = tl.where(x > eps, eps, x)
    series = m * (1.0 / 39916800) + 1.0 / 3628800
    series = series * m + 1.0 / 362880
    series = series * m + 1.0 / 40320
    series = series * m + 1.0 / 5040
    series = series * m + 1.0 / 720
    series = series * m + 1.0 / 120
    series = series * m + 1.0 / 24
    series = series * m + 1.0 / 6
    series = series * m + 0.5
    bent = tl.where(m > -1.0, m * m * series, tl.exp(m) - 1.0 - m) + (m - x)
    return tl.where(x > 0.0, a * x * x, b * bent) + beta * x


@triton.jit
def _clamped_swiglu(gate, up, numbers):
    """numbers: alpha, limit."""
    alpha, limit = tl.load(numbers), tl.load(numbers + 1)
    g = tl.where(gate > limit, limit, gate)
    return g * sigmoid(alpha * g) * (_clamped(up, -limit, limit) + 1.0)


@triton.jit
def _clamped(x, least, most):
    x = tl.where(x > most, most, x)
    return tl.where(x < least, least, x)


@triton.jit
def activated(x, numbers, KIND: tl.constexpr):
    """act(x) in float32; numbers: parameters of the activation, for some kinds."""
    if KIND == SILU:
        x = x * sigmoid(x)
    elif KIND == GELU_ERF:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == GELU_TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * sigmoid(2.0 * inner)  # the factor is (1 + tanh(inner)) / 2
    elif KIND == SIGMOID:
        x = sigmoid(x)
    elif KIND == RELU:
        x = tl.maximum(x, 0.0)
    elif KIND == XIELU:
        x = _xielu(x, numbers)
    elif KIND == CLAMP:
        x = _clamped(x, tl.load(numbers), tl.load(numbers + 1))
    return x


@triton.jit
def gated(sums, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """act(gate) * up [ROWS, COLUMNS / 2] of interleaved gates and ups [ROWS, COLUMNS]."""
    halves = tl.permute(tl.reshape(sums, (ROWS, COLUMNS // 16, 2, 8)), (0, 1, 3, 2))
    gate, up = tl.split(halves)
    return tl.reshape(activated(gate, None, KIND) * up, (ROWS, COLUMNS // 2))


@triton.jit
def gated_activation(
    gate,
    up,
    numbers,
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
    INTERLEAVED: tl.constexpr = False,
    DEPENDENT: tl.constexpr = False,
):
    """Grid (rows, ceil(COLUMNS / BLOCK)). gate, up and out [rows, COLUMNS]; PARTS of gate and of up.

    numbers        [4] float32 of the activation; none for most kinds
    up_offset      elements from up to its first row: COLUMNS where gate and up share rows of one buffer
    INTERLEAVED    gate and up are the same rows [rows, 2 * COLUMNS]
    """
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < COLUMNS
    first = at // 8 * 16 + at % 8 if INTERLEAVED else at
    second = first + 8 if INTERLEAVED else at
    x = load_parts(gate + row * gate_stride + first, gate_part_stride, inside, PARTS)
    y = load_parts(up + up_offset + row * up_stride + second, up_part_stride, inside, PARTS)
    result = _clamped_swiglu(x, y, numbers) if KIND == CLAMPED_SWIGLU else activated(x, numbers, KIND) * y
    tl.store(out + row * out_stride + at, result.to(out.dtype.element_ty), mask=inside)
