"""Confidence intervals: textbook values, coverage by simulation, and quantiles of Student's t."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from ingot.validation import statistics
from ingot.validation.statistics import (
    Estimate,
    Measured,
    exact,
    mean_interval,
    percentiles,
    positive_interval,
    proportion_interval,
    quantile_interval,
    ratio_interval,
    t_quantile,
    two_sided_probability,
    unpaired_ratio_interval,
)
from tests.each_case import each_case

_REPEATS = 400
Draw = Callable[[np.random.Generator], Estimate]


def _coverage(draw: Draw, truth: float, repeats: int = _REPEATS) -> float:
    rng = np.random.default_rng(20240229)
    estimates = [draw(rng) for _ in range(repeats)]
    return sum(estimate.low <= truth <= estimate.high for estimate in estimates) / repeats


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 400)


def test_mean_interval_equals_the_textbook_example() -> None:
    estimate = mean_interval([1.0, 2.0, 3.0, 4.0])  # sd 1.2910, se 0.6455, t 3.1824
    assert estimate.value == 2.5
    assert (estimate.low, estimate.high) == pytest.approx((0.445739, 4.554261), abs=1e-6)
    assert estimate.detectable == pytest.approx((3.182446 + 0.978472) * 0.6454972, abs=1e-5)


def test_ratio_interval_is_the_mean_interval_on_the_log_scale() -> None:
    logs = [0.1, 0.2, 0.15]
    ratio, log = ratio_interval(logs), mean_interval(logs)
    assert (ratio.value, ratio.low, ratio.high) == (math.exp(log.value), math.exp(log.low), math.exp(log.high))


def test_equal_items_give_an_interval_of_zero_width() -> None:
    assert mean_interval([0.3, 0.3, 0.3]).low == mean_interval([0.3, 0.3, 0.3]).high == pytest.approx(0.3)
    assert positive_interval([0.0, 0.0], seed=0).high == 0.0
    assert exact(0.5) == Estimate(0.5, 0.5, 0.5, 1, "exact")


def test_a_single_item_has_no_interval() -> None:
    with pytest.raises(AssertionError, match="two items"):
        mean_interval([1.0])


def test_full_agreement_has_an_interval_with_a_width() -> None:
    estimate = proportion_interval([512] * 20, [512] * 20)
    assert estimate.value == estimate.high == 1.0
    assert 0.999 < estimate.low < 1.0


def test_clusters_that_differ_widen_the_interval_of_a_proportion() -> None:
    alike = proportion_interval([50] * 20, [100] * 20)
    apart = proportion_interval([0, 100] * 10, [100] * 20)
    assert apart.high - apart.low > 4 * (alike.high - alike.low)


def test_quantile_is_the_smallest_value_with_enough_values_at_or_below_it() -> None:
    values = np.arange(1, 201, dtype=np.float64)
    assert quantile_interval(values, np.arange(200) % 10, 0.99, seed=0).value == 198.0
    assert quantile_interval(values[::-1], np.arange(200) % 10, 0.5, seed=0).value == 100.0


def test_the_same_seed_gives_the_same_interval() -> None:
    values = np.random.default_rng(1).lognormal(size=50)
    assert positive_interval(values, seed=3) == positive_interval(values, seed=3)
    assert positive_interval(values, seed=3) != positive_interval(values, seed=4)


def test_no_values_have_no_percentiles() -> None:
    assert percentiles([], (50, 99)) == {}
    assert percentiles([1.0, 2.0, 3.0], (50,)) == {"p50": 2.0}


@pytest.mark.parametrize("items", [5, 30])
def test_mean_interval_covers_the_truth_95_times_in_100(items: int) -> None:
    assert 0.92 <= _coverage(lambda rng: mean_interval(rng.normal(1, 2, items)), 1.0) <= 0.98


@pytest.mark.usefixtures("few_resamples")
@pytest.mark.parametrize("items", [20, 60])
def test_positive_interval_covers_the_mean_of_skewed_items(items: int) -> None:
    truth = math.exp(0.6**2 / 2)
    assert 0.91 <= _coverage(lambda rng: positive_interval(rng.lognormal(0, 0.6, items), 0), truth) <= 0.98


def test_proportion_interval_covers_the_truth_when_clusters_differ() -> None:
    def draw(rng: np.random.Generator) -> Estimate:
        return proportion_interval(rng.binomial(128, rng.beta(95, 5, 30)), np.full(30, 128))

    assert 0.92 <= _coverage(draw, 0.95) <= 0.98


@pytest.mark.usefixtures("few_resamples")
def test_quantile_interval_covers_the_99th_percentile_of_correlated_tokens() -> None:
    truth = math.exp(math.sqrt(1 + 0.3**2) * 2.3263479)

    def draw(rng: np.random.Generator) -> Estimate:
        values = rng.lognormal(0, 1, (40, 64)) * np.exp(rng.normal(0, 0.3, (40, 1)))
        return quantile_interval(values.ravel(), np.repeat(np.arange(40), 64), 0.99, seed=0)

    assert 0.88 <= _coverage(draw, truth, repeats=150) <= 0.99


def test_a_detectable_effect_is_found_four_times_in_five() -> None:
    rng = np.random.default_rng(7)
    effect = float(np.mean([mean_interval(rng.normal(0, 1, 30)).detectable for _ in range(100)]))
    found = [mean_interval(rng.normal(effect, 1, 30)).low > 0 for _ in range(_REPEATS)]
    assert 0.74 <= np.mean(found) <= 0.86


@each_case(
    ("probability", "df", "expected"),
    [
        (0.975, 1, 12.7062047),
        (0.975, 2, 4.30265273),
        (0.975, 3, 3.18244631),
        (0.975, 4, 2.77644511),
        (0.975, 9, 2.26215716),
        (0.975, 119, 1.98009988),
        (0.8, 8, 0.88888952),
        (0.5, 7, 0.0),
    ],
)
def test_quantiles_equal_the_published_tables(probability: float, df: int, expected: float) -> None:
    assert t_quantile(probability, df) == pytest.approx(expected, abs=1e-7)


def test_quantile_is_the_inverse_of_the_probability() -> None:
    for df in (1, 2, 5, 30, 999):
        assert two_sided_probability(t_quantile(0.9, df), df) == pytest.approx(0.8, abs=1e-12)


def test_many_degrees_of_freedom_never_make_the_interval_too_narrow() -> None:
    assert t_quantile(0.975, 10**9) == t_quantile(0.975, 1000)
    assert 1.95996 < t_quantile(0.975, 10**9) < 1.9625


@each_case(
    ("metric", "low", "high", "change"),
    [
        ("tpot_ratio", 0.8, 0.99, "better"),
        ("tpot_ratio", 0.9, 1.1, None),
        ("tpot_ratio", 1.01, 1.2, "worse"),
        ("tpot_ratio", 1.00004, 1.2, None),  # shown as 1.0000
        ("throughput_ratio", 1.01, 1.2, "better"),
        ("throughput_ratio", 0.8, 0.99, "worse"),
        ("size_ratio", 1.0, 1.0, None),
        ("size_ratio", 0.25, 0.25, "better"),
        ("kl_mean", 0.01, 0.02, None),
        ("top1_agreement", 0.9, 0.95, None),
        ("perplexity", 8.0, 9.0, None),
    ],
)
def test_a_ratio_changed_if_its_whole_interval_is_on_one_side_of_one(
    metric: str, low: float, high: float, change: str | None
) -> None:
    assert Measured(metric, Estimate((low + high) / 2, low, high, items=5, method="")).change == change


def test_an_unpaired_ratio_has_the_interval_of_welch() -> None:
    one, other = np.log([1.02, 0.98, 1.05, 1.01, 0.97]), np.log([2.0, 2.2, 1.9])
    found = unpaired_ratio_interval(one, other)
    assert found.value == pytest.approx(math.exp(one.mean() - other.mean()))
    parts = [one.var(ddof=1) / 5, other.var(ddof=1) / 3]
    degrees = math.floor(sum(parts) ** 2 / (parts[0] ** 2 / 4 + parts[1] ** 2 / 2))
    half = t_quantile(0.975, degrees) * math.sqrt(sum(parts))
    assert (found.low, found.high) == pytest.approx((found.value * math.exp(-half), found.value * math.exp(half)))
    inverse = unpaired_ratio_interval(other, one)
    assert (inverse.value, inverse.low, inverse.high) == pytest.approx((1 / found.value, 1 / found.high, 1 / found.low))
    same = unpaired_ratio_interval([0.5, 0.5], [0.5, 0.5])
    assert (same.value, same.low, same.high) == (1, 1, 1)
