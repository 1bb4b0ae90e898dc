"""Confidence intervals for measurements that are paired per item, and the smallest effects that they can detect.

The sampled unit is the *item*: a window of text, or a round of latency runs. Tokens within a window, and requests
within a round, are correlated and not treated as independent.

    mean_interval         mean over items: Student's t on the items
    ratio_interval        exp of a mean of log ratios: Student's t on the log scale
    unpaired_ratio_interval   ratio of samples that are not paired: Welch's t on the log scale
    proportion_interval   share of successes in clusters: Wilson's interval at the effective sample size
    positive_interval     mean of a skewed, non-negative quantity: bootstrap-t over items
    quantile_interval     quantile of the pooled values: expanded percentile bootstrap over items

docs/evidence.md explains the choices, tests/validation/test_statistics.py measures their coverage. Quantiles of
Student's t distribution are computed here, because scipy is not a dependency.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ingot.artifact.metrics import METRICS

CONFIDENCE = 0.95
POWER = 0.8
RESAMPLES = 2000

FloatArray = NDArray[np.float64]
_UPPER = (1 + CONFIDENCE) / 2
_CHUNK_CELLS = 1 << 22
_MAX_EXACT_DF = 1000
_INVISIBLE = 5e-5  # ratios that every table shows as 1.0000 are not a change
_BISECTIONS = 200


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % confidence interval.

    `detectable` is the smallest true change of the value that a sample of this size detects (a 95 % interval that
    excludes no change) with probability 0.8; `items` is the number of independent units.
    """

    value: float
    low: float
    high: float
    items: int
    method: str
    detectable: float = 0.0


@dataclass(frozen=True)
class Measured:
    """One measured metric.

    metric            its name in ingot.artifact.metrics.METRICS
    estimate          value and 95 % interval
    baseline, candidate   the value of each side, in `unit`; None for a metric that only compares (KL)
    unit              of baseline and candidate: "", "seconds", "tokens/s", "bytes"
    level             concurrency, for latency metrics
    sample_unit, sample_size   the sample of the interval: evaluation tokens, latency rounds, memory probes
    most_samples      the largest sample that this text allows; None if there is no such limit
    details           lines that explain the value where a gate on it does not pass
    """

    metric: str
    estimate: Estimate
    baseline: float | None = None
    candidate: float | None = None
    unit: str = ""
    level: int | None = None
    sample_unit: str = ""
    sample_size: int = 1
    most_samples: int | None = None
    details: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """metric, or metric@level."""
        return self.metric if self.level is None else f"{self.metric}@{self.level}"

    @property
    def change(self) -> Literal["better", "worse"] | None:
        """The side of "as the baseline" with the whole 95 % interval; None if it has both sides, or without a ratio.

        Only a ratio has a value that means no change, which is 1. KL divergence and disagreement are zero only for
        equal models, so that every quantized model would count as worse: gates limit them instead. `perplexity` is not
        paired with the baseline, unlike `perplexity_ratio`.
        """
        facts, estimate = METRICS[self.metric], self.estimate
        is_lower, is_higher = estimate.high < 1 - _INVISIBLE, estimate.low > 1 + _INVISIBLE
        if facts.comparison != "ratio" or is_lower == is_higher:
            return None
        return "better" if is_lower == (facts.better == "lower") else "worse"


def exact(value: float) -> Estimate:
    """A quantity without randomness, such as a size: an interval of zero width."""
    return Estimate(value, value, value, items=1, method="exact")


def mean_interval(items: ArrayLike, confidence: float = CONFIDENCE) -> Estimate:
    """Mean of [items] with Student's t interval. Requires at least two items.

    A confidence above 95 % is for one of several looks at a growing sample; see latency/sequential.py.
    """
    values = _checked(items)
    t = t_quantile((1 + confidence) / 2, len(values) - 1)
    mean, error = float(values.mean()), standard_error(values)
    detectable = (t + _power_t(len(values))) * error
    return Estimate(mean, mean - t * error, mean + t * error, len(values), "t over items", detectable)


