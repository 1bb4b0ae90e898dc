"""The report's figures: each function turns numbers into one SVG string. Colors come from report.css.jinja by class."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from ingot.artifact import GateOutcome

WIDTH, HEIGHT = 460, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 14, 44
_BINS = 40
_KL_FLOOR = 1e-8
_CDF_POINTS = 200
_SIDES = ("baseline", "candidate")


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to pixels [start, end], linearly or logarithmically."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __post_init__(self) -> None:
        assert self.high > self.low, (self.low, self.high)

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(x) if self.log else x for x in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """About six round values, or the powers of ten of a logarithmic scale."""
        if self.log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            return [10.0**power for power in powers]
        return linear_ticks(self.low, self.high)


def linear_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten within [low, high]."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def padded(values: Iterable[float], share: float = 0.06) -> tuple[float, float]:
    """Range of the values with a margin on both sides; never empty."""
    given = list(values)
    low, high = min(given), max(given)
    margin = (high - low) * share or abs(low) * 0.01 or 1.0
    return low - margin, high + margin


def x_scale(low: float, high: float, log: bool = False) -> Scale:
    """The horizontal scale of a figure."""
    return Scale(low, high, _LEFT, WIDTH - _RIGHT, log)


def y_scale(low: float, high: float) -> Scale:
    """The vertical scale of a figure."""
    return Scale(low, high, HEIGHT - _BOTTOM, _TOP)


def num(value: float) -> str:
    """Format a coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def tick_label(value: float) -> str:
    """Short label of a tick: 0.25, 1e-4, 12k."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    if abs(value) < 0.001:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line with the class `kind`."""
    return f'<line class="{kind}" x1="{num(x1)}" y1="{num(y1)}" x2="{num(x2)}" y2="{num(y2)}"/>'


def rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    """A rectangle with the class `kind`; `title` is shown on hover."""
    box = f'class="{kind}" x="{num(x)}" y="{num(y)}" width="{num(max(width, 0))}" height="{num(max(height, 0))}"'
    return f"<rect {box}><title>{escape(title)}</title></rect>" if title else f"<rect {box}/>"


def circle(x: float, y: float, radius: float, kind: str) -> str:
    """A dot with the class `kind`."""
    return f'<circle class="{kind}" cx="{num(x)}" cy="{num(y)}" r="{num(radius)}"/>'


def text(x: float, y: float, words: str, kind: str = "tick", anchor: str = "middle") -> str:
    """Text at a position."""
    return f'<text class="{kind}" x="{num(x)}" y="{num(y)}" text-anchor="{anchor}">{escape(words)}</text>'


def path(points: Sequence[tuple[float, float]], kind: str) -> str:
    """An open polyline through the points."""
    moves = " ".join(f"{'L' if index else 'M'}{num(x)} {num(y)}" for index, (x, y) in enumerate(points))
    return f'<path class="{kind}" d="{moves}"/>'


def frame(x: Scale, y: Scale, x_label: str, y_label: str, tick: Callable[[float], str] = tick_label) -> list[str]:
    """Grid, ticks and axis labels; `tick` formats the horizontal labels."""
    parts = []
    for value in y.ticks:
        parts += [line(x.start, y(value), x.end, y(value), "grid")]
        parts += [text(x.start - 7, y(value) + 3.5, tick_label(value), anchor="end")]
    for value in x.ticks:
        parts += [line(x(value), y.start, x(value), y.start + 4, "axis")]
        parts += [text(x(value), y.start + 16, tick(value))]
    middle = (y.start + y.end) / 2
    parts += [line(x.start, y.start, x.end, y.start, "axis")]
    parts += [text((x.start + x.end) / 2, HEIGHT - 8, x_label, "label")]
    turned = f'<g transform="translate(13 {num(middle)}) rotate(-90)">{text(0, 0, y_label, "label")}</g>'
    return [*parts, turned]


def figure(parts: Iterable[str], description: str, width: int = WIDTH, height: int = HEIGHT) -> str:
    """The <svg> element, with a description for screen readers."""
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(description, quote=True)}">'
    return head + "".join(parts) + "</svg>"


def nll_scatter(baseline: Sequence[float], candidate: Sequence[float]) -> str:
    """One dot per window: nats per token of both, with the line of equality."""
    low, high = padded([*baseline, *candidate])
    x, y = x_scale(low, high), y_scale(low, high)
    parts = frame(x, y, "baseline, nats per token", "candidate, nats per token")
    parts += [line(x(low), y(low), x(high), y(high), "equal")]
    parts += [circle(x(b), y(c), 3, "dot candidate-fill") for b, c in zip(baseline, candidate, strict=True)]
    return figure(parts, "Negative log-likelihood per window, baseline across, candidate up")


