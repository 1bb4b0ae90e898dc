"""/metrics is read by Prometheus's own parser, and has every metric of the engines and of the server."""

from types import SimpleNamespace

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ingot.errors import IngotError
from ingot.runtime.engine.engine import Engine
from ingot.runtime.engine.metrics_export import METRICS
from tests.data_paths import ROOT
from tests.runtime.engines import demo_tokenizer, text_engine
from tests.runtime.server.servers import Running, running
from tests.simulators.fake_executor import FakeExecutor

SERVER_PAGE = ROOT / "docs" / "serve.md"


def test_every_metric_has_its_value_and_its_model() -> None:
    with running({"one": text_engine(), "two": text_engine()}) as server:
        with server.client() as client:
            client.completions.create(model="two", prompt="def read", max_tokens=7, extra_body={"ignore_eos": True})
        httpx2.get(f"{server.url}/nowhere")
        httpx2.get(f"{server.url}/v1/models/two")
        httpx2.get(f"{server.url}/v1/responses/resp_none")
        text = httpx2.get(f"{server.url}/metrics").text
        metrics = server.model("two").engine.metrics()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    for metric in METRICS:
        if metric.read(metrics) is not None:
            assert families[metric.family_name].documentation == metric.help
    of_two = frozenset({("model_name", "two")})
    assert samples["vllm:generation_tokens_total", of_two] == metrics.output_tokens == 7 + 4
    assert samples["vllm:time_to_first_token_seconds_count", of_two] == 2
    assert samples["vllm:request_success_total", of_two | {("finished_reason", "length")}] == 2
    assert samples["ingot_kv_pool_bytes", of_two] == metrics.blocks_total * metrics.block_bytes > 0
    assert samples["ingot_steps_total", of_two] == metrics.num_steps
    assert samples["ingot_encode_seconds_count", of_two] == 1
    assert samples["ingot_open_requests", of_two] == 0
    assert samples["ingot_ready", frozenset()] == 1
    assert samples["ingot_http_answers_total", frozenset({("path", "/v1/completions"), ("status", "200")})] == 1
    for path, status in [("other", "404"), ("/v1/models/{name}", "200"), ("/v1/responses/{response_id}", "404")]:
        assert samples["ingot_http_answers_total", frozenset({("path", path), ("status", status)})] == 1


def samples_of(server: Running) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = httpx2.get(f"{server.url}/metrics").text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_reloads_and_restarts_are_counted_and_the_artifact_is_named() -> None:
    def load(name: str, is_new: bool) -> Engine:
        raise IngotError("gate perplexity_ratio failed")

    of_fake = frozenset({("model_name", "fake")})
    with running(text_engine(), reload=load) as server:
        replacements = server.service.replacements
        assert replacements
        manifest = SimpleNamespace(identity="ab" * 32, program_bytes=4_132_424)
        server.model().artifact = SimpleNamespace(manifest=manifest)  # type: ignore[assignment]
        before = samples_of(server)
        server.loop.call_soon_threadsafe(replacements.reload_all)
        server.until(lambda: replacements.last_reload("fake").state == "refused")
        after = samples_of(server)
    refused = "ingot_reloads_total", of_fake | {("outcome", "refused")}
    assert (before[refused], after[refused]) == (0, 1)
    for outcome in ("kept", "given_up"):
        assert after["ingot_reloads_total", of_fake | {("outcome", outcome)}] == 0
    assert after["ingot_engine_restarts_total", of_fake] == 0
    assert after["ingot_artifact_info", of_fake | {("identity", "ab" * 32)}] == 1
    assert after["ingot_program_bytes", of_fake] == 4_132_424


def test_vllm_s_description_of_the_cache_is_that_of_the_engine() -> None:
    fake = FakeExecutor(vocab_size=demo_tokenizer().vocab_size, block_tokens=4, num_blocks=40)
    with running(Engine(fake, demo_tokenizer(), prefix_cache=False)) as server:
        (labels,) = (dict(labels) for name, labels in samples_of(server) if name == "vllm:cache_config_info")
    assert labels == {
        "model_name": "fake",
        "engine": "0",
        "block_size": "4",
        "cache_dtype": "float32",
        "enable_prefix_caching": "False",
        "kv_cache_memory_bytes": labels["kv_cache_memory_bytes"],
        "num_gpu_blocks": "40",
        "num_cpu_blocks": "0",
    }
    assert int(labels["kv_cache_memory_bytes"]) > 0


def server_rows() -> list[list[str]]:
    """Return the cells of the page's table of an engine's metrics."""
    return [
        [
            "yes" if metric.in_vllm else "",
            f"`{metric.family_name}{'_total' * (metric.kind == 'counter')}`"
            + (f" by `{metric.label}`" if metric.label else ""),
            metric.help,
        ]
        for metric in METRICS
    ]


def test_the_document_has_the_rows_of_the_table() -> None:
    text = SERVER_PAGE.read_text(encoding="utf-8")
    for row in server_rows():
        assert f"| {' | '.join(row)} |\n" in text, "run python -m tests.write_metric_tables"


def test_the_document_maps_every_name() -> None:
    text = SERVER_PAGE.read_text(encoding="utf-8")
    for metric in METRICS:
        suffix = "_total" if metric.kind == "counter" else ""
        assert f"`{metric.family_name}{suffix}`" in text, metric.name


def test_a_processor_quota_is_reported_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.runtime.server.watch.prometheus.throttling", lambda: (40, 10))
    with running(text_engine()) as server:
        lines = httpx2.get(f"{server.url}/metrics").text.splitlines()
        assert {"ingot_quota_periods_total 40.0", "ingot_throttled_periods_total 10.0"} <= {*lines}
        monkeypatch.setattr("ingot.runtime.server.watch.prometheus.throttling", lambda: None)
        assert "ingot_quota_periods" not in httpx2.get(f"{server.url}/metrics").text