def ratio_interval(log_ratios: ArrayLike, confidence: float = CONFIDENCE) -> Estimate:
    """Geometric mean of ratios, from [items] log ratios; the interval is computed on the log scale."""
    log = mean_interval(log_ratios, confidence)
    value, low, high = math.exp(log.value), math.exp(log.low), math.exp(log.high)
    return Estimate(value, low, high, log.items, "t over items, log scale", math.expm1(log.detectable))


def unpaired_ratio_interval(one: ArrayLike, other: ArrayLike) -> Estimate:
    """Ratio of the geometric means of two independent samples of log values, one over other: Welch's t (1947).

    For sides that were measured in different rounds. Each sample needs at least two values.
    """
    samples = (_checked(one), _checked(other))
    log = float(samples[0].mean() - samples[1].mean())
    parts = [standard_error(values) ** 2 for values in samples]
    error = math.sqrt(sum(parts))
    spread = sum(part**2 / (len(values) - 1) for part, values in zip(parts, samples, strict=True))
    df = max(1, math.floor(error**4 / spread)) if spread else _MAX_EXACT_DF
    t = t_quantile(_UPPER, df)
    low, high = math.exp(log - t * error), math.exp(log + t * error)
    detectable = math.expm1((t + t_quantile(POWER, df)) * error)
    return Estimate(math.exp(log), low, high, min(map(len, samples)), "Welch's t over items, log scale", detectable)


def proportion_interval(successes: ArrayLike, trials: ArrayLike, confidence: float = CONFIDENCE) -> Estimate:
    """Pooled share of successes, [items] counts of each, with Wilson's interval at the effective sample size.

    The effective size is trials divided by the design effect (variance between items over binomial variance, at least
    1), as Korn and Graubard (1998) do for clustered surveys. Unlike t, it stays within [0, 1] and has a width at 1.
    """
    hits, counts = _checked(successes), _checked(trials)
    total = float(counts.sum())
    share = float(hits.sum()) / total
    residuals = (hits - share * counts) / counts.mean()
    between = standard_error(residuals) ** 2
    binomial = share * (1 - share) / total
    effective = total / max(1.0, between / binomial) if binomial else total
    low, high = _wilson(share, effective, t_quantile((1 + confidence) / 2, len(hits) - 1))
    return Estimate(share, low, high, len(hits), "Wilson, effective sample size", _detectable(residuals))


def positive_interval(items: ArrayLike, seed: int) -> Estimate:
    """Mean of [items] non-negative, right-skewed values: bootstrap-t on the items (Efron and Tibshirani 1993, ch. 12).

    The resampled t statistics reflect the skew that Student's t would ignore; the lower end is at least 0.
    """
    values = _checked(items)
    mean, error = float(values.mean()), standard_error(values)
    if error <= 1e-12 * abs(mean):
        return Estimate(mean, mean, mean, len(values), "bootstrap-t over items")
    resampled = values[_resamples(len(values), seed)]  # [resamples, items]
    errors = resampled.std(axis=1, ddof=1) / math.sqrt(len(values))
    usable = errors > 1e-3 * error  # a resample of one repeated item has no spread, and no usable t
    statistics = (resampled.mean(axis=1)[usable] - mean) / errors[usable]
    below, above = np.quantile(statistics, [1 - _UPPER, _UPPER])
    low, high = max(0.0, mean - float(above) * error), mean - float(below) * error
    return Estimate(mean, low, high, len(values), "bootstrap-t over items", _detectable(values))


