"""Rounding of activations: facts of a scheme, error of dynamic scales, outlier channels."""

from typing import Any

import numpy as np
import pytest

from ingot.passes.numerics.activation_rounding import ActivationScheme, outlier_channels, round_activations


def test_facts_name_strategy_and_scale() -> None:
    assert ActivationScheme("int").facts == {"bits": 8, "kind": "int", "dynamic": True, "strategy": "token"}
    static = {"bits": 8, "kind": "float", "dynamic": False, "strategy": "tensor", "scale": 0.007}
    assert ActivationScheme("float", 0.007).facts == static


@pytest.mark.parametrize(("kind", "error"), [("int", 0.006), ("float", 0.03)])
def test_the_error_of_dynamic_scales_does_not_depend_on_a_rows_magnitude(kind: Any, error: float) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((33, 172)) * 10.0 ** rng.uniform(-3, 3, (33, 1))).astype(np.float32)
    lost = np.linalg.norm(round_activations(x, ActivationScheme(kind)) - x, axis=1) / np.linalg.norm(x, axis=1)
    assert lost.min() > 0
    assert lost.max() < 2 * error


def test_number_share_and_threshold_select_the_largest_channels() -> None:
    peaks = np.array([1.0, 9.0, 3.0, 7.0])
    assert outlier_channels(peaks, 2, 0).tolist() == [1, 3]
    assert outlier_channels(peaks, 0.25, 0).tolist() == [1]
    assert outlier_channels(peaks, 0, 6.0).tolist() == [1, 3]
    assert outlier_channels(peaks, 1, 6.0).tolist() == [1]
    assert outlier_channels(peaks, 4, 0).tolist() == [1, 2, 3]  # at least one channel is quantized
    assert outlier_channels(peaks, 0, 0).tolist() == []
