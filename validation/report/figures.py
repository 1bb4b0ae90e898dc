"""Chooses the report's figures from the evidence, each with a caption that explains how to read it."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul

from markupsafe import Markup

from ingot.sizes import format_bytes
from ingot.validation.accuracy import AccuracyResult
from ingot.validation.latency.measurement import LatencyResult
from ingot.validation.latency.metrics import request_values, round_ratios, select
from ingot.validation.memory import MemoryProbe
from ingot.validation.quantization import Quantization, WeightFigures
from ingot.validation.report import charts
from ingot.validation.report.charts import LayerBar, RatioRow
from ingot.validation.result import ArtifactSize, Evidence
from ingot.validation.statistics import mean_interval

_RATIO_ROWS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E", "throughput": "throughput"}
_TIMES = {"ttft": "Time to first token", "tpot": "Time per output token", "e2e": "End-to-end time"}
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class Figure:
    """A chart, and a caption that explains how to read it."""

    svg: Markup
    title: str
    caption: str


def accuracy_figures(evidence: Evidence) -> list[Figure]:
    """Difference in loss against loss and as a histogram, and KL per token and along the text."""
    if evidence.accuracy is None:
        return []
    items = evidence.accuracy.items
    base, cand = _nats(evidence.accuracy, "baseline_nll"), _nats(evidence.accuracy, "candidate_nll")
    differences = [c - b for b, c in zip(base, cand, strict=True)]
    mean = mean_interval(differences)
    values = {name: evidence.measured[name].estimate.value for name in ("kl_mean", "kl_p99")}
    marks = {f"{name.removeprefix('kl_')} {value:.3g}": value for name, value in values.items()}
    return [
        _figure(
            charts.loss_difference(base, differences, mean.value),
            "Difference in loss against loss",
            "Each dot is one window; above the dashed line the candidate is worse, far right the text is difficult.",
        ),
        _figure(
            charts.difference_histogram(differences, mean.value, (mean.low, mean.high)),
            "Difference in loss, distribution",
            "Paired by window, so that easy and difficult text cancel out; right of zero the candidate is worse. The "
            "band is the 95 % interval of the mean.",
        ),
        _figure(
            charts.kl_histogram(evidence.accuracy.token_kl.tolist(), marks),
            "KL divergence per token",
            "How far the next-token distribution moved, per token; the axis is logarithmic.",
        ),
        _figure(
            charts.text_profile([item.start for item in items], _nats(evidence.accuracy, "kl"), values["kl_mean"]),
            "KL divergence along the text",
            "Mean of every window; at the peaks the candidate predicts differently.",
        ),
    ]


def latency_figures(evidence: Evidence) -> list[Figure]:
    """Per concurrency: the ratios of every round, and the distributions of TTFT, TPOT and E2E."""
    if evidence.latency is None:
        return []
    levels = evidence.latency.options.concurrency
    return [figure for level in levels for figure in _level_figures(evidence, evidence.latency, level)]


def resource_figures(evidence: Evidence) -> list[Figure]:
    """Size on disk by kind, and peak memory."""
    found = [
        _figure(
            charts.paired_bars(_disk(evidence.sizes.baseline, evidence.sizes.candidate), format_bytes),
            "Size on disk",
            "All files except the evidence; the metric compares only weights and graph.",
        )
    ]
    if evidence.memory is None:
        return found
    memory = charts.paired_bars(_memory(evidence.memory.baseline[-1], evidence.memory.candidate[-1]), format_bytes)
    caption = "Resident memory after generating in a fresh process; released: the rest of the peak."
    return [*found, _figure(memory, "Peak memory", caption)]


def quantization_figures(found: Quantization) -> list[Figure]:
    """Stored bits of every layer, and what rounding it costs, where that was measured."""
    figures = []
    bits = _layer_bars(found.weights, "effective_bits")
    if bits:
        caption = (
            "Stored bits per element, scales and zero points included: the bar a layer, the dots or the line its "
            "weights. Weights that stay float are not shown."
        )
        figures += [_figure(charts.layer_bars(bits, "bits per element", "bits"), "Bits per layer", caption)]
    kl = _layer_bars(found.weights, "kl", is_sum=True)
    if kl:
        caption = (
            "KL of each weight quantized alone: the bar the sum over a layer, the dots or the line its weights. More "
            "bits pay off at the highest."
        )
        figures += [_figure(charts.layer_bars(kl, "KL alone, nats", "nats"), "Cost per layer", caption)]
    return figures


def _level_figures(evidence: Evidence, result: LatencyResult, level: int) -> list[Figure]:
    runs = {side: select(result, level, side) for side in ("baseline", "candidate")}
    caption = "Each dot is one interleaved pair of runs; the bar is the 95 % interval of the mean."
    ratios = charts.round_dots([_ratio_row(evidence, result, level, name) for name in _RATIO_ROWS])
    figures = [_figure(ratios, f"Ratio per round, {level} in flight", caption)]
    for name, label in _TIMES.items():
        values = {side: [x * 1e3 for x in request_values(runs[side], name)] for side in runs}
        caption = f"All requests, {level} in flight; a curve further left is faster."
        figures += [_figure(charts.cdf(values, label.lower()), f"{label}, {level} in flight", caption)]
    return figures


def _ratio_row(evidence: Evidence, result: LatencyResult, level: int, name: str) -> RatioRow:
    measured = evidence.measured[f"{name}_ratio@{level}"]
    estimate = measured.estimate
    return RatioRow(
        name=_RATIO_ROWS[name],
        rounds=round_ratios(result, level, name),
        mean=estimate.value,
        low=estimate.low,
        high=estimate.high,
        mark=measured.change or "",
    )


def _disk(baseline: ArtifactSize, candidate: ArtifactSize) -> dict[str, tuple[float, float]]:
    kinds = ("weights", "graph", "tokenizer", "other", "total")
    return {kind: (getattr(baseline, kind), getattr(candidate, kind)) for kind in kinds}


def _memory(baseline: MemoryProbe, candidate: MemoryProbe) -> dict[str, tuple[float, float]]:
    sides = [_memory_of(probe) for probe in (baseline, candidate)]
    rows = {kind: (sides[0][kind], sides[1][kind]) for kind in sides[0]}
    return {kind: pair for kind, pair in rows.items() if any(pair) or kind != "on the GPU"}


def _memory_of(probe: MemoryProbe) -> dict[str, float]:
    """Bytes by kind. The peak is the sum of the others."""
    found = probe.generated
    return {
        "private": found.private_bytes,
        "file-mapped": found.mapped_bytes,
        "released": max(0, found.peak_bytes - found.resident_bytes),
        "on the GPU": found.device_bytes,
        "peak": found.peak_bytes + found.device_bytes,
    }


def _layer_bars(weights: Iterable[WeightFigures], field: str, is_sum: bool = False) -> list[LayerBar]:
    """One bar per layer in the program's order: the sum over its weights, or their mean by elements."""
    layers: dict[str, list[WeightFigures]] = {}
    for weight in weights:
        if getattr(weight, field) is not None:
            layers.setdefault(_layer_of(weight.name), []).append(weight)
    return [_layer_bar(label, group, field, is_sum) for label, group in layers.items()]


def _layer_bar(label: str, group: Sequence[WeightFigures], field: str, is_sum: bool) -> LayerBar:
    values = [getattr(weight, field) for weight in group]
    elements = [weight.elements for weight in group]
    total = sum(values) if is_sum else sum(map(mul, values, elements)) / sum(elements)
    return LayerBar(label, total, {weight.name: value for weight, value in zip(group, values, strict=True)})


def _layer_of(name: str) -> str:
    """The number of a decoder layer, or the first word of another weight: "embed", "lm"."""
    found = _LAYER.search(name)
    return found[1] if found else name.rsplit(".", 1)[-1].split("_")[0]


def _nats(result: AccuracyResult, column: str) -> list[float]:
    return [getattr(item, column) / item.tokens for item in result.items]


def _figure(svg: str, title: str, caption: str) -> Figure:
    return Figure(Markup(svg), title, caption)
