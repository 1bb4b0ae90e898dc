"""The table of an engine's metrics, and all of them as Prometheus text.

Names are those of a server's /metrics: one that vLLM has too has the prefix "vllm:", so that dashboards made for vLLM
show an Ingot engine, and any other has "ingot_".
"""

import math
from collections.abc import Iterator, Mapping

from ingot.runtime.metric_rows import Metric, rows_of
from ingot.runtime.steps.metrics import EngineMetrics, HistogramSnapshot

Value = float | Mapping[str, float] | HistogramSnapshot
"""A mapping has values by the value of the metric's label."""
METRICS = tuple(rows_of(EngineMetrics))


def prometheus_text(metrics: EngineMetrics, *, labels: Mapping[str, str] | None = None) -> str:
    """Metrics in Prometheus's text format, version 0.0.4; every sample gets the `labels`, such as model_name.

    Source: https://prometheus.io/docs/instrumenting/exposition_formats/
    """
    lines: list[str] = []
    for metric in METRICS:
        value = metric.read(metrics)
        if value is None:
            continue
        name = metric.exported_name
        lines += [f"# HELP {name} {_escaped(metric.help)}", f"# TYPE {name} {metric.kind}"]
        lines += _samples(metric, name, value, dict(labels or {}))
    return "\n".join(lines) + "\n"


def _samples(metric: Metric, name: str, value: Value, labels: dict[str, str]) -> Iterator[str]:
    if isinstance(value, HistogramSnapshot):
        yield from _histogram(name, value, labels)
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield _sample(name, labels | {metric.label: key}, value[key])
    else:
        yield _sample(name, labels, value)


def _histogram(name: str, histogram: HistogramSnapshot, labels: dict[str, str]) -> Iterator[str]:
    num_below = 0
    for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
        num_below += count
        yield _sample(f"{name}_bucket", labels | {"le": _number(bound)}, num_below)
    yield _sample(f"{name}_sum", labels, histogram.total)
    yield _sample(f"{name}_count", labels, num_below)


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    pairs = ",".join(f'{key}="{_escaped(text, quote=True)}"' for key, text in labels.items())
    return f"{name}{{{pairs}}} {_number(value)}" if pairs else f"{name} {_number(value)}"


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else repr(+value)  # +True is 1


def _escaped(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quote else text
