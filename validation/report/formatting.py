"""Formats numbers for the report, the summary and messages."""

from ingot.artifact.metrics import METRICS
from ingot.sizes import format_bytes
from ingot.validation.statistics import Measured

_TITLES = {
    "perplexity": "Perplexity",
    "perplexity_ratio": "Perplexity ratio",
    "kl_mean": "KL divergence, mean",
    "kl_p99": "KL divergence, p99",
    "top1_agreement": "Top-1 agreement",
    "ttft_ratio": "Time to first token",
    "tpot_ratio": "Time per output token",
    "e2e_ratio": "End-to-end time",
    "throughput_ratio": "Throughput",
    "size_ratio": "Size on disk",
    "peak_memory_ratio": "Peak memory",
}


def title(metric: str, level: int | None = None) -> str:
    """A metric's title, with its concurrency."""
    words = _TITLES.get(metric, metric.replace("_", " "))
    return words if level is None else f"{words}, {level} in flight"


def key_title(key: str) -> str:
    """The title of "metric" or "metric@level"."""
    metric, _, level = key.partition("@")
    return title(metric, int(level) if level else None)


def seconds(value: float) -> str:
    """0.00123 -> "1.23 ms"."""
    return seconds_row([value])


def seconds_row(values: list[float]) -> str:
    """Format several times in the unit of the largest: "1.2 / 3.4 / 5.6 ms"."""
    unit, factor = _time_unit(max(values))
    return f"{' / '.join(_three_digits(value * factor) for value in values)} {unit}"


def quantity(value: float | None, unit: str) -> str:
    """Format a value in "seconds", "bytes", "tokens/s" or without unit; a dash for None."""
    if value is None:
        return "-"
    if unit == "seconds":
        return seconds(value)
    if unit == "bytes":
        return format_bytes(value)
    return f"{value:,.4g} {unit}".rstrip() if unit else f"{value:.4f}"


def metric_value(metric: str, value: float) -> str:
    """Format a metric's value: ratios with four decimals, shares in percent, KL with four digits."""
    if metric.partition("@")[0] == "top1_agreement":
        return f"{100 * value:.2f} %"
    if METRICS[metric.partition("@")[0]].comparison == "ratio":
        return f"{value:.4f}"
    return f"{value:.4g}" if abs(value) < 1 else f"{value:.4f}"


def interval(measured: Measured) -> str:
    """Format the interval as "0.98 to 1.02", or "exact"."""
    estimate = measured.estimate
    if estimate.method == "exact":
        return "exact"
    return f"{metric_value(measured.metric, estimate.low)} to {metric_value(measured.metric, estimate.high)}"


def detectable(measured: Measured) -> str:
    """Format the smallest detectable effect, in the metric's unit."""
    if measured.estimate.method == "exact":
        return "-"
    value = measured.estimate.detectable
    as_percent = METRICS[measured.metric].comparison == "ratio" or measured.metric == "top1_agreement"
    return f"±{100 * value:.2f} %" if as_percent else f"±{value:.3g}"


def _time_unit(value: float) -> tuple[str, float]:
    if value >= 1:
        return "s", 1.0
    return ("ms", 1e3) if value >= 1e-3 else ("µs", 1e6)


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
