"""Mixtures of experts in numpy: which experts compute a token, and how their results are added.

These functions define the ops ingot::RouteExperts, ingot::DispatchExperts and ingot::CombineExperts; every engine is
compared with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ingot.passes.numerics.arrays import Float32Array

ScoreFunction = Literal["softmax", "sigmoid", "sparsemixer"]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class Routing:
    """Rules by which a router chooses experts; the attributes of ingot::RouteExperts.

    chosen         experts for each token
    score          function that makes scores of the logits; sparsemixer: each expert's is that of a softmax over itself
                   and those of the experts left that are near it
    margin         of sparsemixer: an expert is near where its logit is less than the chosen one's by at most this part
                   of the chosen logit or of its own magnitude, whichever is larger
    groups         groups of consecutive experts; a group's score is the sum of its group_best largest
    chosen_groups  only experts of the groups with the largest scores are chosen; equal to `groups`: of all
    normalise      the weights of a token are divided by their sum, or by `least_sum` if that is larger
    scale          factor of all weights
    """

    chosen: int
    score: ScoreFunction = "softmax"
    groups: int = 1
    chosen_groups: int = 1
    normalise: bool = False
    least_sum: float = 0.0
    scale: float = 1.0
    group_best: int = 2
    margin: float = 0.0


def route(logits: Float32Array, routing: Routing, bias: Float32Array | None = None) -> tuple[Int64Array, Float32Array]:
    """Experts of each token and their weights, both [tokens, chosen], from the router's logits [tokens, experts].

    The experts with the largest scores are chosen, the largest first, of equal ones that with the lower number. A bias
    [experts] is added for the choice alone (auxiliary-loss-free balancing, arXiv 2408.15664); groups are those of
    DeepSeek-V3 (arXiv 2412.19437). A softmax without bias and groups is not computed before the choice: logits have
    the same order. SparseMixer (arXiv 2409.12136) has neither.
    """
    if routing.score == "sparsemixer":
        ids, shares = _mixed_sparsely(logits, routing)
        return ids, _finished(shares, routing)
    scores = _softmax(logits) if routing.score == "softmax" else _sigmoid(logits)
    ranked = logits if routing.score == "softmax" and bias is None and routing.groups == 1 else scores
    if bias is not None:
        ranked = scores + bias
    if routing.chosen_groups < routing.groups:
        ranked = _in_chosen_groups(ranked, routing)
    ids = _largest(ranked, routing.chosen)
    weights: Float32Array = np.take_along_axis(scores, ids, axis=1)
    return ids, _finished(weights, routing)


def _finished(weights: Float32Array, routing: Routing) -> Float32Array:
    """The weights of each token, normalised and scaled."""
    if routing.normalise:
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), np.float32(routing.least_sum))
    return (weights * np.float32(routing.scale)).astype(np.float32)


def _mixed_sparsely(logits: Float32Array, routing: Routing) -> tuple[Int64Array, Float32Array]:
    """The experts with the largest logits, and the share of each in a softmax over itself and those left near it."""
    ids, left = _largest(logits, routing.chosen), logits
    tops: Float32Array = np.take_along_axis(logits, ids, axis=1)
    weights = np.empty_like(tops)
    for place in range(routing.chosen):
        top = tops[:, place, None]
        is_far = top - logits > np.float32(routing.margin) * np.maximum(np.abs(logits), top)
        near = np.where(is_far, np.float32(-np.inf), left)
        weights[:, place] = _softmax(near).max(axis=1)
        left = np.where(np.arange(logits.shape[1]) == ids[:, place, None], np.float32(-np.inf), left)
    return ids, weights


def dispatch(x: Float32Array, ids: Int64Array, num_experts: int) -> list[Float32Array]:
    """Rows of x [tokens, hidden] that each expert computes, in the order of the tokens."""
    return [x[(ids == expert).any(axis=1)] for expert in range(num_experts)]


def combine(ids: Int64Array, weights: Float32Array, results: Sequence[Float32Array]) -> Float32Array:
    """Sum of each token's results times their weights [tokens, hidden], in the order of its ids."""
    total = np.zeros((len(ids), results[0].shape[1]), np.float32)
    for place in range(ids.shape[1]):
        for expert, rows in enumerate(results):
            tokens = np.flatnonzero((ids == expert).any(axis=1))
            here = ids[tokens, place] == expert
            total[tokens[here]] += weights[tokens[here], place, None] * rows[here]
    return total


def _softmax(logits: Float32Array) -> Float32Array:
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores: Float32Array = raised / raised.sum(axis=1, keepdims=True)
    return scores


def _sigmoid(logits: Float32Array) -> Float32Array:
    scores: Float32Array = np.float32(1) / (np.float32(1) + np.exp(-logits))
    return scores


def _in_chosen_groups(ranked: Float32Array, routing: Routing) -> Float32Array:
    """-inf for experts of the groups that are not chosen."""
    by_group = ranked.reshape(len(ranked), routing.groups, -1)
    sums = np.sort(by_group, axis=2)[:, :, -routing.group_best :].sum(axis=2)
    is_chosen = np.zeros_like(sums, bool)
    np.put_along_axis(is_chosen, _largest(sums, routing.chosen_groups), True, axis=1)
    kept: Float32Array = np.where(is_chosen[:, :, None], by_group, np.float32(-np.inf)).reshape(ranked.shape)
    return kept


def _largest(values: Float32Array, count: int) -> Int64Array:
    """Places of the largest values of each row, largest first, of equal ones the first."""
    return np.argsort(-values, axis=1, kind="stable")[:, :count]
