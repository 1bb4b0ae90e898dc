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
from typing import TYPE_CHECKING, Annotated, Any

from ingot.runtime.kv.tier_metrics import TierMetrics
from ingot.runtime.metric_rows import counter, gauge, histogram
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

    def observe(self, value: float, count: int = 1) -> None:
        """Add an observation, or several equal ones."""
        if value != self._last_value:
            self._last_value, self._last_index = value, bisect_left(self._bounds, value)
            self._least, self._most = min(self._least, value), max(self._most, value)
        self._counts[self._last_index] += count
        self._total += value * count

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
    prefill_seconds: Histogram = field(default_factory=_seconds)
    decode_seconds: Histogram = field(default_factory=_seconds)
    paused_seconds: Histogram = field(default_factory=_seconds)
    step_lengths: Histogram = field(default_factory=_tokens)
    step_sequences: Histogram = field(default_factory=_tokens)
    prefill_step_seconds: Histogram = field(default_factory=_seconds)
    decode_step_seconds: Histogram = field(default_factory=_seconds)
    _busy_since: float = 0.0

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

    def resume(self, now: float) -> None:
        """Record that there was nothing to compute until now: the time before is not that of the next step."""
        self._busy_since = now

    def stepped(self, now: float, num_sequences: int, *, has_prefill: bool) -> None:
        """Add the time of a step, from the end of the step before it, and the sequences that it computed."""
        seconds = self.prefill_step_seconds if has_prefill else self.decode_step_seconds
        seconds.observe(now - self._busy_since)
        self.step_sequences.observe(num_sequences)
        self._busy_since = now

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
        for name in _REQUEST_TIMES:
            if (seconds := getattr(times, name)) is not None:
                getattr(self, name).observe(seconds)
        if completion.index == 0:
            self.prompt_lengths.observe(completion.prompt_tokens)
        self.output_lengths.observe(len(completion.token_ids))


