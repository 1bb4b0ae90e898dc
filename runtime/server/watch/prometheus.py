"""Metrics of a server for Prometheus: those of its engines, under vLLM's names where it has them, and its own."""

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from ingot.runtime.doctor.machine import throttling, usable_cores
from ingot.runtime.engine.metrics_export import METRICS, Value
from ingot.runtime.metric_rows import Metric
from ingot.runtime.server.models.served_models import ServedModel
from ingot.runtime.server.models.swap import OUTCOMES
from ingot.runtime.server.service import Service
from ingot.runtime.server.watch.key_usage import KeyUsage
from ingot.runtime.steps.metrics import HistogramSnapshot

_MODEL = "model_name"  # vLLM's label
_OF_REQUESTS = (  # which `ServedModel` counts
    Metric("turned_away", "counter", "requests", "", "Requests that the model's limits refused with 429."),
    Metric("prompt_pieces", "counter", "pieces", "", "Pieces of 16 tokens of sampled prompts."),
    Metric("repeated_prompt_pieces", "counter", "pieces", "", "Those that an earlier prompt had, at any place."),
    Metric("leading_prompt_pieces", "counter", "pieces", "", "Those that it had from its first token on."),
    Metric("encode_seconds", "histogram", "seconds", "", "Times to encode prompts."),
)


class Telemetry(Collector):
    """What a scrape of a service reads. `count` is called by the application for each answer."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.registry = CollectorRegistry()
        self._started = time.monotonic()
        self._answers: Counter[tuple[str, str]] = Counter()
        self._ignored: Counter[str] = Counter()
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def count(self, path: str, status: int) -> None:
        """Count an answer."""
        self._answers[path, str(status)] += 1

    def count_ignored(self, fields: Sequence[str]) -> None:
        """Count unknown fields that were left out of a request."""
        self._ignored.update(fields)

    def collect(self) -> Iterator[Family]:
        """Read all engines and the server. Counters of a model are sums over its engines, so none falls."""
        models = self._service.models.all
        counts = {model.name: model.totals.read() for model in models}
        gauges = {model.name: model.engine.metrics() for model in models}
        for metric in (*METRICS, *_OF_REQUESTS):
            read = {
                name: metric.read(gauges[name]) if metric.kind == "gauge" else of_model.get(metric.name)
                for name, of_model in counts.items()
            }
            found = {name: value for name, value in read.items() if value is not None}
            if found:
                yield _family(metric, found)
        yield from self._of_server(models)

    def _of_server(self, models: tuple[ServedModel, ...]) -> Iterator[Family]:
        answers = CounterMetricFamily("ingot_http_answers", "Answers by path and status.", labels=["path", "status"])
        for labels, number in self._answers.items():
            answers.add_metric(labels, number)
        yield answers
        ignored = CounterMetricFamily(
            "ingot_ignored_fields", "Unknown fields of requests that were left out.", labels=["field"]
        )
        for field, number in self._ignored.items():
            ignored.add_metric([field], number)
        yield ignored
        is_ready = self._service.state == "ready" and not self._service.problems()
        yield GaugeMetricFamily("ingot_ready", "Whether requests are taken, as /ready says.", float(is_ready))
        yield CounterMetricFamily(
            "ingot_slow_clients", "Requests that were aborted because their client accepted nothing.",
            self._service.num_slow_clients,
        )  # fmt: skip
        left = CounterMetricFamily(
            "ingot_clients_left", "Requests whose client left before the end of its answer.", labels=[_MODEL]
        )
        sending = CounterMetricFamily(
            "ingot_send_seconds", "Time in which answers waited for their clients to accept them.", labels=[_MODEL]
        )
        for model in models:
            left.add_metric([model.name], self._service.num_clients_left[model.name])
            sending.add_metric([model.name], self._service.send_seconds(model))
        yield from (left, sending)
        price = self._service.options.price_per_hour
        if price is not None:
            hours = (time.monotonic() - self._started) / 3600
            yield CounterMetricFamily(
                "ingot_cost", "Price of the time since the server started, by --price-per-hour.", price * hours
            )
            costs = self._service.key_usage.costs(price * hours)
            yield _by_key("ingot_key_cost", "The same by key, shared by tokens; idle: no request ended.", costs)
        yield from _of_keys(self._service.key_usage)
        gauges = {
            "ingot_open_requests": ("Requests from their admission to the end of their answer.", "num_open"),
            "ingot_queued_tokens": ("Prompt tokens of open requests without output.", "waiting_tokens"),
        }
        for name, (text, source) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=[_MODEL])
            for model in models:
                gauge.add_metric([model.name], getattr(model.gate, source))
            yield gauge
        is_loaded = GaugeMetricFamily("ingot_model_loaded", "0: unloaded, because it was idle.", labels=[_MODEL])
        for model in models:
            is_loaded.add_metric([model.name], float(not model.is_unloaded))
        yield is_loaded
        yield from self._of_replacements(models)
        yield _of_adapters(models)
        yield _of_caches(models)
        yield GaugeMetricFamily("ingot_usable_cores", "Processors by affinity and quota.", _usable_cores(models))
        yield from _of_quota()
        yield from _of_processes(models)

    def _of_replacements(self, models: tuple[ServedModel, ...]) -> Iterator[Family]:
        info = GaugeMetricFamily("ingot_artifact_info", "1, with the artifact's digest.", labels=[_MODEL, "identity"])
        size = GaugeMetricFamily("ingot_program_bytes", "Size of the artifact's program and weights.", labels=[_MODEL])
        for model in models:
            if model.artifact:
                info.add_metric([model.name, model.artifact.manifest.identity], 1)
                size.add_metric([model.name], model.artifact.manifest.program_bytes)
        yield from (info, size)
        replacements = self._service.replacements
        if replacements is None:
            return
        restarts = CounterMetricFamily("ingot_engine_restarts", "Loads of an engine after it failed.", labels=[_MODEL])
        reloads = CounterMetricFamily("ingot_reloads", "New artifacts, by outcome.", labels=[_MODEL, "outcome"])
        for model in models:
            restarts.add_metric([model.name], replacements.num_restarts[model.name])
            for outcome in OUTCOMES:
                reloads.add_metric([model.name, outcome], replacements.num_reloads[model.name, outcome])
        yield from (restarts, reloads)


def _of_keys(usage: KeyUsage) -> Iterator[Family]:
    """Return the families of requests with an API key, counted when they end."""
    if usage.requests:
        yield _by_key("ingot_key_requests", "Requests that were admitted and have ended, by key.", usage.requests)
        yield _by_key("ingot_key_prompt_tokens", "Tokens of their prompts.", usage.prompt_tokens)
        yield _by_key("ingot_key_generation_tokens", "Tokens of their outputs.", usage.output_tokens)


def _by_key(name: str, text: str, values: Mapping[str, float]) -> Family:
    family = CounterMetricFamily(name, text, labels=["key"])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _of_adapters(models: tuple[ServedModel, ...]) -> Family:
    """vLLM's gauge of what runs and waits, as names in labels; `ingot_adapter_requests_*` count them."""
    labels = [_MODEL, "max_lora", "running_lora_adapters", "waiting_lora_adapters"]
    info = GaugeMetricFamily("vllm:lora_requests_info", "Adapters of running and waiting requests.", labels=labels)
    for model in models:
        if model.engine.adapters:
            metrics = model.engine.metrics()
            names = [",".join(sorted(each)) for each in (metrics.adapters_running, metrics.adapters_waiting)]
            info.add_metric([model.name, str(metrics.max_adapters), *names], 1)
    return info


