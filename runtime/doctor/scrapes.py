"""Metrics as text, of `/metrics` or of `ingot.prometheus_text`: one scrape, and what was counted between two."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from ingot.errors import UsageError, shown

_PREFIX = re.compile(r"^(vllm:|ingot:|ingot_)")
_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ([^ ]+)(?: -?\d+)?$")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_Labels = tuple[tuple[str, str], ...]


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

    def above(self, value: float) -> float:
        """Observations in buckets whose values are all above a value."""
        return self.count - next((number for bound, number in self.below if bound >= value), self.count)


@dataclass(frozen=True)
class Scrape:
    """Samples by name, without the prefixes vllm: and ingot_ and without the suffix _total, and by their labels."""

    samples: Mapping[str, Mapping[_Labels, float]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, source: str) -> Self:
        """Read Prometheus's text format. UsageError for a text that has none of Ingot's or vLLM's metrics.

        Source: https://prometheus.io/docs/instrumenting/exposition_formats/
        """
        samples: dict[str, dict[_Labels, float]] = {}
        has_own = False
        for line in text.splitlines():
            found = None if line.startswith("#") else _LINE.match(line.strip())
            if not found:
                continue
            name, labels, value = found.groups()
            has_own = has_own or bool(_PREFIX.match(name))
            name = _PREFIX.sub("", name).removesuffix("_total")
            key = tuple(sorted((each, text) for each, text in _LABEL.findall(labels or "")))
            try:
                samples.setdefault(name, {})[key] = float(value)
            except ValueError:
                raise UsageError(f"{source}: {shown(line)} has a value that is not a number") from None
        if not has_own:
            raise UsageError(f"{source} has no metrics of Ingot; give the text of /metrics or of ingot.prometheus_text")
        return cls(samples)


@dataclass(frozen=True)
class Window:
    """Two scrapes of one server, the first of which may be empty: then counters are totals since the start.

    `seconds` is the time between them; None when it is not known. Values are of one model, or of the server.
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

    def of(self, model: str) -> "Window":
        """The metrics of one model, and those of the server."""
        return Window(self.before, self.after, self.seconds, model)

    def now(self, name: str) -> float | None:
        """A gauge at the end, summed over its labels; None where it does not exist."""
        return self._value(self.after, name)

    def counted(self, name: str) -> float:
        """What a counter grew by; 0 where it does not exist."""
        return max(0.0, (self._value(self.after, name) or 0.0) - (self._value(self.before, name) or 0.0))

    def distribution(self, name: str) -> Distribution:
        """What a histogram observed."""
        bounds: dict[float, float] = {}
        for scrape, sign in ((self.after, 1), (self.before, -1)):
            for labels, value in scrape.samples.get(f"{name}_bucket", {}).items():
                if self._matches(labels):
                    bound = float(dict(labels)["le"])
                    bounds[bound] = bounds.get(bound, 0.0) + sign * value
        return Distribution(tuple(sorted(bounds.items())), self.counted(f"{name}_sum"))

    def _value(self, scrape: Scrape, name: str) -> float | None:
        values = [value for labels, value in scrape.samples.get(name, {}).items() if self._matches(labels)]
        return sum(values) if values else None

    def _matches(self, labels: _Labels) -> bool:
        return self.model is None or dict(labels).get("model_name", self.model) == self.model
