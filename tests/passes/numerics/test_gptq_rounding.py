"""GPTQ's rounding: less output error than round-to-nearest, valid codes and scales, degenerate inputs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ingot.passes.numerics.arrays import Float32Array
from ingot.passes.numerics.gptq_rounding import DampedGram, damped_gram, gptq_round, output_error
from ingot.passes.numerics.rounding import RoundedWeight, round_weight
from ingot.passes.numerics.scheme import Scheme
from tests.each_case import each_case

SCHEMES = [Scheme(4, 32, False), Scheme(4, 32, True), Scheme(4, 0, True), Scheme(4, 128, False), Scheme(8, 64, True)]
HALVES = [replace(scheme, scale_dtype="float16") for scheme in SCHEMES]


def correlated(rows: int = 1024, columns: int = 172, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float64]]:
    """X^T X of inputs whose channels are correlated and differ in size, as in a decoder."""
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((columns, columns)) * np.exp(-np.arange(columns) / 40)[:, None]
    inputs = random.standard_normal((rows, columns)) @ mixed
    return np.asarray(inputs.T @ inputs)


def toy_weight(rows: int = 48, columns: int = 172) -> Float32Array:
    return np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32)


def error_of(weight: Float32Array, rounded: RoundedWeight, damped: DampedGram, scheme: Scheme) -> float:
    return output_error(weight - rounded.restored(scheme), damped.gram)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_output_error_is_well_below_that_of_rounding_to_nearest(scheme: Scheme) -> None:
    weight, damped = toy_weight(), damped_gram(correlated(), 0.01, act_order=True)
    grid = round_weight(weight, scheme)
    nearest = error_of(weight, grid, damped, scheme)
    plain = error_of(weight, gptq_round(weight, grid, damped, scheme, refine=0), damped, scheme)
    refined = error_of(weight, gptq_round(weight, grid, damped, scheme, refine=2), damped, scheme)
    assert plain < 0.5 * nearest
    assert refined < 0.95 * plain


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_codes_stay_in_range_and_scales_stay_positive(scheme: Scheme) -> None:
    weight, damped = toy_weight(), damped_gram(correlated(), 0.01, act_order=True)
    rounded = gptq_round(weight, round_weight(weight, scheme), damped, scheme, refine=2)
    low, high = scheme.code_range
    assert rounded.codes.dtype == (np.int8 if scheme.symmetric else np.uint8)
    assert low <= rounded.codes.min()
    assert rounded.codes.max() <= high
    assert (rounded.scale > 0).all()
    assert rounded.scale.shape == (48, scheme.num_blocks(172))


@pytest.mark.parametrize("scheme", HALVES, ids=str)
def test_fitted_scales_stay_float16_and_never_worsen_the_objective(scheme: Scheme) -> None:
    weight, damped = toy_weight(), damped_gram(correlated(), 0.01, act_order=True)
    grid, errors = round_weight(weight, scheme), []
    for refine in range(4):
        rounded = gptq_round(weight, grid, damped, scheme, refine)
        assert rounded.scale_dtype == "float16"
        errors.append(error_of(weight, rounded, damped, scheme))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.95 * errors[0]
    plain = replace(scheme, scale_dtype="float32")
    wide = gptq_round(weight, round_weight(weight, plain), damped, plain, refine=3)
    assert errors[-1] < 1.02 * error_of(weight, wide, damped, plain)


def test_a_grid_of_float32_scales_is_refined_in_float32() -> None:
    weight, damped, scheme = toy_weight() * np.float32(1e-7), damped_gram(correlated(), 0.01, act_order=True), HALVES[0]
    found, plain = (
        gptq_round(weight, round_weight(weight, each), damped, each, refine=2) for each in (scheme, SCHEMES[0])
    )
    np.testing.assert_array_equal(found.codes, plain.codes)
    np.testing.assert_array_equal(found.scale, plain.scale)


def test_uncorrelated_inputs_are_rounded_to_nearest() -> None:
    weight, scheme = toy_weight(), Scheme(4, 32, False)
    grid = round_weight(weight, scheme)
    rounded = gptq_round(weight, grid, damped_gram(np.eye(172), 0.01, act_order=True), scheme, refine=0)
    np.testing.assert_array_equal(rounded.codes, grid.codes)


def test_the_factor_is_that_of_the_damped_inverse_in_rounding_order() -> None:
    damped = damped_gram(correlated(), 0.01, act_order=True)
    ordered = damped.gram[np.ix_(damped.order, damped.order)].astype(np.float64)
    inverse = damped.factor.T.astype(np.float64) @ damped.factor
    np.testing.assert_allclose(inverse @ ordered, np.eye(172), atol=2e-3)
    assert (np.diff(np.diagonal(ordered)) <= 0).all()


def test_a_matrix_that_cannot_be_factored_is_damped_more() -> None:
    gram = correlated(columns=64)
    broken = gram - 0.05 * np.diagonal(gram).mean() * np.eye(64)
    assert damped_gram(broken, 0.01, act_order=True).damping == pytest.approx(0.1)


def test_a_channel_that_is_always_zero_is_rounded_to_nearest() -> None:
    gram = correlated()
    gram[7], gram[:, 7] = 0, 0
    weight, scheme = toy_weight(), Scheme(4, 32, False)
    grid = round_weight(weight, scheme)
    rounded = gptq_round(weight, grid, damped_gram(gram, 0.01, act_order=True), scheme, refine=0)
    np.testing.assert_array_equal(rounded.codes[:, 7], grid.codes[:, 7])


@pytest.mark.parametrize("bad", [np.zeros((8, 8)), np.full((8, 8), np.nan)])
def test_inputs_that_are_zero_or_not_finite_are_refused(bad: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    with pytest.raises(ValueError, match="zero on all of the calibration data, or not finite"):
        damped_gram(bad, 0.01, act_order=True)


def degenerate(kind: str, columns: int = 172) -> np.ndarray[Any, np.dtype[np.float64]]:
    """X^T X of inputs that make it singular or badly conditioned."""
    random = np.random.default_rng(4)
    inputs = random.standard_normal((300, columns))
    if kind == "one token":
        inputs = inputs[:1]
    elif kind == "fewer tokens than channels":
        inputs = inputs[:20]
    elif kind == "channels that are copies":
        inputs[:, 1::2] = inputs[:, ::2]
    elif kind == "huge range":
        inputs *= 10.0 ** random.uniform(-9, 9, columns)
    elif kind == "one channel is not zero":
        inputs[:, 1:] = 0
    return np.asarray(inputs.T @ inputs)


@each_case("refine", [0, 2])
@each_case(
    "kind",
    ["one token", "fewer tokens than channels", "channels that are copies", "huge range", "one channel is not zero"],
)
def test_degenerate_inputs_lose_no_more_than_rounding_to_nearest(kind: str, refine: int) -> None:
    weight, scheme = toy_weight(), Scheme(3, 64, symmetric=False)  # blocks that do not divide 172 columns
    damped, grid = damped_gram(degenerate(kind), 0.01, act_order=True), round_weight(weight, scheme)
    rounded = gptq_round(weight, grid, damped, scheme, refine)
    assert np.isfinite(rounded.scale).all()
    assert (rounded.scale > 0).all()
    assert rounded.codes.max() <= 7
    assert error_of(weight, rounded, damped, scheme) <= error_of(weight, grid, damped, scheme) * (1 + 1e-5)


def test_a_scaled_factor_inverts_the_scaled_matrix() -> None:
    random = np.random.default_rng(0)
    inputs = random.standard_normal((200, 24)) * np.linspace(0.2, 3, 24)
    scale = random.uniform(0.3, 3, 24).astype(np.float32)
    damped = damped_gram(inputs.T @ inputs, 0.01, act_order=True).scaled(scale)
    order = damped.order
    inverse = damped.factor.T @ damped.factor
    np.testing.assert_allclose(inverse @ damped.gram[np.ix_(order, order)], np.eye(24), atol=1e-4)
