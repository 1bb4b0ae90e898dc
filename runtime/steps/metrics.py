"""Metrics of an engine: the registry that its steps write to, and the snapshot that others read.

`MetricsRegistry` belongs to the engine's thread: plain counters and histograms with fixed buckets, a fraction of a
microsecond for each token. `EngineMetrics` is what `Engine.metrics` returns: the registry's values at one moment, with
what the scheduler, the blocks and other parts count themselves. `metrics_export` names and describes each of them, and
writes them as Prometheus text.

Another thread may take a snapshot while a step runs (`AsyncEngine.metrics`). Every histogram in it is consistent in
itself; two values may be one step apart.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ingot.runtime.kv.tier_metrics import TierMetrics
from ingot.runtime.speculation.counters import SpeculationMetrics

if TYPE_CHECKING:
    from ingot.runtime.asking.outputs import Completion

# 6 buckets per factor of 10, so that a percentile is known to about 25 %: 100 microseconds to 1000 seconds
_STEPS = (1, 1.5, 2, 3, 5, 7)
SECONDS_BUCKETS = (*(round(step * 10.0**power, 5) for power in range(-4, 3) for step in _STEPS), 1000.0)
TOKENS_BUCKETS = (*(float(step * 10**power) for power in range(6) for step in (1, 2, 5)), 1e6)


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Observations by bucket: counts[i] are those of at most bounds[i] and above the bound before; the last, all above.

    `total` is the sum of the observed values, `least` and `most` are the extremes; 0 without any.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    least: float = 0.0
    most: float = 0.0

    @property
    def num_observed(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Mean of the observed values; None without any."""
        return self.total / self.num_observed if self.num_observed else None

    def quantile(self, share: float) -> float | None:
        """Value that this share of observations does not exceed, interpolated in its bucket; None without any."""
        rank, below = share * self.num_observed, 0
        for index, count in enumerate(self.counts):
            if count and below + count >= rank:
                low = max(self.least, self.bounds[index - 1] if index else self.least)
                high = min(self.most, self.bounds[index] if index < len(self.bounds) else self.most)
                return low + (high - low) * (rank - below) / count
            below += count
        return None


