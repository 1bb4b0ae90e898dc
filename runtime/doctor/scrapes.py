"""Metrics as text, of `/metrics` or of `ingot.prometheus_text`: one scrape, and what was counted between two."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from ingot.errors import UsageError, shown
from ingot.runtime.engine.metrics_export import METRICS

_PREFIX = re.compile(r"^(vllm:|ingot:|ingot_)")
_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ([^ ]+)(?: -?\d+)?$")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_Labels = tuple[tuple[str, str], ...]
_OF_EVERY_ENGINE = "num_requests_running"
_SUFFIXES = {"counter": ("",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ()}
_COUNTED_BY_ENGINES = {
    f"{metric.name}{suffix}".removesuffix("_total") for metric in METRICS for suffix in _SUFFIXES[metric.kind]
}


@dataclass(frozen=True)
class Distribution:
    """Observations of a histogram by bucket: (upper bound, number of observations at most that)."""

    below: tuple[tuple[float, float], ...]
    total: float

    @property
    def count(self) -> float:
        """Number of observations."""
        return self.below[-1][1] if self.below else 0.0

    @property
    def mean(self) -> float:
        """Mean of the observed values; 0 without any."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Upper bound of the bucket that has this quantile; the last finite one for values above it; 0 without any."""
        finite = [bound for bound, _ in self.below if bound < math.inf]
        for bound, number in self.below:
            if self.count and number >= share * self.count:
                return bound if bound < math.inf else finite[-1]
        return 0.0

    def seconds_above(self, value: float) -> float:
        """Least sum of the observations that `above` counts: each as the lower bound of its bucket."""
        total, previous, number_before = 0.0, 0.0, 0.0
        for bound, number in self.below:
            if previous >= value:
                total += previous * (number - number_before)
            previous, number_before = bound, number
        return total

    @property
    def p99_ratio(self) -> float:
        """P99 to P50; 0 without any."""
        median = self.quantile(0.5)
        return self.quantile(0.99) / median if median else 0.0

    def above(self, value: float) -> float:
        """Observations in buckets whose values are all above a value."""
        return self.count - next((number for bound, number in self.below if bound >= value), self.count)


@dataclass(frozen=True)
class Scrape:
    """Samples by name, without the prefixes vllm: and ingot_ and without the suffix _total, and by their labels."""

    samples: Mapping[str, Mapping[_Labels, float]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, source: str) -> Self:
        """Read Prometheus's text format. UsageError for a text without metrics of an engine, or with a damaged line.

        Values that are not finite are left out. A text that is not metrics is not quoted: it may be any file.
        Source: https://prometheus.io/docs/instrumenting/exposition_formats/
        """
        samples: dict[str, dict[_Labels, float]] = {}
        has_engine, damage = False, ""
        for line in text.splitlines():
            found = None if line.startswith("#") else _LINE.match(line.strip())
            if not found:
                continue
            full_name, labels, value = found.groups()
            name = _PREFIX.sub("", full_name).removesuffix("_total")
            key = tuple(sorted(_LABEL.findall(labels or "")))
            has_engine = has_engine or name == _OF_EVERY_ENGINE
            damage = damage or _damage(full_name, key, value)
            if not damage and math.isfinite(number := float(value)):
                samples.setdefault(name, {})[key] = number
        if not has_engine:
            raise UsageError(_refusal(source, is_starting="ready" in samples))
        if damage:
            raise UsageError(f"{source} is damaged: {damage}; save the text of /metrics again")
        return cls(samples)


def _damage(name: str, labels: _Labels, value: str) -> str:
    if not _is_number(value):
        return f"{name} has the value {shown(value)}, which is not a number"
    bound = dict(labels).get("le", "")
    if name.endswith("_bucket") and (not _is_number(bound) or math.isnan(float(bound))):
        return f"{name} has a bucket up to le={shown(bound)}, which is not a number"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _refusal(source: str, is_starting: bool) -> str:
    if is_starting:
        return f"the server at {source} has no model yet; try again once its /ready answers 200"
    return (
        f"no metrics of Ingot at {source}: {_OF_EVERY_ENGINE} is missing; name a server that `ingot serve` started, or"
        " a file with the text of its /metrics or of ingot.prometheus_text"
    )