def quantile_interval(values: ArrayLike, item_of: ArrayLike, probability: float, seed: int) -> Estimate:
    """Quantile of the pooled [n] values, each belonging to item item_of[n] (0-based): items are resampled whole.

    The quantile is the smallest value with at least `probability` of all values at or below it. The bootstrap
    percentiles are expanded for few items, as in Hesterberg (2015, "What teachers should know about the bootstrap").
    """
    pooled = np.asarray(values, dtype=np.float64)
    owners = np.asarray(item_of, dtype=np.int64)
    items = int(owners.max()) + 1
    order = np.argsort(pooled, kind="stable")
    ranked, owners = pooled[order], owners[order]
    value = float(ranked[_rank(np.ones((1, len(ranked))), probability)[0]])
    resamples = _resamples(items, seed)
    counts = np.stack([np.bincount(resample, minlength=items) for resample in resamples])  # [resamples, items]
    rows = max(1, _CHUNK_CELLS // len(ranked))
    ranks = [_rank(counts[i : i + rows, owners], probability) for i in range(0, len(counts), rows)]
    replicates = ranked[np.concatenate(ranks)]
    outside = NormalDist().cdf(-math.sqrt(items / max(1, items - 1)) * t_quantile(_UPPER, max(1, items - 1)))
    low, high = (float(end) for end in np.quantile(replicates, [outside, 1 - outside]))
    detectable = (t_quantile(_UPPER, max(1, items - 1)) + _power_t(items)) * float(replicates.std())
    return Estimate(value, min(low, value), max(high, value), items, "bootstrap over items", detectable)


def standard_error(values: FloatArray) -> float:
    """Standard error of the mean of [items] independent values."""
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def percentiles(values: Sequence[float], wanted: Sequence[int]) -> dict[str, float]:
    """{"p50": ...} by linear interpolation; empty without values."""
    if not values:
        return {}
    return {f"p{p}": float(np.percentile(np.asarray(values), p)) for p in wanted}


def _checked(items: ArrayLike) -> FloatArray:
    values = np.asarray(items, dtype=np.float64)
    assert values.ndim == 1, values.shape
    assert len(values) >= 2, "an interval needs two items or more"
    return values


def _power_t(items: int) -> float:
    return t_quantile(POWER, max(1, items - 1))


def _detectable(values: FloatArray) -> float:
    """(t of the confidence + t of the power) standard errors, the normal-theory sample-size formula."""
    return (t_quantile(_UPPER, len(values) - 1) + _power_t(len(values))) * standard_error(values)


def _wilson(share: float, trials: float, t: float) -> tuple[float, float]:
    squared = t * t / trials
    centre = (share + squared / 2) / (1 + squared)
    spread = t / (1 + squared) * math.sqrt(share * (1 - share) / trials + squared / (4 * trials))
    low, high = max(0.0, centre - spread), min(1.0, centre + spread)
    return min(low, share), max(high, share)


def _resamples(items: int, seed: int) -> NDArray[np.int64]:
    """Indices [resamples, items], sampled with replacement by the seed."""
    return np.random.default_rng(seed).integers(0, items, size=(RESAMPLES, items))


def _rank(weights: NDArray[np.float64] | NDArray[np.int64], probability: float) -> NDArray[np.int64]:
    """First index in each row [resamples, n] at which the cumulative weight reaches `probability` of the total."""
    summed = np.cumsum(weights, axis=1)
    threshold = probability * summed[:, -1:]
    first: NDArray[np.int64] = np.argmax(summed >= threshold - 1e-9 * summed[:, -1:], axis=1)
    return first


def two_sided_probability(t: float, df: int) -> float:
    """P(|T| <= t) for `df` degrees of freedom, by the finite series of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    assert df >= 1, df
    theta = math.atan2(t, math.sqrt(df))
    cos_squared = math.cos(theta) ** 2
    if df == 1:
        return 2 * theta / math.pi
    if df % 2:
        series = _series(math.cos(theta), cos_squared, range(3, df - 1, 2))
        return 2 / math.pi * (theta + math.sin(theta) * series)
    return math.sin(theta) * _series(1.0, cos_squared, range(2, df - 1, 2))


def _series(first: float, cos_squared: float, divisors: range) -> float:
    """first * (1 + (d1-1)/d1 cos² + (d1-1)/d1 (d2-1)/d2 cos⁴ + ...) over the divisors."""
    total = term = first
    for divisor in divisors:
        term *= cos_squared * (divisor - 1) / divisor
        total += term
    return total


@cache
def t_quantile(probability: float, df: int) -> float:
    """The t with P(T <= t) = probability, for probability in [0.5, 1), to 12 digits.

    Above 1000 degrees of freedom it returns the value for 1000, which is larger by less than 0.1 %, so that no interval
    is too narrow.
    """
    assert 0.5 <= probability < 1, probability
    df = min(df, _MAX_EXACT_DF)
    within = 2 * probability - 1
    low, high = 0.0, 1.0
    while two_sided_probability(high, df) < within:
        high *= 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if two_sided_probability(middle, df) < within else (low, middle)
    return high
