"""The report's figures: each function turns numbers into one SVG string."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.artifact import GateOutcome
from ingot.validation.report.svg import (
    TOP,
    WIDTH,
    Scale,
    axes,
    circle,
    figure,
    legend,
    line,
    padded,
    path,
    rect,
    text,
    tick_label,
    x_axis,
    x_scale,
    y_axis,
    y_scale,
)

_BINS = 40
_KL_FLOOR = 1e-8
_CDF_POINTS = 200
_MOST_DOTS = 1500  # limit of a scatter plot: a long text must not give a page of many megabytes
_MOST_LABELS = 14  # below the bars of layers
_SIDES = ("baseline", "candidate")
_HATCH = 7  # pixels between slanted lines
_NARROW = 14  # pixels of a bar without space for dots
_DIGIT = 8  # pixels of a character, generously


def loss_difference(baseline: Sequence[float], differences: Sequence[float], mean: float) -> str:
    """One dot per window: its loss across, candidate minus baseline up, with the mean and zero."""
    x, y = x_scale(*padded(baseline)), y_scale(*padded([*differences, 0.0, mean]))
    parts = axes(x, y, "loss of the baseline, nats per token", "candidate - baseline")
    parts += [line(x.start, y(0), x.end, y(0), "equal")]
    parts += [circle(x(loss), y(change), 2.8, "dot candidate-fill") for loss, change in _thinned(baseline, differences)]
    parts += [line(x.start, y(mean), x.end, y(mean), "mark")]
    parts += [text(x.end, TOP - 12, f"above zero: worse. Mean {mean:+.3g}", "label", "end")]
    worse = sum(change > 0 for change in differences)
    return figure(
        parts,
        f"Difference in loss against the baseline's loss, one dot per window: {worse} of {len(differences)} windows "
        f"are worse than the baseline, mean {mean:+.3g} nats per token",
    )


def difference_histogram(differences: Sequence[float], mean: float, interval: tuple[float, float]) -> str:
    """Windows by candidate minus baseline, nats per token, with zero, the mean and its interval."""
    low, high = padded([*differences, 0.0, *interval], 0.02)
    counts, edges = np.histogram(differences, bins=min(_BINS, max(8, len(differences) // 4)), range=(low, high))
    x, y = x_scale(low, high), y_scale(0, float(counts.max()) * 1.12)
    parts = axes(x, y, "candidate - baseline, nats per token", "windows")
    parts += _bars(x, y, counts.tolist(), edges.tolist())
    parts += [rect(x(interval[0]), y.end, x(interval[1]) - x(interval[0]), y.start - y.end, "interval")]
    parts += [line(x(0), y.start, x(0), y.end, "equal"), line(x(mean), y.start, x(mean), y.end, "mark")]
    parts += [_mark_label(x, y, mean, f"mean {mean:+.3g}")]
    return figure(
        parts,
        f"Histogram of the difference in loss per window: mean {mean:+.3g} nats per token, "
        f"95 % interval {interval[0]:+.3g} to {interval[1]:+.3g}",
    )


def kl_histogram(token_kl: Sequence[float], marks: Mapping[str, float]) -> str:
    """Tokens by KL divergence on a logarithmic axis, with marks such as mean and p99."""
    values = np.maximum(np.asarray(token_kl, dtype=np.float64), _KL_FLOOR)
    low = 10.0 ** math.floor(math.log10(float(np.quantile(values, 0.001))))
    high = 10.0 ** (math.floor(math.log10(float(values.max()))) + 1)
    edges = np.logspace(math.log10(low), math.log10(high), _BINS + 1)
    counts, _ = np.histogram(np.clip(values, low, high), bins=edges)
    x, y = x_scale(low, high, log=True), y_scale(0, float(counts.max()) / len(values) * 100 * 1.2)
    parts = axes(x, y, "KL(baseline || candidate) per token, nats", "% of tokens")
    parts += _bars(x, y, (counts / len(values) * 100).tolist(), edges.tolist())
    for row, (name, value) in enumerate(sorted(marks.items(), key=lambda mark: -mark[1])):
        shown = min(max(value, low), high)
        top = y.end - 12 + 14 * row  # the leftmost mark is the lowest, so that no label crosses a line
        parts += [line(x(shown), y.start, x(shown), top, "mark"), _mark_label(x, y, shown, name, row - 12 / 14)]
    return figure(parts, f"Histogram of the KL divergence per token: {', '.join(marks)} nats")


def text_profile(starts: Sequence[int], kl: Sequence[float], mean: float) -> str:
    """Mean KL divergence of every window along the text, with the mean over all."""
    x, y = x_scale(*padded(starts, 0.02)), y_scale(0, max(*kl, mean, _KL_FLOOR) * 1.08)
    parts = axes(x, y, "position in the text, tokens", "KL per token, nats")
    shown = _thinned(starts, kl)
    parts += [line(x(start), y(0), x(start), y(value), "stem") for start, value in shown]
    parts += [circle(x(start), y(value), 2.4, "dot candidate-fill") for start, value in shown]
    parts += [line(x.start, y(mean), x.end, y(mean), "mark"), text(x.end, TOP - 12, f"mean {mean:.3g}", "label", "end")]
    worst = int(np.argmax(kl))
    return figure(
        parts,
        f"Mean KL divergence of every window along the text: largest {kl[worst]:.3g} nats at token {starts[worst]:,}, "
        f"mean {mean:.3g}",
    )


def cdf(values: Mapping[str, Sequence[float]], label: str) -> str:
    """Empirical distribution of milliseconds, one stepped line per side ("baseline", "candidate")."""
    everything = [value for side in values.values() for value in side]
    x, y = x_scale(*padded(everything, 0.03)), y_scale(0, 100)
    parts = axes(x, y, f"{label}, ms", "% of requests")
    parts += [path(_steps(x, y, values[side]), f"curve {side}-stroke") for side in _SIDES]
    parts += legend([(f"curve {side}-stroke", side) for side in _SIDES])
    medians = " and ".join(f"{side} {float(np.median(values[side])):.3g} ms" for side in _SIDES)
    return figure(parts, f"Cumulative distribution of {label}: median of the {medians}")


@dataclass(frozen=True)
class RatioRow:
    """One row of `round_dots`: the ratio of every round, the mean with its interval, and "better", "worse" or ""."""

    name: str
    rounds: Sequence[float]
    mean: float
    low: float
    high: float
    mark: str


def round_dots(rows: Sequence[RatioRow]) -> str:
    """Candidate over baseline per round, one row per metric, with the 95 % interval of each."""
    low, high = padded([1.0, *(x for row in rows for x in (*row.rounds, row.mean, row.low, row.high))])
    row_height, top = 52, 8
    bottom = top + row_height * len(rows)
    x = Scale(low, high, 104, WIDTH - 12)
    parts = [line(x(1), top, x(1), bottom, "equal"), line(x.start, bottom, x.end, bottom, "axis")]
    parts += [text(x(value), bottom + 17, tick_label(value)) for value in x.ticks]
    parts += [text((x.start + x.end) / 2, bottom + 36, "candidate / baseline, one dot per round", "label")]
    for index, row in enumerate(rows):
        parts += _ratio_row(row, x, top + row_height * (index + 0.5))
    said = "; ".join(f"{row.name} {row.mean:.3g}" + (f", {row.mark}" if row.mark else "") for row in rows)
    return figure(parts, f"Ratio of candidate to baseline in every round, with the mean: {said}", height=bottom + 44)


def _ratio_row(row: RatioRow, x: Scale, at: float) -> list[str]:
    parts = [text(94, at + (-2 if row.mark else 4), row.name, "label", "end")]
    parts += [text(94, at + 12, row.mark, f"{row.mark} value", "end")] if row.mark else []
    parts += [line(x.start, at, x.end, at, "grid")]
    parts += [rect(x(row.low), at - 7, x(row.high) - x(row.low), 14, f"interval {row.mark}".rstrip())]
    parts += [circle(x(ratio), at, 3, "dot candidate-fill") for ratio in row.rounds]
    return [*parts, line(x(row.mean), at - 10, x(row.mean), at + 10, "mark")]


def paired_bars(rows: Mapping[str, tuple[float, float]], show: Callable[[float], str]) -> str:
    """Two bars per row, baseline above candidate, with their values as text; hatched for the baseline."""
    most = max(value for pair in rows.values() for value in pair) or 1.0
    x = Scale(0, most * 1.3, 92, WIDTH - 12)
    parts = []
    for index, (name, pair) in enumerate(rows.items()):
        top = 30 + index * 46
        parts += [text(84, top + 19, name, "label", "end")]
        for row, (side, value) in enumerate(zip(_SIDES, pair, strict=True)):
            at = top + 15 * row
            parts += [rect(x(0), at, max(x(value) - x(0), 1), 13, f"{side}-fill", f"{side} {show(value)}")]
            parts += _hatch(x(0), x(value), at, at + 13) if side == "baseline" else []
            parts += [text(max(x(value), x(0) + 1) + 6, at + 10.5, show(value), "value", "start")]
    parts += _side_keys()
    said = "; ".join(f"{name} {show(pair[0])} and {show(pair[1])}" for name, pair in rows.items())
    return figure(parts, f"Baseline and candidate: {said}", height=30 + len(rows) * 46)


@dataclass(frozen=True)
class LayerBar:
    """One bar of `layer_bars`: the layer's value, and those of its weights by name."""

    label: str
    value: float
    weights: Mapping[str, float]