class Histogram:
    """Counts observations in fixed buckets. One thread observes, any may take a snapshot."""

    __slots__ = ("_bounds", "_counts", "_last_index", "_last_value", "_least", "_most", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._least, self._most = math.inf, -math.inf
        self._last_value = math.nan  # requests of one batch have the same times: look for the bucket once
        self._last_index = 0

    def observe(self, value: float) -> None:
        """Add an observation."""
        if value != self._last_value:
            self._last_value, self._last_index = value, bisect_left(self._bounds, value)
            self._least, self._most = min(self._least, value), max(self._most, value)
        self._counts[self._last_index] += 1
        self._total += value

    def snapshot(self) -> HistogramSnapshot:
        """The observations so far."""
        counts = tuple(self._counts)
        extremes = (self._least, self._most) if any(counts) else (0.0, 0.0)
        return HistogramSnapshot(self._bounds, counts, self._total, *extremes)


def _seconds() -> Histogram:
    return Histogram(SECONDS_BUCKETS)


def _tokens() -> Histogram:
    return Histogram(TOKENS_BUCKETS)


@dataclass(slots=True)
class MetricsRegistry:
    """Totals over the steps and requests of one engine; see EngineMetrics for their meaning."""

    num_steps: int = 0
    computed_tokens: int = 0
    discarded_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    num_failed_steps: int = 0
    num_failed_requests: int = 0
    num_refused: int = 0
    num_finished: int = 0
    finished_by_reason: Counter[str] = field(default_factory=Counter)
    ttft_seconds: Histogram = field(default_factory=_seconds)
    itl_seconds: Histogram = field(default_factory=_seconds)
    tpot_seconds: Histogram = field(default_factory=_seconds)
    e2e_seconds: Histogram = field(default_factory=_seconds)
    queue_seconds: Histogram = field(default_factory=_seconds)
    prompt_lengths: Histogram = field(default_factory=_tokens)
    output_lengths: Histogram = field(default_factory=_tokens)
    step_lengths: Histogram = field(default_factory=_tokens)

    def snapshot(self) -> dict[str, Any]:
        """Values of the fields of EngineMetrics that have the same names."""
        values: dict[str, Any] = {}
        for name in _REGISTRY_FIELDS:
            value = getattr(self, name)
            values[name] = value.snapshot() if isinstance(value, Histogram) else value
        values["finished_by_reason"] = dict(self.finished_by_reason)
        return values

    def count(self, computed_tokens: int, discarded_tokens: int = 0) -> None:
        """Add a step."""
        self.num_steps += 1
        self.computed_tokens += computed_tokens
        self.discarded_tokens += discarded_tokens
        self.step_lengths.observe(computed_tokens)

    def first_token(self, ttft_seconds: float, prompt_tokens: int) -> None:
        """Add the first token of a request or of a choice; `prompt_tokens` is 0 for all choices but the first."""
        self.ttft_seconds.observe(ttft_seconds)
        self.prompt_tokens += prompt_tokens

    def finish(self, completion: "Completion") -> None:
        """Add a request, or a choice of one, that has ended, for whatever reason. The prompt counts with choice 0."""
        times = completion.metrics
        self.num_finished += 1
        self.finished_by_reason[completion.finish_reason] += 1
        self.num_failed_requests += completion.finish_reason == "error"
        self.e2e_seconds.observe(times.e2e_seconds)
        for histogram, seconds in ((self.tpot_seconds, times.tpot_seconds), (self.queue_seconds, times.queue_seconds)):
            if seconds is not None:
                histogram.observe(seconds)
        if completion.index == 0:
            self.prompt_lengths.observe(completion.prompt_tokens)
        self.output_lengths.observe(len(completion.token_ids))


_REGISTRY_FIELDS = tuple(each.name for each in fields(MetricsRegistry))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """The engine's present load, and totals since it was made.

    Of the `computed_tokens` of `num_steps`, `discarded_tokens` were wasted: while they were computed, their request was
    aborted or ended with a token that had not been read yet. A step counts once its outcome is known. One that failed
    counts in `num_failed_steps` alone; requests that ended with an error in `num_failed_requests`; requests that were
    not taken, because the engine was overloaded, in `num_refused`. Of all `num_preemptions`, `num_yields` made room for
    a more urgent request; `num_swaps` requests resumed after one with blocks from a tier. `prefix_hit_tokens` of the
    `prefix_query_tokens` that requests were admitted with, again after a preemption, came from the prefix cache.
    Before `num_batch_full` steps requests waited although tokens had room, because `max_sequences` ran; before
    `num_pool_full`, because too few KV blocks were free. `num_threads` compute on the CPU; 0 on a GPU. Of
    `weight_bytes`, `weight_huge_bytes` are in huge pages; both are 0 on a GPU, and where they cannot be counted.

    A request with several choices counts its prompt once, and each choice as a request where one ends or fails.
    Histograms of requests count those that ended, each when it ends; of the time to the first token and between tokens,
    each output when it arrives. Sequences with an adapter are counted by its name; `num_adapter_loads` counts how often
    one was put into a slot. `speculation` is None in an engine that does not speculate.
    """

    num_running: int
    num_waiting: int
    waiting_prompt_tokens: int
    blocks_in_use: int
    blocks_cached: int
    blocks_total: int
    num_steps: int
    num_preemptions: int
    num_swaps: int
    num_yields: int
    computed_tokens: int
    discarded_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prompt_tokens: int
    output_tokens: int
    num_failed_steps: int
    num_failed_requests: int
    num_finished: int
    num_refused: int
    finished_by_reason: Mapping[str, int]
    ttft_seconds: HistogramSnapshot
    itl_seconds: HistogramSnapshot
    tpot_seconds: HistogramSnapshot
    e2e_seconds: HistogramSnapshot
    queue_seconds: HistogramSnapshot
    prompt_lengths: HistogramSnapshot
    output_lengths: HistogramSnapshot
    step_lengths: HistogramSnapshot
    prefix_hit_tokens_by_tier: Mapping[str, int]
    adapters_running: Mapping[str, int] = field(default_factory=dict)
    adapters_waiting: Mapping[str, int] = field(default_factory=dict)
    num_adapter_loads: int = 0
    max_adapters: int = 0
    block_bytes: int = 0
    block_tokens: int = 0
    kv_dtype: str = ""
    prefix_cache: bool = True
    num_batch_full: int = 0
    num_pool_full: int = 0
    num_threads: int = 0
    weight_bytes: int = 0
    weight_huge_bytes: int = 0
    kv_tiers: TierMetrics | None = None  # None without tiers
    speculation: SpeculationMetrics | None = None

    @property
    def kv_pool_bytes(self) -> int:
        """Bytes of the KV pool, in the memory of the engine's device."""
        return self.blocks_total * self.block_bytes

    @property
    def kv_usage(self) -> float:
        """Share of the KV pool's blocks that sequences use, from 0 to 1."""
        return self.blocks_in_use / self.blocks_total
