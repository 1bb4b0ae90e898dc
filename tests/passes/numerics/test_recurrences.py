"""The recurrences: chunks carry the state exactly, and results are those of sums over all earlier tokens."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.passes.numerics.recurrences import (
    DeltaRule,
    ScanAttributes,
    gated_delta_rule,
    selective_scan,
    short_convolution,
)
from tests.each_case import each_case

Array = NDArray[Any]
Run = Callable[[list[Array], Array], tuple[Array, Array]]
TOKENS = 11
RULE = DeltaRule(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, scale=0.7)
SCAN = ScanAttributes(num_heads=4, head_dim=3, state_dim=5, num_groups=2)


def _random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def _delta_operands() -> list[Array]:
    q, k, v = (_random(TOKENS, width, seed=seed) for seed, width in enumerate((6, 6, 20)))
    return [q, k, v, -np.abs(_random(TOKENS, 4)), 1 / (1 + np.exp(-_random(TOKENS, 4, seed=1)))]


def _scan_operands() -> list[Array]:
    return [_random(TOKENS, 12), np.abs(_random(TOKENS, 4)), _random(TOKENS, 10), _random(TOKENS, 10, seed=1)]


def test_a_convolution_is_the_sum_over_the_last_inputs_of_a_channel() -> None:
    x, weight, bias = _random(TOKENS, 3), _random(3, 4), _random(3)
    got, state = short_convolution(x, weight, bias, "", np.zeros((3, 3)))
    expected = np.stack([np.convolve(x[:, c], weight[c, ::-1])[:TOKENS] for c in range(3)], axis=1) + bias
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    np.testing.assert_array_equal(state, x[-3:])
    activated, _ = short_convolution(x, weight, bias, "silu", np.zeros((3, 3)))
    np.testing.assert_allclose(activated, expected / (1 + np.exp(-expected)), rtol=1e-12)


def test_the_delta_rule_with_beta_1_and_no_decay_recalls_the_last_value_of_a_key() -> None:
    rule = DeltaRule(num_key_heads=1, num_value_heads=2, key_dim=3, value_dim=4, scale=1.0)
    keys, values = np.eye(3)[[0, 1, 0, 2]], _random(4, 8)
    still, full = np.zeros((4, 2)), np.ones((4, 2))
    _, state = gated_delta_rule(keys, keys, values, still, full, rule, np.zeros(rule.state_shape))
    got, _ = gated_delta_rule(np.eye(3), np.eye(3), np.zeros((3, 8)), still[:3], 0 * full[:3], rule, state)
    np.testing.assert_allclose(got, values[[2, 1, 3]], rtol=1e-4)


def test_the_delta_rule_is_a_matrix_recurrence_of_each_value_head() -> None:
    """S_t = exp(g_t) (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T, with the key head of the value head."""
    q, k, v, decay, beta = _delta_operands()
    rule = DeltaRule(2, 4, 3, 5, scale=0.7, normalize=False)
    got, states = gated_delta_rule(q, k, v, decay, beta, rule, np.zeros(rule.state_shape))
    for head in range(4):
        own, state = slice(head // 2 * 3, head // 2 * 3 + 3), np.zeros((3, 5))
        for t in range(TOKENS):
            key, value = k[t, own], v[t, head * 5 : head * 5 + 5]
            erase = np.eye(3) - beta[t, head] * np.outer(key, key)
            state = np.exp(decay[t, head]) * erase @ state + beta[t, head] * np.outer(key, value)
            np.testing.assert_allclose(got[t, head * 5 : head * 5 + 5], 0.7 * q[t, own] @ state, rtol=1e-9)
        np.testing.assert_allclose(states[head], state, rtol=1e-9)


def test_a_scan_is_the_decayed_sum_over_all_earlier_tokens() -> None:
    x, dt, b, c = _scan_operands()
    a, d = -np.abs(_random(4)), _random(4, seed=1)
    got, _ = selective_scan(x, dt, b, c, a, d, SCAN, np.zeros(SCAN.state_shape))
    heads, groups = x.reshape(TOKENS, 4, 3), [y.reshape(TOKENS, 2, 5) for y in (b, c)]
    for head in range(4):
        passed = np.cumsum(dt[:, head] * a[head])
        decay = np.tril(np.exp(passed[:, None] - passed))
        scores = groups[1][:, head // 2] @ groups[0][:, head // 2].T
        expected = (decay * scores * dt[:, head]) @ heads[:, head] + d[head] * heads[:, head]
        np.testing.assert_allclose(got.reshape(TOKENS, 4, 3)[:, head], expected, rtol=1e-9)


def _runs(dtype: type) -> list[tuple[list[Array], Run, tuple[int, ...]]]:
    """Operands by token, the recurrence over them, and the shape of its state."""
    weight: Array = _random(3, 4).astype(dtype)
    a: Array = -np.abs(_random(4)).astype(dtype)

    def convolve(rows: list[Array], state: Array) -> tuple[Array, Array]:
        return short_convolution(rows[0], weight, None, "silu", state)

    def delta(rows: list[Array], state: Array) -> tuple[Array, Array]:
        q, k, v, decay, beta = rows
        return gated_delta_rule(q, k, v, decay, beta, RULE, state)

    def scan(rows: list[Array], state: Array) -> tuple[Array, Array]:
        x, dt, b, c = rows
        return selective_scan(x, dt, b, c, a, a, SCAN, state)

    found: list[tuple[list[Array], Run, tuple[int, ...]]] = [
        ([_random(TOKENS, 3)], convolve, (3, 3)),
        (_delta_operands(), delta, RULE.state_shape),
        (_scan_operands(), scan, SCAN.state_shape),
    ]
    return [([operand.astype(dtype) for operand in rows], run, shape) for rows, run, shape in found]


@each_case("dtype", [np.float32, np.float64])
def test_chunks_have_the_bits_of_the_whole(dtype: type) -> None:
    for rows, run, shape in _runs(dtype):
        whole, last = run(rows, np.zeros(shape, dtype))
        state: Array = np.zeros(shape, dtype)
        results = []
        for start, stop in ((0, 1), (1, 7), (7, 8), (8, TOKENS)):
            result, state = run([operand[start:stop] for operand in rows], state)
            results.append(result)
        assert whole.dtype == state.dtype == dtype
        np.testing.assert_array_equal(np.concatenate(results), whole)
        np.testing.assert_array_equal(state, last)