def layer_bars(layers: Sequence[LayerBar], label: str, unit: str) -> str:
    """One bar per layer in the model's order, and one dot per weight, or a line over their range."""
    most = max(value for layer in layers for value in (layer.value, *layer.weights.values()))
    y = y_scale(0, (most or 1.0) * 1.1)
    x = Scale(0, len(layers), x_scale(0, 1).start, WIDTH - 12)
    gap = 0.12 if len(layers) < 80 else 0.0
    parts = y_axis(x, y, label)
    for index, layer in enumerate(layers):
        left, width = x(index + gap), (x(1) - x(0)) * (1 - 2 * gap)
        shown = f"{layer.label}: {layer.value:.3g} {unit}"
        parts += [rect(left, y(layer.value), width, y.start - y(layer.value), "bar", shown)]
        parts += _weight_dots(layer, left, width, y, unit)
    parts += _layer_labels(layers, x, y)
    smallest, largest = (pick(layers, key=lambda layer: layer.value) for pick in (min, max))
    return figure(
        [*parts, *x_axis(x, y, "layer")],
        f"{label} of every layer: from {smallest.value:.3g} {unit} ({smallest.label}) to {largest.value:.3g} {unit} "
        f"({largest.label})",
    )


def gate_bar(outcome: GateOutcome) -> str:
    """The interval and the limit; the side that fails is shaded and hatched."""
    width, height = 220, 26
    low, high = padded([outcome.low, outcome.high, outcome.limit, outcome.measured], 0.18)
    x = Scale(low, high, 2, width - 2)
    at, verdict = height / 2, outcome.verdict.lower()
    start, end = (x(outcome.limit), float(width)) if outcome.bound == "max" else (0.0, x(outcome.limit))
    parts = [rect(start, 1, end - start, height - 2, "forbidden"), *_hatch(start, end, 1, height - 1)]
    parts += [line(0, at, width, at, "grid"), line(x(outcome.limit), 1, x(outcome.limit), height - 1, "limit")]
    parts += [rect(x(outcome.low), at - 4, max(x(outcome.high) - x(outcome.low), 1.5), 8, f"{verdict}-soft")]
    parts += [circle(x(outcome.measured), at, 4, f"{verdict}-fill")]
    side = "below" if outcome.bound == "max" else "above"
    return figure(parts, f"{outcome.verdict}: interval and limit; values {side} the limit pass", width, height)


