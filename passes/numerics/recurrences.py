"""Recurrent layers in numpy: short convolution, gated delta rule, selective scan, each over the tokens of one sequence.

These functions define the ops ingot::ShortConvolution, ingot::GatedDeltaRule and ingot::SelectiveScan; every engine is
compared with them. Each takes the state before the first token and returns the state after the last, so that a sequence
may be computed whole or in chunks. They compute in the dtype of their inputs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]  # float32 or float64, one of them throughout a call
L2_EPSILON = 1e-6


@dataclass(frozen=True)
class DeltaRule:
    """The attributes of ingot::GatedDeltaRule.

    num_key_heads, key_dim        heads of queries and keys; value head h reads key head h // (value heads / key heads)
    num_value_heads, value_dim    heads of values
    scale                         factor of queries
    normalize                     queries and keys are divided by their length, head by head: x / sqrt(sum x^2 + 1e-6)
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    scale: float
    normalize: bool = True

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of one sequence's state."""
        return self.num_value_heads, self.key_dim, self.value_dim


@dataclass(frozen=True)
class ScanAttributes:
    """The attributes of ingot::SelectiveScan: head h reads B and C of group h // (num_heads / num_groups)."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of one sequence's state."""
        return self.num_heads, self.head_dim, self.state_dim


def short_convolution(
    x: Floats, weight: Floats, bias: Floats | None, activation: str, state: Floats
) -> tuple[Floats, Floats]:
    """Convolve each channel of x [tokens, C] with the last K inputs; the last of weight [C, K] is that of the token.

    state [K - 1, C]: the last inputs before x, the oldest first; zeros for a new sequence. activation: "" or "silu".
    """
    inputs = np.concatenate((state, x))
    width, tokens = weight.shape[1], len(x)
    total = np.zeros_like(x) if bias is None else np.broadcast_to(bias, x.shape).astype(x.dtype)
    for j in range(width):
        total = total + weight[:, j] * inputs[j : j + tokens]
    result = total * _sigmoid(total) if activation == "silu" else total
    return result, inputs[tokens:]


def gated_delta_rule(
    q: Floats, k: Floats, v: Floats, decay: Floats, beta: Floats, rule: DeltaRule, state: Floats
) -> tuple[Floats, Floats]:
    """Gated delta rule (arXiv 2412.06464), token by token; result [tokens, value heads * value_dim].

    q, k [tokens, key heads * key_dim]; v [tokens, value heads * value_dim]; decay (its logarithm, at most 0) and beta
    [tokens, value heads]; state S [value heads, key_dim, value_dim]. For each head

        S = exp(decay) S;  S = S + k (beta (v - k^T S))^T;  o = scale q^T S
    """
    tokens, heads = len(q), rule.num_value_heads
    q, k = (x.reshape(tokens, rule.num_key_heads, rule.key_dim) for x in (q, k))
    if rule.normalize:
        q, k = _unit_length(q), _unit_length(k)
    q, k = (np.repeat(x, heads // rule.num_key_heads, axis=1) for x in (q, k))
    v = v.reshape(tokens, heads, rule.value_dim)
    result = np.empty_like(v)
    for t in range(tokens):
        state = np.exp(decay[t])[:, None, None] * state
        change = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t][:, :, None] * change[:, None, :]
        result[t] = np.einsum("hk,hkv->hv", q[t], state) * v.dtype.type(rule.scale)
    return result.reshape(tokens, -1), state


def selective_scan(
    x: Floats, dt: Floats, b: Floats, c: Floats, a: Floats, d: Floats, scan: ScanAttributes, state: Floats
) -> tuple[Floats, Floats]:
    """The scan of Mamba-2 (arXiv 2405.21060), token by token; result [tokens, heads * head_dim].

    x [tokens, heads * head_dim]; dt [tokens, heads], positive; b, c [tokens, groups * state_dim]; a (negative) and d
    [heads]; state S [heads, head_dim, state_dim]. For each head

        S = exp(dt a) S + dt x b^T;  y = S c + d x
    """
    tokens, heads = len(x), scan.num_heads
    x = x.reshape(tokens, heads, scan.head_dim)
    b, c = (
        np.repeat(y.reshape(tokens, scan.num_groups, scan.state_dim), heads // scan.num_groups, axis=1) for y in (b, c)
    )
    result = np.empty_like(x)
    for t in range(tokens):
        fed = (dt[t][:, None] * x[t])[:, :, None] * b[t][:, None, :]
        state = np.exp(dt[t] * a)[:, None, None] * state + fed
        result[t] = np.einsum("hpn,hn->hp", state, c[t]) + d[:, None] * x[t]
    return result.reshape(tokens, -1), state


def _unit_length(x: Floats) -> Floats:
    result: Floats = x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + x.dtype.type(L2_EPSILON))
    return result


def _sigmoid(x: Floats) -> Floats:
    result: Floats = 1 / (1 + np.exp(-x))
    return result
