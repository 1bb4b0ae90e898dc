"""Statistics of a weight and its codes, from numbers that can be counted by hand."""

import numpy as np
import pytest

from ingot.passes.numerics.rounding import round_weight
from ingot.passes.numerics.scheme import Scheme
from ingot.passes.numerics.weight_statistics import end_share, outliers, scale_statistics, weight_statistics


def test_an_outlier_is_counted_and_measured() -> None:
    weight = np.full((10, 10), 0.1, np.float16)
    weight[3, 4] = 10
    rms = float(np.sqrt(np.mean(np.square(weight.astype(np.float64)))))
    assert outliers(weight) == {"outlier_share": 0.01, "peak_over_rms": pytest.approx(10 / rms)}


def test_normal_weights_have_few_outliers_and_a_zero_weight_none() -> None:
    weight = np.random.default_rng(0).normal(size=(1000, 1000)).astype(np.float32)
    assert outliers(weight)["outlier_share"] == pytest.approx(6.3e-5, rel=0.3)
    assert outliers(np.zeros((4, 4), np.float32)) == {"outlier_share": 0.0, "peak_over_rms": 0.0}


def test_the_range_of_the_scales_covers_all_blocks() -> None:
    scales = np.array([[1.0, 2.0], [3.0, 10.0]], np.float32)
    found = {"scale_min": 1.0, "scale_median": 2.5, "scale_max": 10.0}
    assert scale_statistics(scales) == found | {"scale_dtype": "float16"}
    assert scale_statistics(scales / np.float32(3))["scale_dtype"] == "float32"


def test_codes_at_both_ends_are_counted() -> None:
    assert end_share(np.array([[-8, 7, 0, 1]], np.int8), -8, 7) == 0.5
    assert end_share(np.array([[0, 15, 3, 14]], np.uint8), 0, 15) == 0.5


def test_an_asymmetric_block_without_clip_has_a_code_at_each_end() -> None:
    scheme = Scheme(4, 16, symmetric=False, clip=False)
    weight = np.random.default_rng(1).normal(size=(8, 64)).astype(np.float32)
    found = weight_statistics(weight, round_weight(weight, scheme), scheme)
    assert found["end_share"] >= 2 / 16
    assert found["scale_min"] <= found["scale_median"] <= found["scale_max"]