_REQUEST_TIMES = ("tpot_seconds", "queue_seconds", "prefill_seconds", "decode_seconds", "paused_seconds")
_REGISTRY_FIELDS = tuple(each.name for each in fields(MetricsRegistry) if not each.name.startswith("_"))


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
    `stage_problem` says which of the `num_stages` ended or hung, until all are started again; "" else.

    A request with several choices counts its prompt once, and each choice as a request where one ends or fails.
    Histograms of requests count those that ended, each when it ends; of the time to the first token and between tokens,
    each output when it arrives. Sequences with an adapter are counted by its name; `num_adapter_loads` counts how often
    one was put into a slot. `speculation` is None in an engine that does not speculate.
    """

    num_running: Annotated[
        int, gauge("num_requests_running", "requests", "Requests that are being computed.", in_vllm=True)
    ]
    num_waiting: Annotated[
        int, gauge("num_requests_waiting", "requests", "Requests that wait for a place.", in_vllm=True)
    ]
    waiting_prompt_tokens: Annotated[
        int, gauge("waiting_prompt_tokens", "tokens", "Prompt tokens of waiting requests.")
    ]
    num_preemptions: Annotated[
        int, counter("num_preemptions", "preemptions", "Running requests that had to wait again.", in_vllm=True)
    ]
    num_swaps: Annotated[int, counter("num_swaps", "requests", "Preempted requests that resumed from a tier.")]
    num_yields: Annotated[
        int, counter("num_yields", "preemptions", "Preemptions that made room for an urgent request.")
    ]
    finished_by_reason: Annotated[
        Mapping[str, int],
        counter(
            "request_success",
            "requests",
            "Requests that ended, by finish reason.",
            label="finished_reason",
            in_vllm=True,
        ),
    ]
    num_finished: Annotated[int, counter("finished_requests", "requests", "Requests that ended, for whatever reason.")]
    num_batch_full: Annotated[
        int, counter("batch_full_steps", "steps", "Steps before which requests waited because max_sequences ran.")
    ] = 0
    num_pool_full: Annotated[
        int,
        counter("pool_full_steps", "steps", "Steps before which requests waited because too few KV blocks were free."),
    ] = 0
    num_refused: Annotated[int, counter("refused_requests", "requests", "Requests refused because of overload.")]
    num_failed_requests: Annotated[int, counter("failed_requests", "requests", "Requests that ended with an error.")]
    adapters_running: Annotated[
        Mapping[str, int],
        gauge("adapter_requests_running", "requests", "Running requests of an adapter.", label="adapter"),
    ] = field(default_factory=dict)
    adapters_waiting: Annotated[
        Mapping[str, int],
        gauge("adapter_requests_waiting", "requests", "Waiting requests of an adapter.", label="adapter"),
    ] = field(default_factory=dict)
    max_adapters: Annotated[
        int, gauge("adapter_slots", "adapters", "Adapters that running requests may have at a time.")
    ] = 0
    num_adapter_loads: Annotated[
        int, counter("adapter_loads", "loads", "Times that an adapter was put into a slot.")
    ] = 0
    blocks_total: Annotated[
        int,
        gauge(
            "kv_cache_usage_perc", "1", "Used share of the KV pool; 1 is 100 percent.", source="kv_usage", in_vllm=True
        ),
        gauge("kv_blocks", "blocks", "Blocks of the KV pool."),
        gauge("kv_pool_bytes", "bytes", "Memory of the KV pool, on the engine's device.", source="kv_pool_bytes"),
    ]
    blocks_slow: Annotated[int, gauge("kv_slow_blocks", "blocks", "Those in its slow part.")] = 0
    blocks_slow_in_use: Annotated[
        int, gauge("kv_slow_blocks_in_use", "blocks", "Blocks of the slow part that requests use.")
    ] = 0
    slow_read_seconds: Annotated[
        float,
        counter("kv_slow_read_seconds", "seconds", "Time of steps for reading the slow part of the pool, estimated."),
    ] = 0.0
    blocks_moved: Annotated[
        Mapping[str, int],
        counter(
            "kv_blocks_moved", "blocks", "Blocks that moved between the parts of the pool, by direction.", label="move"
        ),
    ] = field(default_factory=dict)
    blocks_in_use: Annotated[int, gauge("kv_blocks_in_use", "blocks", "Blocks of the KV pool that requests use.")]
    blocks_cached: Annotated[int, gauge("kv_blocks_cached", "blocks", "Blocks in the prefix cache, used or idle.")]
    prefix_query_tokens: Annotated[
        int, counter("prefix_cache_queries", "tokens", "Tokens of requests at their admission.", in_vllm=True)
    ]
    prefix_hit_tokens: Annotated[
        int, counter("prefix_cache_hits", "tokens", "Those that came from the prefix cache.", in_vllm=True)
    ]
    prefix_hit_tokens_by_tier: Annotated[
        Mapping[str, int], counter("prefix_cache_hits_by_tier", "tokens", "Those, by tier.", label="tier")
    ]
    kv_tiers: TierMetrics | None = None
    prompt_tokens: Annotated[
        int, counter("prompt_tokens", "tokens", "Prompts of requests that have a first token.", in_vllm=True)
    ]
    output_tokens: Annotated[int, counter("generation_tokens", "tokens", "Generated tokens.", in_vllm=True)]
    computed_tokens: Annotated[int, counter("computed_tokens", "tokens", "Tokens that steps computed.")]
    discarded_tokens: Annotated[int, counter("discarded_tokens", "tokens", "Those whose request ended meanwhile.")]
    num_steps: Annotated[int, counter("steps", "steps", "Steps whose outcome is known.")]
    num_threads: Annotated[int, gauge("compute_threads", "threads", "Threads that compute on the CPU; 0 on a GPU.")] = 0
    weight_bytes: Annotated[
        int, gauge("weight_bytes", "bytes", "Weights in memory of the CPU, where pages are counted.")
    ] = 0
    weight_huge_bytes: Annotated[
        int, gauge("weight_huge_bytes", "bytes", "Those in huge pages, which are read faster.")
    ] = 0
    num_stages: Annotated[int, gauge("stages", "processes", "Processes of stages that run; 0 without.")] = 0
    num_stage_restarts: Annotated[
        int, counter("stage_restarts", "restarts", "Times that stages were started again, because one ended or hung.")
    ] = 0
    num_failed_steps: Annotated[int, counter("failed_steps", "steps", "Steps that failed and were computed again.")]
    ttft_seconds: Annotated[
        HistogramSnapshot,
        histogram("time_to_first_token_seconds", "seconds", "From arrival to the first token.", in_vllm=True),
    ]
    itl_seconds: Annotated[
        HistogramSnapshot,
        histogram("inter_token_latency_seconds", "seconds", "Between two outputs of a request.", in_vllm=True),
    ]
    tpot_seconds: Annotated[
        HistogramSnapshot,
        histogram(
            "request_time_per_output_token_seconds",
            "seconds",
            "Mean time per token after the first, of a request that ended.",
            in_vllm=True,
        ),
    ]
    e2e_seconds: Annotated[
        HistogramSnapshot, histogram("e2e_request_latency_seconds", "seconds", "From arrival to the end.", in_vllm=True)
    ]
    queue_seconds: Annotated[
        HistogramSnapshot,
        histogram("request_queue_time_seconds", "seconds", "From arrival to the first step.", in_vllm=True),
    ]
    prefill_seconds: Annotated[
        HistogramSnapshot,
        histogram("request_prefill_time_seconds", "seconds", "From the first step to the first token.", in_vllm=True),
    ]
    decode_seconds: Annotated[
        HistogramSnapshot,
        histogram("request_decode_time_seconds", "seconds", "From the first token to the end.", in_vllm=True),
    ]
    paused_seconds: Annotated[
        HistogramSnapshot,
        histogram(
            "request_paused_time_seconds", "seconds", "In both: waits after preemptions, of a request that ended."
        ),
    ]
    prompt_lengths: Annotated[
        HistogramSnapshot, histogram("request_prompt_tokens", "tokens", "Prompts of requests that ended.", in_vllm=True)
    ]
    output_lengths: Annotated[
        HistogramSnapshot,
        histogram("request_generation_tokens", "tokens", "Outputs of requests that ended.", in_vllm=True),
    ]
    step_lengths: Annotated[
        HistogramSnapshot, histogram("iteration_tokens_total", "tokens", "Tokens that a step computes.", in_vllm=True)
    ]
    step_sequences: Annotated[
        HistogramSnapshot, histogram("step_sequences", "sequences", "Sequences that a step computes.")
    ]
    prefill_step_seconds: Annotated[
        HistogramSnapshot,
        histogram("prefill_step_seconds", "seconds", "Times of steps with tokens of a prompt, from the step before."),
    ]
    decode_step_seconds: Annotated[
        HistogramSnapshot,
        histogram("decode_step_seconds", "seconds", "Times of steps without, from the step before."),
    ]
    speculation: SpeculationMetrics | None = None
    block_bytes: int = 0
    block_tokens: Annotated[int, gauge("kv_block_tokens", "tokens", "Tokens of a block.")] = 0
    kv_dtype: str = ""
    stage_problem: str = ""
    prefix_cache: Annotated[bool, gauge("prefix_cache_enabled", "1", "Whether there is a prefix cache: 1 or 0.")] = True
    max_sequences: Annotated[int, gauge("max_sequences", "sequences", "Most sequences of a step.")] = 0
    max_batch_tokens: Annotated[int, gauge("max_batch_tokens", "tokens", "Most tokens of a step.")] = 0
    context_tokens: Annotated[int, gauge("context_tokens", "tokens", "Most tokens of a sequence.")] = 0

    @property
    def kv_pool_bytes(self) -> int:
        """Bytes of the KV pool's fast part, in the memory of the engine's device."""
        return (self.blocks_total - self.blocks_slow) * self.block_bytes

    @property
    def kv_usage(self) -> float:
        """Blocks in use as a share of the KV pool's fast part, at most 1."""
        return min(1.0, self.blocks_in_use / (self.blocks_total - self.blocks_slow))
