"""Scales of input channels: SmoothQuant's and AWQ's formulas on small numbers."""

import numpy as np

from ingot.passes.numerics.channel_scales import LEAST, awq_scale, relative_magnitudes, smoothing_scale


def test_the_smoothing_scale_is_that_of_the_paper() -> None:
    found = smoothing_scale(np.array([4.0, 1.0, 0.0]), np.array([1.0, 1.0, 1.0]), 0.5)
    np.testing.assert_allclose(found / found[1], [2.0, 1.0, LEAST**0.5], rtol=1e-6)


def test_awq_scales_by_inputs_and_optionally_by_weights() -> None:
    inputs, weights = np.array([4.0, 1.0]), np.array([0.25, 1.0])
    np.testing.assert_allclose(awq_scale(inputs, None, 0.5), [2**0.5, 0.5**0.5], rtol=1e-6)
    np.testing.assert_allclose(awq_scale(inputs, weights, 0.5), [2.0, 0.5], rtol=1e-6)


def test_magnitudes_are_relative_to_the_largest_of_their_block() -> None:
    weight = np.array([[1.0, -2.0, 8.0], [4.0, 4.0, 1.0]], np.float32)
    np.testing.assert_allclose(relative_magnitudes([weight], 2), [0.75, 1.0, 1.0])