def _of_caches(models: tuple[ServedModel, ...]) -> Family:
    """vLLM's gauge of the KV cache, which routers read."""
    names = ("block_size", "cache_dtype", "enable_prefix_caching", "kv_cache_memory_bytes", "num_gpu_blocks")
    labels = [_MODEL, "engine", *names, "num_cpu_blocks"]
    info = GaugeMetricFamily("vllm:cache_config_info", "1, with the KV cache's sizes in blocks.", labels=labels)
    for model in models:
        found = model.engine.metrics()
        host_blocks = found.kv_tiers.host_blocks_total if found.kv_tiers else 0
        values = (found.block_tokens, found.kv_dtype, found.prefix_cache, found.kv_pool_bytes, found.blocks_total)
        info.add_metric([model.name, "0", *map(str, values), str(host_blocks)], 1)
    return info


def _usable_cores(models: tuple[ServedModel, ...]) -> float:
    """Of the engines, which compute: threads of the server keep off one of their cores."""
    process = next((model.engine.process.pid for model in models if model.engine.process), 0)
    with suppress(OSError):  # the engine's process has ended
        return usable_cores(process=process)
    return usable_cores()


def _of_quota() -> Iterator[Family]:
    """Of the control group whose processor quota is the tightest; none without a quota."""
    if (found := throttling()) is not None:
        periods, throttled = found
        yield CounterMetricFamily("ingot_quota_periods", "Scheduling periods under a processor quota.", periods)
        yield CounterMetricFamily("ingot_throttled_periods", "Those in which the quota was used up.", throttled)


def _of_processes(models: tuple[ServedModel, ...]) -> Iterator[Family]:
    """Of engines in processes of their own: `process_*` are the server's alone."""
    seconds = CounterMetricFamily("ingot_engine_cpu_seconds", "Processor time of an engine's process.", labels=[_MODEL])
    resident = GaugeMetricFamily(
        "ingot_engine_resident_bytes", "Resident memory of an engine's process.", labels=[_MODEL]
    )
    for model in models:
        usage = model.engine.process.usage() if model.engine.process else None
        if usage:
            seconds.add_metric([model.name], usage.cpu_seconds)
            resident.add_metric([model.name], usage.resident_bytes)
    yield from (family for family in (seconds, resident) if family.samples)


def _family(metric: Metric, values: Mapping[str, Value]) -> Family:
    labels = [_MODEL, metric.label] if metric.label else [_MODEL]
    kinds: dict[str, Any] = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    family = kinds[metric.kind](metric.family_name, metric.help, labels=labels)
    for model, value in values.items():
        if isinstance(value, HistogramSnapshot):
            _add_histogram(family, [model], value)
        elif isinstance(value, Mapping):
            for key in sorted(value):
                family.add_metric([model, str(key)], value[key])
        else:
            family.add_metric([model], value)
    result: Family = family
    return result


def _add_histogram(family: HistogramMetricFamily, labels: list[str], histogram: HistogramSnapshot) -> None:
    buckets, below = [], 0
    for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == math.inf else repr(bound), below))
    family.add_metric(labels, buckets, histogram.total)
