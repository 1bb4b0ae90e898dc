"""Formats numbers for the report, the summary and messages.

A measured number is shown with the digits that its interval supports, an exact one with four.
"""

import math
from collections.abc import Sequence

from ingot.artifact import GateOutcome
from ingot.artifact.metrics import METRICS
from ingot.sizes import format_bytes
from ingot.validation.statistics import Estimate, Measured

_TITLES = {
    "perplexity": "Perplexity",
    "perplexity_ratio": "Perplexity ratio",
    "kl_mean": "KL divergence, mean",
    "kl_p99": "KL divergence, p99",
    "top1_agreement": "Top-1 agreement",
    "greedy_agreement": "Greedy agreement",
    "ttft_ratio": "Time to first token",
    "tpot_ratio": "Time per output token",
    "e2e_ratio": "End-to-end time",
    "throughput_ratio": "Throughput",
    "goodput": "Goodput",
    "slo": "Requests within the objective",
    "size_ratio": "Size on disk",
    "peak_memory_ratio": "Peak memory",
    "verify": "Feature pairs that change an answer",
}

_EXACT_DIGITS = 4
_INTERVAL_DIGITS = 2  # significant digits of half an interval's width
_MOST_DIGITS = 6  # limit for a value with a very narrow interval
_MOST_CHANGE_DECIMALS = 3
# Processes of one build agree to a page; those of the next build differ by 0.001, which the interval does not cover.
_MOST_DECIMALS = {"peak_memory_ratio": 3}
_LARGE_EFFECT = 0.5
_MOST_PERCENT = 999
_TINY, _HUGE = 1e-4, 1e7  # beyond these, numbers have an exponent


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


def seconds_row(values: Sequence[float]) -> str:
    """Format several times in the unit of the largest: "1.2 / 3.4 / 15.6 ms"."""
    unit, factor = _time_unit(max(values))
    return f"{' / '.join(_aligned([value * factor for value in values]))} {unit}"


def quantity(value: float | None, unit: str) -> str:
    """Format a value in "seconds", "bytes", "tokens/s" or without unit; a dash for None."""
    if value is None:
        return "-"
    if unit == "seconds":
        return seconds(value)
    if unit == "bytes":
        return format_bytes(value)
    return f"{_three_digits(value)} {unit}" if unit else significant(value, _EXACT_DIGITS)


def parameters(count: int) -> str:
    """5_770_496 -> "5.77 M"."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:
            return f"{significant(count / size, 3)} {unit}"
    return str(count)


def sides(measured: Measured) -> tuple[str, str]:
    """Baseline and candidate in one unit. A metric of the pair, such as KL, is a value of the candidate alone."""
    baseline, candidate = measured.baseline, measured.candidate
    if baseline is None or candidate is None:
        return quantity(baseline, measured.unit), quantity(candidate, measured.unit) if candidate else value(measured)
    if measured.unit == "seconds":
        before, _, after = seconds_row([baseline, candidate]).partition(" / ")
        return f"{before} {after.split()[-1]}", after
    return quantity(baseline, measured.unit), quantity(candidate, measured.unit)


def limit(gate: GateOutcome) -> str:
    """A gate's limit as the recipe states it, a share in percent: "≤ 1.03", "≥ 90 %"."""
    scale, unit = _display(gate.name)
    return f"{'≤' if gate.bound == 'max' else '≥'} {scale * gate.limit:.6g}{unit}"


def value(measured: Measured) -> str:
    """The measured value with the digits that its interval supports."""
    estimate = measured.estimate
    return fitted(measured.metric, [estimate.value], estimate.low, estimate.high)[0]


def interval(measured: Measured) -> str:
    """The 95 % interval, as "0.98 to 1.02", or "exact"."""
    estimate = measured.estimate
    if estimate.method == "exact":
        return "exact"
    return range_of(measured.metric, estimate.low, estimate.high)


def range_of(metric: str, low: float, high: float) -> str:
    """Both ends of an interval, with the unit once: "92.4 to 93.9 %"."""
    start, end = fitted(metric, [low, high], low, high)
    return f"{start.removesuffix(_display(metric)[1])} to {end}"


def fitted(metric: str, values: Sequence[float], low: float, high: float) -> list[str]:
    """Format a metric's values with as many decimals as show half the interval's width with two digits.

    "10.9" for 8.0 to 14.9, "1.0108" for 1.0074 to 1.0143. An interval without width supports four digits.
    """
    scale, unit = _display(metric)
    half = scale * (high - low) / 2
    if half <= 0:
        return [significant(scale * value, _EXACT_DIGITS) + unit for value in values]
    shown = [scale * abs(value) for value in (*values, low, high) if value]
    largest = max(shown)
    decimals = min(_decimals(half, _INTERVAL_DIGITS), _decimals(largest, _MOST_DIGITS))
    decimals = max(decimals, _decimals(min(shown), 1)) if largest >= _TINY else decimals
    decimals = min(decimals, _MOST_DECIMALS.get(metric, decimals))
    return [_number(scale * value, decimals, largest) + unit for value in values]


