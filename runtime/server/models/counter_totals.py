"""Counters of a model, over all engines that serve it while the server runs.

An engine counts from 0 when it is loaded, and the one before it may serve again. Exported as they are, counters would
fall and rise again, and Prometheus takes a fall for a new start: it would count what it had counted before once more.
"""

from collections.abc import Callable, Mapping

from ingot.runtime.engine.metrics_export import Value
from ingot.runtime.steps.metrics import HistogramSnapshot

Counts = Mapping[str, Value]
"""Values of counters and histograms by name."""


class Totals:
    """Counts of engines that have ended, and of those that may count on."""

    def __init__(self) -> None:
        self._ended: Counts = {}
        self._reads: dict[object, Callable[[], Counts]] = {}

    @property
    def engines(self) -> tuple[object, ...]:
        """Those that may count on."""
        return tuple(self._reads)

    def begin(self, engine: object, read: Callable[[], Counts]) -> None:
        """Add what an engine counts: `read` returns it."""
        self._reads.setdefault(engine, read)

    def end(self, engine: object) -> None:
        """Keep what an engine has counted, and let go of it."""
        read = self._reads.pop(engine, None)
        if read:
            self.add(read())

    def add(self, counts: Counts) -> None:
        """Add what no engine counts."""
        self._ended = _sums(self._ended, counts)

    def read(self) -> Counts:
        """The sums."""
        found = self._ended
        for read in self._reads.values():
            found = _sums(found, read())
        return found


def _sums(first: Counts, second: Counts) -> Counts:
    return {name: _sum(first.get(name), second.get(name)) for name in {**first, **second}}


def _sum(first: Value | None, second: Value | None) -> Value:
    """Sum of two values of one kind, or the one that exists."""
    if first is None or second is None:
        found = second if first is None else first
        assert found is not None
        return found
    if isinstance(first, HistogramSnapshot):
        assert isinstance(second, HistogramSnapshot)
        return _both(first, second)
    if isinstance(first, Mapping):
        assert isinstance(second, Mapping)
        return {key: first.get(key, 0) + second.get(key, 0) for key in {**first, **second}}
    assert not isinstance(second, HistogramSnapshot | Mapping)
    return first + second


def _both(first: HistogramSnapshot, second: HistogramSnapshot) -> HistogramSnapshot:
    """Observations of both, whose buckets are the same."""
    assert first.bounds == second.bounds
    if not (first.num_observed and second.num_observed):
        return first if first.num_observed else second
    counts = tuple(one + other for one, other in zip(first.counts, second.counts, strict=True))
    extremes = min(first.least, second.least), max(first.most, second.most)
    return HistogramSnapshot(first.bounds, counts, first.total + second.total, *extremes)