def difference_histogram(differences: Sequence[float], mean: float) -> str:
    """Windows by candidate minus baseline, nats per token, with the mean and zero."""
    low, high = padded([*differences, 0.0], 0.02)
    counts, edges = np.histogram(differences, bins=min(_BINS, max(8, len(differences) // 4)), range=(low, high))
    x, y = x_scale(low, high), y_scale(0, float(counts.max()) * 1.08)
    parts = frame(x, y, "candidate - baseline, nats per token", "windows")
    parts += _bars(x, y, counts.tolist(), edges.tolist())
    parts += [line(x(0), y.start, x(0), y.end, "equal"), line(x(mean), y.start, x(mean), y.end, "mark")]
    parts += [_mark_label(x, y, mean, f"mean {mean:+.4f}")]
    return figure(parts, "Histogram of the difference in negative log-likelihood per window")


def kl_histogram(token_kl: Sequence[float], marks: Mapping[str, float]) -> str:
    """Tokens by KL divergence on a logarithmic axis, with marks such as mean and p99."""
    values = np.maximum(np.asarray(token_kl, dtype=np.float64), _KL_FLOOR)
    low = 10.0 ** math.floor(math.log10(float(np.quantile(values, 0.001))))
    high = 10.0 ** (math.floor(math.log10(float(values.max()))) + 1)
    edges = np.logspace(math.log10(low), math.log10(high), _BINS + 1)
    counts, _ = np.histogram(np.clip(values, low, high), bins=edges)
    x, y = x_scale(low, high, log=True), y_scale(0, float(counts.max()) / len(values) * 100 * 1.16)
    parts = frame(x, y, "KL(baseline || candidate) per token, nats", "% of tokens")
    parts += _bars(x, y, (counts / len(values) * 100).tolist(), edges.tolist())
    for row, (name, value) in enumerate(sorted(marks.items(), key=lambda mark: -mark[1])):
        shown = min(max(value, low), high)
        top = y.end + 14 * row  # the leftmost mark is the lowest, so that no label crosses a line
        parts += [line(x(shown), y.start, x(shown), top, "mark"), _mark_label(x, y, shown, name, row)]
    return figure(parts, "Histogram of the KL divergence per token")


def text_profile(starts: Sequence[int], kl: Sequence[float], mean: float) -> str:
    """Mean KL divergence of every window along the text, with the mean over all."""
    x, y = x_scale(*padded(starts, 0.02)), y_scale(0, max(*kl, mean, _KL_FLOOR) * 1.08)
    parts = frame(x, y, "position in the text, tokens", "KL per token, nats")
    parts += [line(x(start), y(0), x(start), y(value), "stem") for start, value in zip(starts, kl, strict=True)]
    parts += [circle(x(start), y(value), 2.4, "dot candidate-fill") for start, value in zip(starts, kl, strict=True)]
    return figure([*parts, line(x.start, y(mean), x.end, y(mean), "equal")], "Mean KL divergence of every window")


def cdf(values: Mapping[str, Sequence[float]], label: str) -> str:
    """Empirical distribution of milliseconds, one stepped line per side ("baseline", "candidate")."""
    everything = [value for side in values.values() for value in side]
    x, y = x_scale(*padded(everything, 0.03)), y_scale(0, 100)
    parts = frame(x, y, f"{label}, ms", "% of requests")
    parts += [path(_steps(x, y, values[side]), f"curve {side}-stroke") for side in _SIDES]
    return figure(parts, f"Cumulative distribution of {label} for baseline and candidate")


def round_dots(ratios: Mapping[str, Sequence[float]], means: Mapping[str, tuple[float, float, float]]) -> str:
    """Candidate over baseline per round, one row per metric, with the 95 % interval of each."""
    shown = [r for row in ratios.values() for r in row] + [end for mean in means.values() for end in mean] + [1.0]
    low, high = padded(shown)
    row_height, top = 52, 10
    height = top + row_height * len(ratios) + 40
    x = Scale(low, high, 132, WIDTH - 14)
    bottom = top + row_height * len(ratios)
    parts = [line(x(1), top, x(1), bottom, "equal"), line(x.start, bottom, x.end, bottom, "axis")]
    parts += [text(x(value), bottom + 16, tick_label(value)) for value in x.ticks]
    parts += [text((x.start + x.end) / 2, height - 6, "candidate / baseline, one dot per round", "label")]
    for row, name in enumerate(ratios):
        at = top + row_height * (row + 0.5)
        value, start, end = means[name]
        parts += [text(122, at + 3.5, name, "label", "end"), line(x.start, at, x.end, at, "grid")]
        parts += [rect(x(start), at - 6, x(end) - x(start), 12, "interval")]
        parts += [circle(x(ratio), at, 3, "dot candidate-fill") for ratio in ratios[name]]
        parts += [line(x(value), at - 9, x(value), at + 9, "mark")]
    return figure(parts, "Ratio of candidate to baseline in every round", height=height)


def stacked_bars(rows: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """One stacked bar per side, with a legend below."""
    kinds = list(dict.fromkeys(kind for parts in rows.values() for kind in parts))
    most = max(sum(parts.values()) for parts in rows.values()) or 1.0
    x = Scale(0, most * 1.22, 84, WIDTH - 14)
    elements = []
    for row, (name, values) in enumerate(rows.items()):
        top, start = 14 + row * 42, 0.0
        elements += [text(74, top + 18, name, "label", "end")]
        for kind, value in values.items():
            elements += [rect(x(start), top, x(start + value) - x(start), 28, f"part-{kinds.index(kind)}", f"{kind}")]
            start += value
        elements += [text(x(start) + 8, top + 18, f"{start:,.4g} {unit}", "value", "start")]
    bottom = 14 + len(rows) * 42 + 10
    for index, kind in enumerate(kinds):
        left = 84 + index * 92
        elements += [rect(left, bottom, 10, 10, f"part-{index}"), text(left + 15, bottom + 9, kind, "tick", "start")]
    return figure(elements, f"Bars of {', '.join(kinds)} for {' and '.join(rows)}", height=bottom + 18)


def gate_bar(outcome: GateOutcome) -> str:
    """The interval and the limit; the side that fails is shaded."""
    width, height = 220, 26
    low, high = padded([outcome.low, outcome.high, outcome.limit, outcome.measured], 0.18)
    x = Scale(low, high, 2, width - 2)
    at, verdict = height / 2, outcome.verdict.lower()
    start, end = (x(outcome.limit), width) if outcome.bound == "max" else (0.0, x(outcome.limit))
    parts = [rect(start, 1, end - start, height - 2, "forbidden"), line(0, at, width, at, "grid")]
    parts += [line(x(outcome.limit), 1, x(outcome.limit), height - 1, "limit")]
    parts += [rect(x(outcome.low), at - 4, max(x(outcome.high) - x(outcome.low), 1.5), 8, f"{verdict}-soft")]
    parts += [circle(x(outcome.measured), at, 4, f"{verdict}-fill")]
    side = "below" if outcome.bound == "max" else "above"
    return figure(parts, f"{outcome.name}: interval and limit; values {side} it pass", width, height)


def _bars(x: Scale, y: Scale, counts: Sequence[float], edges: Sequence[float]) -> list[str]:
    return [
        rect(x(left) + 0.5, y(count), x(right) - x(left) - 1, y.start - y(count), "bar", f"{count:.4g}")
        for count, left, right in zip(counts, edges, edges[1:], strict=False)
        if count
    ]


def _mark_label(x: Scale, y: Scale, value: float, words: str, row: int = 0) -> str:
    """A label next to a mark, on the side with more space."""
    on_left = x(value) > (x.start + x.end) / 2
    place = x(value) + (-6 if on_left else 6)
    return text(place, y.end + 10 + 14 * row, words, "value", "end" if on_left else "start")


def _steps(x: Scale, y: Scale, values: Sequence[float]) -> list[tuple[float, float]]:
    """Corners of the step function; a long sample is reduced to quantiles."""
    ranked = np.sort(np.asarray(values, dtype=np.float64))
    if len(ranked) > _CDF_POINTS:
        ranked = np.quantile(ranked, np.linspace(0, 1, _CDF_POINTS))
    corners, share = [(x(float(ranked[0])), y(0))], 0.0
    for index, value in enumerate(ranked):
        corners += [(x(float(value)), y(share))]
        share = 100 * (index + 1) / len(ranked)
        corners += [(x(float(value)), y(share))]
    return [*corners, (x.end, y(100))]