def _layer_labels(layers: Sequence[LayerBar], x: Scale, y: Scale) -> list[str]:
    """Labels below the bars: round numbers where there are many layers, and no label over another."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if len(layers) <= step * _MOST_LABELS or step == 1000)
    parts, end = [], 0.0
    for index, layer in enumerate(layers):
        at, half = x(index + 0.5), _DIGIT * len(layer.label) / 2
        if at - half >= end and (not layer.label.isdecimal() or int(layer.label) % step == 0):
            parts.append(text(at, y.start + 17, layer.label))
            end = at + half + _DIGIT / 2
    return parts


def _weight_dots(layer: LayerBar, left: float, width: float, y: Scale, unit: str) -> list[str]:
    """Dots of a layer's weights from left to right, or their range in a narrow bar; nothing for a single weight."""
    if len(layer.weights) < 2:
        return []
    if width < _NARROW:
        values, middle = layer.weights.values(), left + width / 2
        return [line(middle, y(min(values)), middle, y(max(values)), "range")]
    step = width / len(layer.weights)
    return [
        circle(left + step * (index + 0.5), y(value), 2.4, "weight", f"{name}: {value:.3g} {unit}")
        for index, (name, value) in enumerate(layer.weights.items())
    ]


def _side_keys() -> list[str]:
    parts = []
    for index, side in enumerate(_SIDES):
        left = 92 + 110 * index
        parts += [rect(left, 5, 22, 11, f"{side}-fill"), text(left + 28, 15, side, "label", "start")]
        parts += _hatch(left, left + 22, 5, 16) if side == "baseline" else []
    return parts


def _hatch(start: float, end: float, top: float, bottom: float) -> list[str]:
    """Slanted lines within a box, so that its meaning does not depend on color."""
    slant = bottom - top
    moves = []
    for left in np.arange(start - slant + _HATCH / 2, end, _HATCH).tolist():
        first, last = max(left, start), min(left + slant, end)
        if last > first:
            moves.append(f"M{first:.1f} {bottom - (first - left):.1f}L{last:.1f} {bottom - (last - left):.1f}")
    return [f'<path class="hatch" d="{"".join(moves)}"/>'] if moves else []


def _bars(x: Scale, y: Scale, counts: Sequence[float], edges: Sequence[float]) -> list[str]:
    return [
        rect(x(left) + 0.5, y(count), x(right) - x(left) - 1, y.start - y(count), "bar", f"{count:.4g}")
        for count, left, right in zip(counts, edges, edges[1:], strict=False)
        if count
    ]


def _mark_label(x: Scale, y: Scale, value: float, words: str, row: float = 0) -> str:
    """A label next to a mark, on the side with more space."""
    on_left = x(value) > (x.start + x.end) / 2
    place = x(value) + (-6 if on_left else 6)
    return text(place, y.end + 10 + 14 * row, words, "value", "end" if on_left else "start")


def _thinned(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """All points, or evenly chosen ones and the largest where there are too many."""
    points = list(zip(xs, ys, strict=True))
    if len(points) <= _MOST_DOTS:
        return points
    kept = {int(index) for index in np.linspace(0, len(points) - 1, _MOST_DOTS)} | {int(np.argmax(ys))}
    return [points[index] for index in sorted(kept)]


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
