"""Renders the report: one self-contained HTML file, and a Markdown summary for a CI page.

This file prepares the numbers; text and layout are in report.*.jinja, figures in charts.py.
"""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup

from ingot.artifact import GateOutcome
from ingot.artifact.metrics import METRICS
from ingot.validation.accuracy import AccuracyResult
from ingot.validation.latency import LatencyResult, request_values, round_ratios, select, summarize
from ingot.validation.quantization import Quantization
from ingot.validation.report import charts
from ingot.validation.report import formatting as fmt
from ingot.validation.report.quantization_text import shown_columns, summary_sentences, weight_cells
from ingot.validation.result import Evidence
from ingot.validation.statistics import Measured

_RATIO_ROWS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E", "throughput": "throughput"}


@dataclass(frozen=True)
class Figure:
    """A chart, and a caption that explains how to read it."""

    svg: Markup
    title: str
    caption: str


def render_html(evidence: Evidence) -> str:
    """The report as one HTML page. The same evidence gives the same bytes."""
    return _template("report.html.jinja").render(_context(evidence))


def render_markdown(evidence: Evidence) -> str:
    """Gates, metrics and quantized weights as Markdown tables."""
    return _template("report.md.jinja").render(_context(evidence))


def accuracy_figures(evidence: Evidence) -> list[Figure]:
    """Loss per window of both, its difference, and KL per token and along the text."""
    if evidence.accuracy is None:
        return []
    items = evidence.accuracy.items
    base, cand = _nats(evidence.accuracy, "baseline_nll"), _nats(evidence.accuracy, "candidate_nll")
    differences = [c - b for b, c in zip(base, cand, strict=True)]
    values = {name: evidence.measured[name].estimate.value for name in ("kl_mean", "kl_p99")}
    marks = {f"{name.removeprefix('kl_')} {value:.3g}": value for name, value in values.items()}
    return [
        _figure(
            charts.nll_scatter(base, cand),
            "Loss per window",
            "Each dot is one window; above the line the candidate is worse.",
        ),
        _figure(
            charts.difference_histogram(differences, sum(differences) / len(differences)),
            "Difference of loss per window",
            "Paired by window, so that easy and hard text cancel out; right of zero the candidate is worse.",
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
    """Per concurrency: distributions of TTFT, TPOT and E2E, and the ratios of every round."""
    if evidence.latency is None:
        return []
    levels = evidence.latency.options.concurrency
    return [figure for level in levels for figure in _level_figures(evidence, evidence.latency, level)]


def resource_figures(evidence: Evidence) -> list[Figure]:
    """Size on disk by kind, and peak memory."""
    sizes = {"baseline": evidence.sizes.baseline, "candidate": evidence.sizes.candidate}
    kinds = ("weights", "graph", "tokenizer", "other")
    disk = {side: {kind: getattr(size, kind) / 1e6 for kind in kinds} for side, size in sizes.items()}
    found = [
        _figure(
            charts.stacked_bars(disk, "MB"),
            "Size on disk",
            "All files except the evidence; the metric compares only weights and graph.",
        )
    ]
    if evidence.memory is None:
        return found
    probes = {"baseline": evidence.memory.baseline[-1], "candidate": evidence.memory.candidate[-1]}
    memory = {
        side: {
            "private": probe.generated.private_bytes / 1e6,
            "file-mapped": probe.generated.mapped_bytes / 1e6,
            "released": max(0, probe.generated.peak_bytes - probe.generated.resident_bytes) / 1e6,
            **({"on the GPU": probe.generated.device_bytes / 1e6} if probe.generated.device_bytes else {}),
        }
        for side, probe in probes.items()
    }
    caption = "Resident memory after generating in a fresh process; released: the rest of the peak."
    return [*found, _figure(charts.stacked_bars(memory, "MB"), "Peak memory", caption)]


def _level_figures(evidence: Evidence, result: LatencyResult, level: int) -> list[Figure]:
    runs = {side: select(result, level, side) for side in ("baseline", "candidate")}
    figures = []
    for name, label in (("ttft", "Time to first token"), ("tpot", "Time per output token"), ("e2e", "End-to-end time")):
        values = {side: [x * 1e3 for x in request_values(runs[side], name)] for side in runs}
        caption = f"All requests, {level} in flight; a curve further left is faster."
        figures += [_figure(charts.cdf(values, label.lower()), f"{label}, {level} in flight", caption)]
    ratios = {label: round_ratios(result, level, name) for name, label in _RATIO_ROWS.items()}
    means = {}
    for name, label in _RATIO_ROWS.items():
        estimate = evidence.measured[f"{name}_ratio@{level}"].estimate
        means[label] = (estimate.value, estimate.low, estimate.high)
    caption = "Each dot is one interleaved pair of runs; the bar is the 95 % interval of the mean."
    return [*figures, _figure(charts.round_dots(ratios, means), f"Ratio per round, {level} in flight", caption)]


def _context(evidence: Evidence) -> dict[str, Any]:
    return {
        "evidence": evidence,
        "verdict": evidence.verdict,
        "gates": [_gate_row(gate) for gate in evidence.gates],
        "metrics": [_metric_row(measured) for measured in evidence.measured.values()],
        "definitions": [METRICS[name] for name in dict.fromkeys(m.metric for m in evidence.measured.values())],
        "accuracy_figures": accuracy_figures(evidence),
        "latency_figures": latency_figures(evidence),
        "resource_figures": resource_figures(evidence),
        "levels": summarize(evidence.latency) if evidence.latency else [],
        **_quantization(evidence.notes.quantization),
        "fmt": fmt,
    }


def _quantization(found: Quantization) -> dict[str, Any]:
    columns = shown_columns(found)
    return {
        "columns": columns,
        "quantized": [weight_cells(weight, columns) for weight in found.worst_first],
        "quantization_summary": summary_sentences(found),
    }


def _gate_row(gate: GateOutcome) -> dict[str, Any]:
    def show(value: float) -> str:
        return fmt.metric_value(gate.name, value)

    return {
        "title": fmt.key_title(gate.name),
        "verdict": gate.verdict,
        "measured": show(gate.measured),
        "interval": "exact" if gate.low == gate.high else f"{show(gate.low)} to {show(gate.high)}",
        "limit": f"{'≤' if gate.bound == 'max' else '≥'} {show(gate.limit)}",
        "bar": Markup(charts.gate_bar(gate)),
    }


def _metric_row(measured: Measured) -> dict[str, Any]:
    return {
        "title": fmt.title(measured.metric, measured.level),
        "baseline": fmt.quantity(measured.baseline, measured.unit),
        "candidate": fmt.quantity(measured.candidate, measured.unit),
        "value": fmt.metric_value(measured.metric, measured.estimate.value),
        "interval": fmt.interval(measured),
        "detectable": fmt.detectable(measured),
        "method": measured.estimate.method,
        "num_items": measured.estimate.items,
    }


def _nats(result: AccuracyResult, column: str) -> list[float]:
    return [getattr(item, column) / item.tokens for item in result.items]


def _figure(svg: str, title: str, caption: str) -> Figure:
    return Figure(Markup(svg), title, caption)


def _source(name: str) -> str:
    return (files("ingot.validation.report") / name).read_text("utf-8")


@cache
def _template(name: str) -> Template:
    environment = Environment(
        loader=FunctionLoader(_source),
        autoescape=name.endswith(".html.jinja"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)