def plus_minus(estimate: Estimate, scale: float = 1.0) -> str:
    """An estimate times `scale` with half the width of its interval, as "0.0171 ±0.0011"; an exact one alone."""
    low, high = estimate.low * scale, estimate.high * scale
    if low == high:
        return significant(estimate.value * scale, _EXACT_DIGITS)
    value, half = fitted("", [estimate.value * scale, (high - low) / 2], low, high)
    return f"{value} ±{half}"


def with_interval(estimate: Estimate, scale: float = 1.0) -> str:
    """An estimate times `scale` with its interval, as "1.31 (1.25 to 1.38)"; an exact one alone."""
    low, high = estimate.low * scale, estimate.high * scale
    if low == high:
        return significant(estimate.value * scale, _EXACT_DIGITS)
    value, *ends = fitted("", [estimate.value * scale, low, high], low, high)
    return f"{value} ({ends[0]} to {ends[1]})"


def ratio(measured: Measured) -> str:
    """The paired ratio of candidate to baseline; a dash for a metric that is not a ratio."""
    return value(measured) if _is_ratio(measured) else "-"


def change(measured: Measured) -> str:
    """The paired ratio as a change in percent: "-3.4 %", "+1.08 %"; a dash for a metric that is not a ratio."""
    if not _is_ratio(measured):
        return "-"
    estimate = measured.estimate
    percent = 100 * (estimate.value - 1)
    if percent > _MOST_PERCENT:
        return f"> +{_MOST_PERCENT} %"
    half = 100 * (estimate.high - estimate.low) / 2
    decimals = _decimals(half, _INTERVAL_DIGITS) if half > 0 else _decimals(percent, 3)
    most = _MOST_DECIMALS.get(measured.metric, _MOST_CHANGE_DECIMALS + 2) - 2
    decimals = max(min(decimals, most), _decimals(percent, 1) if abs(percent) >= 1 else 0)
    rounded = round(percent, decimals)
    return f"{rounded:+.{max(0, decimals)}f} %" if rounded else "0 %"


def detectable(measured: Measured) -> str:
    """Format the smallest detectable effect: in percent, as a factor, in points or as a number."""
    if measured.estimate.method == "exact":
        return "-"
    effect = measured.estimate.detectable
    if METRICS[measured.metric].is_share:
        return f"±{significant(100 * effect, _INTERVAL_DIGITS)} points"
    if not _is_ratio(measured):
        return f"±{significant(effect, _INTERVAL_DIGITS)}"
    if effect >= _LARGE_EFFECT:  # the interval is symmetric on the log scale: no ratio falls by more than 100 %
        return f"factor {significant(1 + effect, _INTERVAL_DIGITS)}"
    return f"±{significant(100 * effect, _INTERVAL_DIGITS)} %"


def significant(value: float, digits: int) -> str:
    """Format with this many significant digits: 0.01716, 1.011, 12, 1,230; very small ones as 2.5e-5."""
    rounded = float(f"{value:.{digits - 1}e}")
    return _number(rounded, _decimals(rounded, digits), abs(rounded))


def _is_ratio(measured: Measured) -> bool:
    return METRICS[measured.metric].comparison == "ratio"


def _display(metric: str) -> tuple[float, str]:
    """Factor and unit in which a metric, or metric@level, is shown: shares in percent."""
    facts = METRICS.get(metric.partition("@")[0])
    return (100.0, " %") if facts and facts.is_share else (1.0, "")


def _number(value: float, decimals: int, largest: float) -> str:
    """Format with `decimals`, or with an exponent where the largest number of the row is tiny or huge."""
    if not value:
        return "0"
    if _TINY <= largest < _HUGE:
        return f"{round(value, decimals):,.{max(0, decimals)}f}"
    mantissa, _, exponent = f"{value:.{max(0, decimals + math.floor(math.log10(largest)))}e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _decimals(value: float, digits: int) -> int:
    """Decimals that show `value` with this many significant digits; negative for large values."""
    return digits - 1 - math.floor(math.log10(abs(value))) if value else 0


def _time_unit(value: float) -> tuple[str, float]:
    if value >= 1:
        return "s", 1.0
    return ("ms", 1e3) if value >= 1e-3 else ("µs", 1e6)


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else significant(value, 3)


def _aligned(values: Sequence[float]) -> list[str]:
    """Numbers with equally many decimals: three digits of the largest, at least two of the smallest."""
    positive = [value for value in values if value > 0]
    if len(positive) < 2:
        return [_three_digits(value) for value in values]
    decimals = max(_decimals(max(positive), 3), _decimals(min(positive), 2))
    return [_number(value, decimals, 1.0) for value in values]
