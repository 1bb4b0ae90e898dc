"""Prometheus text, as Prometheus's own parser reads it, and the table of metrics with its page in docs/."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.metrics_export import METRICS, prometheus_text
from ingot.runtime.speculation.length_control import LengthControl
from ingot.runtime.speculation.speculator import Speculator
from ingot.runtime.steps.metrics import EngineMetrics, HistogramSnapshot
from tests.runtime.engines import VOCAB_SIZE
from tests.runtime.kv.tiered_engines import tiered_engine
from tests.simulators.fake_drafters import RandomDrafter
from tests.simulators.fake_host_blocks import FakeStore

PAGE = Path(__file__).parents[3] / "docs/metrics.md"


def metrics() -> EngineMetrics:
    speculator = Speculator(RandomDrafter(VOCAB_SIZE), vocab_size=VOCAB_SIZE, control=LengthControl(adapts=False))
    with tiered_engine(speculator=speculator, store=FakeStore()) as engine:
        engine.generate([[1, 2, 3], [4] * 50, [1, 2, 3, 4, 5]], SamplingParams(max_tokens=9))
        return engine.metrics()


def families(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_prometheus_reads_every_metric_with_its_kind_and_value() -> None:
    found = metrics()
    read = families(prometheus_text(found))
    for metric in METRICS:
        value = metric.read(found)
        if value is None:
            continue
        family = read.pop(metric.family_name)
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        samples = {(sample.name, *sample.labels.values()): sample.value for sample in family.samples}
        name = metric.exported_name
        if isinstance(value, HistogramSnapshot):
            assert samples[f"{name}_sum",] == value.total
            assert samples[f"{name}_count",] == samples[f"{name}_bucket", "+Inf"] == value.num_observed
            assert samples[f"{name}_bucket", str(value.bounds[3])] == sum(value.counts[:4])
            assert len(samples) == len(value.counts) + 2
        elif isinstance(value, Mapping):
            assert samples == {(name, key): count for key, count in value.items()}
        else:
            assert samples == {(name,): value}
    assert not read


def test_labels_are_on_every_sample_and_escaped() -> None:
    labels = {"model_name": 'a "quoted" \\ name\nin two lines'}
    read = families(prometheus_text(metrics(), labels=labels))
    for family in read.values():
        assert all(sample.labels.items() >= labels.items() for sample in family.samples)


def test_metrics_of_vllm_have_the_names_of_its_dashboards() -> None:
    read = families(prometheus_text(metrics()))
    assert {
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries",
        "vllm:prefix_cache_hits",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_preemptions",
        "vllm:generation_tokens",
        "vllm:time_to_first_token_seconds",
        "vllm:e2e_request_latency_seconds",
    } <= read.keys()


def test_names_are_unique() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def leaves(kind: Any, value: Any, path: str = "") -> set[str]:
    """Paths of the values in a dataclass of dataclasses."""
    found = set()
    for field in fields(kind):
        inner = getattr(value, field.name)
        name = f"{path}{field.name}"
        nested = is_dataclass(inner) and not isinstance(inner, HistogramSnapshot)
        found |= leaves(inner, inner, f"{name}.") if nested else {name}
    return found


def test_every_value_of_the_snapshot_is_exported() -> None:
    others = {"blocks_in_use", "block_bytes", "kv_tiers.block_bytes", "kv_tiers.state_bytes", "kv_tiers.disk.refusal"}
    others.add("stage_problem")  # /ready has it
    others |= {"prefix_cache", "kv_dtype", "block_tokens"}  # labels of vllm:cache_config_info
    assert leaves(EngineMetrics, metrics()) <= {metric.source for metric in METRICS} | others


def test_a_disk_tier_that_takes_no_writes_is_a_zero() -> None:
    for refusal, sample in (
        (None, "ingot_kv_disk_takes_writes 1"),
        ("it is read-only", "ingot_kv_disk_takes_writes 0"),
    ):
        store = FakeStore()
        store.refusal = refusal
        with tiered_engine(store=store) as engine:
            found = engine.metrics()
        assert found.kv_tiers
        assert found.kv_tiers.disk
        assert found.kv_tiers.disk.refusal == refusal
        assert sample in prometheus_text(found).splitlines()


def test_an_engine_without_a_disk_tier_has_no_metrics_of_one() -> None:
    with tiered_engine() as engine:
        assert "kv_disk_takes_writes" not in prometheus_text(engine.metrics())


def table_rows() -> list[list[str]]:
    """Return the cells of the page's table."""
    return [
        [
            f"`{metric.name}`" + (f" by `{metric.label}`" if metric.label else ""),
            metric.kind,
            metric.unit,
            "yes" if metric.in_vllm else "",
            f"`{metric.source}`",
            metric.help,
        ]
        for metric in METRICS
    ]


def test_the_page_lists_exactly_the_metrics_of_the_table() -> None:
    rows = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert [[cell.strip() for cell in row] for row in rows] == table_rows(), "run python -m tests.write_metric_tables"
