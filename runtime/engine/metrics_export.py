"""The table of metrics: the name, kind, unit and meaning of each, where it is read, and all of them as Prometheus text.

A metric that vLLM's dashboards have has vLLM's name here, after the prefix "ingot:". `prometheus_text` takes another
prefix: with "vllm:", dashboards made for vLLM show an Ingot engine.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ingot.runtime.steps.metrics import EngineMetrics, HistogramSnapshot

Kind = Literal["counter", "gauge", "histogram"]
Value = float | Mapping[str, float] | HistogramSnapshot
"""A mapping has values by the value of the metric's label."""


@dataclass(frozen=True)
class Metric:
    """A row of the table. `source` is the attribute of EngineMetrics that has it, `label` the name of its label."""

    name: str
    kind: Kind
    unit: str
    source: str
    help: str
    label: str = ""
    in_vllm: bool = False

    @property
    def exported_name(self) -> str:
        """Its name in Prometheus text without the prefix: counters end in _total."""
        return f"{self.name}_total" if self.kind == "counter" and not self.name.endswith("_total") else self.name

    def read(self, metrics: EngineMetrics) -> Value | None:
        """Its value; None where the engine does not have the part that it is about."""
        value: Any = metrics
        for attribute in self.source.split("."):
            value = None if value is None else getattr(value, attribute)
        found: Value | None = value
        return found


def _vllm(name: str, kind: Kind, unit: str, source: str, help: str, label: str = "") -> Metric:
    return Metric(name, kind, unit, source, help, label, in_vllm=True)


