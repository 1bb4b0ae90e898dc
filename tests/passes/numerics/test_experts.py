"""Routing of tokens to experts, as the reference defines it."""

import numpy as np

from ingot.passes.numerics.experts import Routing, combine, dispatch, route

LOGITS = np.array([[0.0, 2.0, 1.0, 2.0], [3.0, -1.0, 3.0, 3.0]], np.float32)


def test_equal_scores_go_to_the_lower_number() -> None:
    ids, weights = route(LOGITS, Routing(chosen=2))
    np.testing.assert_array_equal(ids, [[1, 3], [0, 2]])
    scores = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(weights, np.take_along_axis(scores, ids, axis=1), rtol=1e-6)


def test_normalised_weights_add_up_to_the_scale_and_are_not_divided_by_less_than_the_least_sum() -> None:
    _, weights = route(LOGITS, Routing(chosen=2, score="sigmoid", normalise=True, scale=2.5))
    np.testing.assert_allclose(weights.sum(axis=1), 2.5, rtol=1e-6)
    _, small = route(np.full((1, 4), -9.0, np.float32), Routing(chosen=2, score="sigmoid", normalise=True, least_sum=1))
    np.testing.assert_allclose(small, 1 / (1 + np.exp(9.0)), rtol=1e-5)


def test_sparsemixer_weighs_a_choice_against_the_experts_left_that_are_near_it() -> None:
    logits = np.array([[4.0, 3.0, 1.0, 3.1], [-1.0, -1.5, -8.0, -1.2], [0.0, 0.0, 0.0, -1.0]], np.float32)
    ids, weights = route(logits, Routing(chosen=2, score="sparsemixer", margin=0.25))
    np.testing.assert_array_equal(ids, [[0, 3], [0, 3], [0, 1]])
    # 3.1 and 3.0 are near 4.0, and each other; -1.2 is near -1.0, and -1.5 near -1.2; equal ones are near each other.
    shares = [(1.0, np.exp(-0.9) + np.exp(-1.0), np.exp(-0.1)), (1.0, np.exp(-0.2), np.exp(-0.3)), (1.0, 2.0, 1.0)]
    expected = [[first / (first + others), 1 / (1 + left)] for first, others, left in shares]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_a_bias_chooses_and_does_not_weigh() -> None:
    ids, weights = route(LOGITS[:1], Routing(chosen=1, score="sigmoid"), bias=np.array([9, 0, 0, 0], np.float32))
    np.testing.assert_array_equal(ids, [[0]])
    np.testing.assert_allclose(weights, [[0.5]])


def test_experts_are_chosen_from_the_groups_with_the_largest_pairs() -> None:
    logits = np.array([[4.0, -9.0, 2.5, 2.4, 0.0, 0.0]], np.float32)  # pairs: 4 and -9, 2.5 and 2.4, 0 and 0
    ids, _ = route(logits, Routing(chosen=2, score="sigmoid", groups=3, chosen_groups=1))
    np.testing.assert_array_equal(ids, [[2, 3]])


def test_results_are_those_of_each_tokens_experts() -> None:
    rng = np.random.default_rng(0)
    x, factors = rng.standard_normal((7, 5), np.float32), np.arange(1, 5)
    ids, weights = route(rng.standard_normal((7, 4), np.float32), Routing(chosen=3))
    results = [rows * factor for rows, factor in zip(dispatch(x, ids, 4), factors, strict=True)]
    expected = x * (weights * factors[ids]).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(combine(ids, weights, results), expected, rtol=1e-5)
