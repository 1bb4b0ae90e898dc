"""Accuracy items -> metrics with intervals. See docs/evidence.md for the definitions."""

from dataclasses import replace

import numpy as np

from ingot.validation.accuracy import AccuracyResult
from ingot.validation.measured import Measured
from ingot.validation.scoring import FloatArray
from ingot.validation.statistics import (
    Estimate,
    positive_interval,
    proportion_interval,
    quantile_interval,
    ratio_interval,
)


def accuracy_metrics(result: AccuracyResult) -> list[Measured]:
    """perplexity, perplexity_ratio, kl_mean, kl_p99, top1_agreement, over the windows."""
    tokens, seed = _column(result, "tokens"), result.options.seed
    candidate = _column(result, "candidate_nll") / tokens  # [windows] nats per token
    difference = candidate - _column(result, "baseline_nll") / tokens
    sides = (result.baseline_perplexity, result.candidate_perplexity)
    estimates = {
        "perplexity": _perplexity(candidate),
        "perplexity_ratio": ratio_interval(difference),
        "kl_mean": positive_interval(_column(result, "kl") / tokens, seed),
        "kl_p99": quantile_interval(result.token_kl, result.window_of_token, 0.99, seed),
        "top1_agreement": proportion_interval(_column(result, "agreements"), tokens),
    }
    return [
        _measured(result, name, estimate, sides if name.startswith("perplexity") else (None, None))
        for name, estimate in estimates.items()
    ]


def _perplexity(nll: FloatArray) -> Estimate:
    """exp of the mean: `detectable` becomes a change of the perplexity itself."""
    estimate = ratio_interval(nll)
    return replace(estimate, detectable=estimate.value * estimate.detectable)


def _measured(
    result: AccuracyResult, metric: str, estimate: Estimate, sides: tuple[float | None, float | None]
) -> Measured:
    baseline, candidate = sides
    return Measured(
        metric=metric,
        estimate=estimate,
        baseline=baseline,
        candidate=candidate,
        sample_unit="evaluation tokens",
        sample_size=result.num_tokens,
    )


def _column(result: AccuracyResult, name: str) -> FloatArray:
    return np.array([getattr(item, name) for item in result.items], dtype=np.float64)