# fmt: off
METRICS = (
    _vllm("num_requests_running", "gauge", "requests", "num_running", "Requests that are being computed."),
    _vllm("num_requests_waiting", "gauge", "requests", "num_waiting", "Requests that wait for a place."),
    Metric("waiting_prompt_tokens", "gauge", "tokens", "waiting_prompt_tokens", "Prompt tokens of waiting requests."),
    _vllm("num_preemptions", "counter", "preemptions", "num_preemptions", "Running requests that had to wait again."),
    Metric("num_swaps", "counter", "requests", "num_swaps", "Preempted requests that resumed from a tier."),
    Metric("num_yields", "counter", "preemptions", "num_yields", "Preemptions that made room for an urgent request."),
    _vllm("request_success", "counter", "requests", "finished_by_reason", "Requests that ended, by finish reason.",
          "finished_reason"),
    Metric("finished_requests", "counter", "requests", "num_finished", "Requests that ended, for whatever reason."),
    Metric("batch_full_steps", "counter", "steps", "num_batch_full",
           "Steps before which requests waited because max_sequences ran."),
    Metric("pool_full_steps", "counter", "steps", "num_pool_full",
           "Steps before which requests waited because too few KV blocks were free."),
    Metric("refused_requests", "counter", "requests", "num_refused", "Requests refused because of overload."),
    Metric("failed_requests", "counter", "requests", "num_failed_requests", "Requests that ended with an error."),

    Metric("adapter_requests_running", "gauge", "requests", "adapters_running", "Running requests of an adapter.",
           "adapter"),
    Metric("adapter_requests_waiting", "gauge", "requests", "adapters_waiting", "Waiting requests of an adapter.",
           "adapter"),
    Metric("adapter_slots", "gauge", "adapters", "max_adapters", "Adapters that running requests may have at a time."),
    Metric("adapter_loads", "counter", "loads", "num_adapter_loads", "Times that an adapter was put into a slot."),

    _vllm("kv_cache_usage_perc", "gauge", "1", "kv_usage", "Used share of the KV pool; 1 is 100 percent."),
    Metric("kv_blocks", "gauge", "blocks", "blocks_total", "Blocks of the KV pool."),
    Metric("kv_pool_bytes", "gauge", "bytes", "kv_pool_bytes", "Memory of the KV pool, on the engine's device."),
    Metric("kv_blocks_in_use", "gauge", "blocks", "blocks_in_use", "Blocks of the KV pool that requests use."),
    Metric("kv_blocks_cached", "gauge", "blocks", "blocks_cached", "Blocks in the prefix cache, used or idle."),
    _vllm("prefix_cache_queries", "counter", "tokens", "prefix_query_tokens", "Tokens of requests at their admission."),
    _vllm("prefix_cache_hits", "counter", "tokens", "prefix_hit_tokens", "Those that came from the prefix cache."),
    Metric("prefix_cache_hits_by_tier", "counter", "tokens", "prefix_hit_tokens_by_tier", "Those, by tier.", "tier"),
    Metric("kv_host_blocks", "gauge", "blocks", "kv_tiers.host_blocks_total", "Blocks that host memory has room for."),
    Metric("kv_host_blocks_used", "gauge", "blocks", "kv_tiers.host_blocks", "Blocks in host memory."),
    Metric("kv_blocks_saved", "counter", "blocks", "kv_tiers.saved_blocks", "Copied from the pool to host memory."),
    Metric("kv_saves_dropped", "counter", "blocks", "kv_tiers.dropped_saves", "Left the pool with no copy below it."),
    Metric("kv_blocks_restored", "counter", "blocks", "kv_tiers.restored_blocks", "Copied back to the pool."),
    Metric("kv_disk_blocks_read", "counter", "blocks", "kv_tiers.disk_read_blocks", "Read from the disk tier."),
    Metric("kv_disk_blocks_written", "counter", "blocks", "kv_tiers.disk_written_blocks", "Written to the disk tier."),
    Metric("kv_disk_blocks_used", "gauge", "blocks", "kv_tiers.disk.num_blocks", "Blocks in the disk tier's folder."),
    Metric("kv_disk_bytes", "gauge", "bytes", "kv_tiers.disk.max_bytes", "Limit of the folder's files."),
    Metric("kv_disk_bytes_used", "gauge", "bytes", "kv_tiers.disk.num_bytes", "Size of the folder's files."),
    Metric("kv_disk_blocks_damaged", "counter", "blocks", "kv_tiers.disk.num_damaged", "Found damaged, and removed."),
    Metric("kv_disk_blocks_evicted", "counter", "blocks", "kv_tiers.disk.num_evicted", "Gave up their place on disk."),
    Metric("kv_disk_errors", "counter", "errors", "kv_tiers.disk.num_errors", "Errors of the disk tier's file system."),
    Metric("kv_disk_takes_writes", "gauge", "1", "kv_tiers.disk.takes_writes", "Whether blocks are written: 1 or 0."),
    Metric("kv_host_states", "gauge", "states", "kv_tiers.host_states_total", "Side states that it has room for."),
    Metric("kv_host_states_used", "gauge", "states", "kv_tiers.host_states", "Side states in host memory."),
    Metric("kv_states_saved", "counter", "states", "kv_tiers.saved_states", "Copied from the device to host memory."),
    Metric("kv_states_restored", "counter", "states", "kv_tiers.restored_states", "Copied back to the device."),
    Metric("kv_disk_states_read", "counter", "states", "kv_tiers.disk_read_states", "Read from the disk tier."),
    Metric("kv_disk_states_written", "counter", "states", "kv_tiers.disk_written_states", "Written to the disk tier."),
    Metric("kv_bytes_moved", "counter", "bytes", "kv_tiers.moved_bytes", "Bytes that tiers moved, by kind.", "move"),
    Metric("kv_failed_transfers", "counter", "blocks", "kv_tiers.failed_transfers", "Blocks that did not arrive."),
    Metric("kv_restored_prefixes", "counter", "prefixes", "kv_tiers.restored_prefixes", "Decisions to restore."),
    Metric("kv_recomputed_prefixes", "counter", "prefixes", "kv_tiers.recomputed_prefixes",
           "Decisions to compute what is stored, because that is faster."),

    _vllm("prompt_tokens", "counter", "tokens", "prompt_tokens", "Prompts of requests that have a first token."),
    _vllm("generation_tokens", "counter", "tokens", "output_tokens", "Generated tokens."),
    Metric("computed_tokens", "counter", "tokens", "computed_tokens", "Tokens that steps computed."),
    Metric("discarded_tokens", "counter", "tokens", "discarded_tokens", "Those whose request ended meanwhile."),
    Metric("steps", "counter", "steps", "num_steps", "Steps whose outcome is known."),
    Metric("compute_threads", "gauge", "threads", "num_threads", "Threads that compute on the CPU; 0 on a GPU."),
    Metric("weight_bytes", "gauge", "bytes", "weight_bytes", "Weights in memory of the CPU, where pages are counted."),
    Metric("weight_huge_bytes", "gauge", "bytes", "weight_huge_bytes", "Those in huge pages, which are read faster."),
    Metric("failed_steps", "counter", "steps", "num_failed_steps", "Steps that failed and were computed again."),

    _vllm("time_to_first_token_seconds", "histogram", "seconds", "ttft_seconds", "From arrival to the first token."),
    _vllm("inter_token_latency_seconds", "histogram", "seconds", "itl_seconds", "Between two outputs of a request."),
    _vllm("request_time_per_output_token_seconds", "histogram", "seconds", "tpot_seconds",
          "Mean time per token after the first, of a request that ended."),
    _vllm("e2e_request_latency_seconds", "histogram", "seconds", "e2e_seconds", "From arrival to the end."),
    _vllm("request_queue_time_seconds", "histogram", "seconds", "queue_seconds", "From arrival to the first step."),
    _vllm("request_prompt_tokens", "histogram", "tokens", "prompt_lengths", "Prompts of requests that ended."),
    _vllm("request_generation_tokens", "histogram", "tokens", "output_lengths", "Outputs of requests that ended."),
    _vllm("iteration_tokens_total", "histogram", "tokens", "step_lengths", "Tokens that a step computes."),

    _vllm("spec_decode_num_drafts", "counter", "drafts", "speculation.num_drafts",
          "Times that a request had drafts in a step."),
    _vllm("spec_decode_num_draft_tokens", "counter", "tokens", "speculation.num_draft_tokens",
          "Drafts that were computed."),
    _vllm("spec_decode_num_accepted_tokens", "counter", "tokens", "speculation.num_accepted_tokens",
          "Drafts that were accepted."),
    _vllm("spec_decode_num_accepted_tokens_per_pos", "counter", "tokens", "speculation.num_accepted_tokens_per_pos",
          "The same by position of the draft, from 0.", "position"),
    Metric("spec_decode_num_tested_tokens", "counter", "tokens", "speculation.num_tested_tokens",
           "Drafts up to the first rejected one."),
    Metric("spec_decode_num_drafts_per_length", "counter", "drafts", "speculation.num_drafts_per_length",
           "spec_decode_num_drafts by number of drafts.", "length"),
    Metric("spec_decode_num_failures", "counter", "calls", "speculation.num_failures",
           "Calls of the drafter that raised."),
    Metric("spec_decode_acceptance_rate", "gauge", "1", "speculation.acceptance_rate",
           "Acceptance of drafts whose predecessors all were."),
    Metric("spec_decode_mean_accepted_length", "gauge", "tokens", "speculation.mean_accepted_length",
           "Tokens per verification."),
    Metric("spec_decode_expected_accepted_length", "gauge", "tokens", "speculation.expected_accepted_length",
           "The same if drafts were independent."),
)
# fmt: on


def prometheus_text(metrics: EngineMetrics, *, prefix: str = "ingot:", labels: Mapping[str, str] | None = None) -> str:
    """Metrics in Prometheus's text format, version 0.0.4; every sample gets the `labels`, such as model_name.

    Source: https://prometheus.io/docs/instrumenting/exposition_formats/
    """
    lines: list[str] = []
    for metric in METRICS:
        value = metric.read(metrics)
        if value is None:
            continue
        name = prefix + metric.exported_name
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
