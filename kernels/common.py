"""What kernels share: the softcap, the sigmoid, the parts of a sum."""

import triton
import triton.language as tl


@triton.jit
def capped(x, softcap):
    """softcap * tanh(x / softcap), spelt so that it cannot overflow."""
    shrunk = tl.exp(-2.0 * tl.abs(x) / softcap)
    return tl.where(x < 0, -softcap, softcap) * (1.0 - shrunk) / (1.0 + shrunk)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) for any x."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, small, 1.0) / (1.0 + small)


@triton.jit
def load_parts(x, part_stride, mask, PARTS: tl.constexpr):
    """What x points at, in float32, or the sum of PARTS of it, added in order: zeros where not masked.

    Products of few rows leave their result in parts (matmul.py, matmul_nbits.py); who reads it adds them.
    """
    total = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(x + part * part_stride, mask=mask, other=0.0).to(tl.float32)
    return total