@dataclass(frozen=True)
class ScrapeWindow:
    """Two scrapes of one server, the first of which may be empty: then counters are totals since the start.

    `seconds` is the time between them; None when it is not known. Values are of one model, or of the server.
    What started anew in between is counted from its new start.
    """

    before: Scrape
    after: Scrape
    seconds: float | None = None
    model: str | None = None

    @property
    def models(self) -> list[str]:
        """Names of the models that are served; one without a name has none."""
        found = {dict(labels).get("model_name") for labels in self.after.samples.get("num_requests_running", {})}
        return sorted(name for name in found if name)

    def of(self, model: str) -> "ScrapeWindow":
        """The metrics of one model, and those of the server."""
        return ScrapeWindow(self.before, self.after, self.seconds, model)

    @cached_property
    def has_restarted(self) -> bool:
        """Whether the server or the engine started anew in between: then what it counted is that of its later life."""
        return self._server_restarted or self._engine_restarted

    def now(self, name: str) -> float | None:
        """A gauge at the end, summed over its labels; None where it does not exist."""
        return self._value(self.after, name)

    def counted(self, name: str) -> float:
        """Growth of a counter, or since it began anew; 0 where it does not exist."""
        later, earlier = self._value(self.after, name) or 0.0, self.counted_before(name)
        return later - earlier if later >= earlier else later

    def counted_by(self, name: str, *label_names: str) -> dict[tuple[str, ...], float]:
        """Growth of a counter by the values of labels, or since it began anew."""
        earlier, found = self._earlier(name).samples.get(name, {}), dict[tuple[str, ...], float]()
        for labels, value in self.after.samples.get(name, {}).items():
            if self._matches(labels):
                values, before = tuple(dict(labels).get(each, "") for each in label_names), earlier.get(labels, 0.0)
                found[values] = found.get(values, 0.0) + (value - before if value >= before else value)
        return found

    @property
    def history(self) -> "ScrapeWindow":
        """The window from the start to the first scrape."""
        return ScrapeWindow(Scrape(), self.before, None, self.model)

    def counted_before(self, name: str) -> float:
        """Value of a counter at the first scrape; 0 where it began anew since, or does not exist."""
        return self._value(self._earlier(name), name) or 0.0

    def distribution(self, name: str) -> Distribution:
        """What a histogram observed."""
        bounds: dict[float, float] = {}
        buckets = f"{name}_bucket"
        for scrape, sign in ((self.after, 1), (self._earlier(buckets), -1)):
            for labels, value in scrape.samples.get(buckets, {}).items():
                if self._matches(labels):
                    bound = float(dict(labels)["le"])
                    bounds[bound] = bounds.get(bound, 0.0) + sign * value
        return Distribution(tuple(sorted(bounds.items())), self.counted(f"{name}_sum"))

    @cached_property
    def _server_restarted(self) -> bool:
        starts = [self._value(each, "process_start_time_seconds") for each in (self.before, self.after)]
        return None not in starts and starts[0] != starts[1]

    @cached_property
    def _engine_restarted(self) -> bool:
        """Whether a counter of an engine fell: its process died and was replaced, or the model was swapped."""
        return any(
            self.after.samples.get(name, {}).get(labels, 0.0) < value
            for name in _COUNTED_BY_ENGINES & self.before.samples.keys()
            for labels, value in self.before.samples[name].items()
            if self._matches(labels)
        )

    def _earlier(self, name: str) -> Scrape:
        """The scrape from which this counter is counted; an empty one where it began anew after the first."""
        is_anew = self._server_restarted or (name in _COUNTED_BY_ENGINES and self._engine_restarted)
        return Scrape() if is_anew else self.before

    def _value(self, scrape: Scrape, name: str) -> float | None:
        values = [value for labels, value in scrape.samples.get(name, {}).items() if self._matches(labels)]
        return sum(values) if values else None

    def _matches(self, labels: _Labels) -> bool:
        return self.model is None or dict(labels).get("model_name", self.model) == self.model
