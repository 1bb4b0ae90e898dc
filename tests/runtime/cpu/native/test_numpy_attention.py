"""Attention in numpy agrees with the C kernel."""

import numpy as np

from ingot.runtime.cpu.native.numpy_attention import NumpyAttention
from tests.runtime.cpu.native.attention_cases import ROUNDED, SHAPES, TOLERANCE, native_attention, run_alone


def test_numpy_and_kernel_agree_within_the_rounding_of_float32_sums() -> None:
    for case in SHAPES + ROUNDED:
        ours, theirs = run_alone(case, native_attention(1)(case.pool())), run_alone(case, NumpyAttention(case.pool()))
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, atol=TOLERANCE, rtol=0)
