"""Options of an engine: the size of the KV pool, and limits that the artifact or the caller sets."""

import asyncio
import inspect
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ingot.artifact import Artifact, KVGeometry
from ingot.artifact.serving import ServingOptions
from ingot.errors import EngineError, UsageError
from ingot.runtime import AsyncEngine, Engine
from ingot.runtime.options import EngineOptions, free_memory_bytes, resolve_pool_size, serving_defaults
from ingot.settings import cache_dir
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL
from tests.each_case import each_case
from tests.simulators.fake_executor import FakeExecutor

WHOLE = "a whole number(, at least 1|)( of bytes|)( from [01] to [0-9]+|)(, or None for the default|, or 0 for none|$)"
OTHERS = {
    "adapters",
    "chat_template",
    "prefix_cache",
    "reject_late",
    "batching",
    "batch_wait_seconds",
    "speculation",
    "kv_disk_path",
    "kv_policy",
    "kv_restore",
    "kv_bytes",
    "kv_offload",
    "kv_offload_to",
    "kv_offload_path",
    "cpu_affinity",
    "weights",
    "expert_parallel",
}


@each_case("name", [each.name for each in fields(EngineOptions) if each.name not in OTHERS])
def test_every_number_must_be_a_whole_number(name: str) -> None:
    for value in ("4", 4.0, True):
        number: dict[str, Any] = {name: value}
        with pytest.raises(UsageError, match=f"{name} is {value!r}; it must be {WHOLE}"):
            EngineOptions(**number)


@each_case(
    ("options", "message"),
    [
        ({"kv_host_bytes": -1}, "kv_host_bytes is -1; it must be a whole number of bytes, or 0 for none, and at most"),
        ({"kv_host_bytes": 2**50 + 1}, "kv_host_bytes is 1125899906842625; it must be .* at most 1125899906842624"),
        ({"kv_disk_path": "kv", "kv_disk_bytes": 2**70}, "kv_disk_bytes is 1180591620717411303424; it must be"),
        ({"kv_host_bytes": "4GiB"}, "kv_host_bytes is '4GiB'; it must be a whole number of bytes, or 0 for none"),
        ({"kv_disk_path": "", "kv_disk_bytes": 5}, "kv_disk_path is ''; it must be the path of a folder"),
        ({"kv_disk_path": "a\0b", "kv_disk_bytes": 5}, "kv_disk_path is 'a.*b'; it must be the path of a folder"),
        ({"kv_host_bytes": None}, "kv_host_bytes is None; it must be"),
        ({"kv_disk_path": "kv"}, "kv_disk_path is 'kv' and kv_disk_bytes is 0; .* give both or neither"),
        ({"kv_disk_bytes": 5}, "kv_disk_path is None and kv_disk_bytes is 5; .* give both or neither"),
        ({"kv_disk_path": 5, "kv_disk_bytes": 5}, "kv_disk_path is 5; it must be the path of a folder"),
        ({"kv_policy": "lro"}, "kv_policy is 'lro'; it must be one of lru-uses, lru, arc"),
        ({"kv_restore": "never"}, "kv_restore is 'never'; it must be one of auto, always"),
        ({"kv_bytes": 0}, "kv_bytes is 0; it must be a number of bytes from 1 to .*, or a share of the free memory"),
        ({"kv_bytes": "96%"}, "kv_bytes is '96%'; it must be .* such as 70%, up to 95%"),
        ({"kv_bytes": "much"}, "kv_bytes is 'much'; it must be a number of bytes"),
        ({"kv_bytes": True}, "kv_bytes is True; it must be a number of bytes"),
        ({"kv_offload": "0%"}, "kv_offload is '0%'; it must be auto, off, a number of bytes .* up to 10000%"),
        ({"kv_offload": "10001%"}, "kv_offload is '10001%'; it must be auto, off"),
        ({"kv_offload": "-5%"}, "kv_offload is '-5%'; it must be auto, off"),
        ({"kv_offload": "on"}, "kv_offload is 'on'; it must be auto, off"),
        ({"kv_offload": 0}, "kv_offload is 0; it must be auto, off"),
        ({"kv_offload": None}, "kv_offload is None; it must be auto, off"),
        ({"kv_offload_to": "tape"}, "kv_offload_to is 'tape'; it must be one of file, memory"),
        ({"kv_offload_path": ""}, "kv_offload_path is ''; it must be the path of a folder"),
        ({"weights": "huge"}, "weights is 'huge'; it must be one of auto, mapped, copied"),
    ],
)
def test_options_of_tiers_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EngineOptions(**options)


def test_sizes_of_the_pool_are_bytes_or_shares() -> None:
    sizes = EngineOptions(kv_bytes="1.5 GiB", kv_offload="2GiB")
    assert (sizes.kv_bytes, sizes.kv_offload) == (3 << 29, 2 << 30)
    shares = EngineOptions(kv_bytes="70%", kv_offload="250.5 %")
    assert (shares.kv_bytes, shares.kv_offload) == ("70%", "250.5 %")


@pytest.mark.parametrize("given", ["0,2-3", [0, 2, 3], (0, 2, 3)])
def test_cores_are_numbers_of_as_many_threads(given: Any) -> None:
    assert EngineOptions(cpu_affinity=given).cpu_affinity == (0, 2, 3)
    assert EngineOptions(cpu_affinity=given, num_threads=3).cpu_affinity == (0, 2, 3)
    with pytest.raises(
        UsageError, match=r"num_threads is 2 and cpu_affinity names 3 cores; .* or leave out num_threads"
    ):
        EngineOptions(cpu_affinity=given, num_threads=2)


@each_case("given", ["", [], "a", [-1], [1.5], 2.0])
def test_other_cores_are_refused(given: Any) -> None:
    with pytest.raises(UsageError, match=r"cpu_affinity: .* names no cores; write numbers from 0 to 8191, such as"):
        EngineOptions(cpu_affinity=given)


def test_cores_of_the_artifact_give_way_to_threads_of_the_caller(
    build_unmeasured: BuildArtifact, two_layers: Path
) -> None:
    pinned = build_unmeasured("fp32-cpu", two_layers, "cpu.engine=native", "serving={cpu_affinity: 8000}")
    assert resolved(pinned).cpu_affinity == (8000,)
    assert resolved(pinned, num_threads=1).cpu_affinity is None
    assert resolved(pinned, cpu_affinity=None).cpu_affinity is None
    with pytest.raises(EngineError, match="cpu_affinity is 8000; this process may not run on 8000"):
        Engine.load(pinned)


@pytest.mark.parametrize("name", ["max_requests", "max_waiting_tokens", "max_prompt_chars", "priority_aging_tokens"])
def test_limits_of_requests_are_at_least_one(name: str) -> None:
    limits: dict[str, Any] = {name: 0}
    with pytest.raises(UsageError, match=f"{name} is 0; it must be at least 1, or None"):
        EngineOptions(**limits)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batching": "none"}, "batching is 'none'; it must be one of continuous, static, dynamic"),
        ({"batch_wait_seconds": -1}, "batch_wait_seconds is -1; it must be a number from 0 to 60"),
        ({"batch_wait_seconds": "1"}, "batch_wait_seconds is '1'; it must be"),
        ({"prefix_cache": "no"}, "prefix_cache is 'no'; it must be True or False"),
        ({"reject_late": 1}, "reject_late is 1; it must be True or False"),
        ({"expert_parallel": "yes"}, "expert_parallel is 'yes'; it must be True or False"),
    ],
)
def test_options_of_scheduling_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EngineOptions(**values)


def test_the_pool_is_sized_by_options_or_by_memory_and_context(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = FakeExecutor(context_tokens=1000).model
    kv = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=8)
    assert resolve_pool_size(model, kv, kv_blocks=7, max_sequences=4).num_blocks == 7
    assert resolve_pool_size(model, kv, kv_bytes=10 * kv.block_bytes + 5, max_sequences=4).num_blocks == 10
    assert resolve_pool_size(model, kv, max_sequences=4, free_bytes=2**40).num_blocks == 4 * 63
    half = resolve_pool_size(model, kv, kv_bytes="50%", max_sequences=4, free_bytes=40 * kv.block_bytes)
    assert (half.num_blocks, half.reason) == (20, "kv_bytes=50% of 163.8 kB free memory")
    with pytest.raises(
        UsageError, match=r"kv_bytes is 1% of 4.1 kB free memory, which is 40 B; one block takes 4.1 kB"
    ):
        resolve_pool_size(model, kv, kv_bytes="1%", max_sequences=4, free_bytes=kv.block_bytes)
    scarce = resolve_pool_size(model, kv, max_sequences=4, free_bytes=40 * kv.block_bytes)
    assert scarce.num_blocks == 20
    assert "long requests will be refused" in scarce.reason
    assert "KV pool: 20 blocks of 16 tokens" in caplog.text
    tight = resolve_pool_size(model, kv, max_sequences=4, free_bytes=200 * kv.block_bytes)
    assert tight.num_blocks == 63, "one whole context is worth more than a quarter of the memory"
    assert resolve_pool_size(model, kv, max_sequences=4, free_bytes=400 * kv.block_bytes).num_blocks == 100


def test_a_control_group_limits_the_memory_but_its_page_cache_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    (tmp_path / "memory.stat").write_text("anon 1000000\nfile 3000000\n")
    assert free_memory_bytes(tmp_path) == 4000000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory_bytes(tmp_path) > 4000000
    assert free_memory_bytes(tmp_path / "none") > 0
    membership, older = tmp_path / "membership", tmp_path / "memory" / "a" / "b"
    membership.write_text("12:cpu,cpuacct:/\n4:memory:/a/b\n0::/\n")
    older.mkdir(parents=True)
    (older / "memory.limit_in_bytes").write_text("3000000\n")
    (older / "memory.usage_in_bytes").write_text("2500000\n")
    (older / "memory.stat").write_text("cache 0\ntotal_cache 1000000\n")
    assert free_memory_bytes(tmp_path, membership) == 1500000
    (older / "memory.usage_in_bytes").write_text("9000000\n")
    assert free_memory_bytes(tmp_path, membership) == 0


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kv_blocks": 1, "kv_bytes": 1}, "give one of them"),
        ({"kv_blocks": 0}, "at least 1 block"),
        ({"kv_bytes": 10}, "one block takes 128 bytes"),
    ],
)
def test_an_impossible_pool_size_is_refused(sizes: dict[str, int], message: str) -> None:
    executor = FakeExecutor()
    with pytest.raises(UsageError, match=message):
        resolve_pool_size(executor.model, executor.kv_geometry, max_sequences=1, **sizes)


def test_max_batch_tokens_comes_from_the_recipe_unless_the_caller_sets_it(
    build_unmeasured: BuildArtifact,
) -> None:
    artifact = build_unmeasured("fp32-cpu", DEMO_MODEL, "engine.max_batch_tokens=96")
    with Engine.load(artifact, kv_blocks=16) as engine:
        assert engine.max_batch_tokens == 96
    with Engine.load(artifact, kv_blocks=16, max_batch_tokens=32) as engine:
        assert engine.max_batch_tokens == 32


@pytest.fixture
def served(build_unmeasured: BuildArtifact, two_layers: Path) -> Artifact:
    """An artifact with defaults for all options of `serving`."""
    sizes = "kv_bytes: 4MB, kv_host_bytes: 8MB, kv_disk_bytes: 16MB"
    return build_unmeasured(
        "fp32-cpu",
        two_layers,
        f"serving={{max_batch_tokens: 96, max_sequences: 5, {sizes}, kv_policy: arc, kv_restore: always}}",
    )


def resolved(artifact: Artifact, **given: Any) -> EngineOptions:
    return EngineOptions(**(serving_defaults(artifact.manifest, given) | given))


def test_the_artifact_sets_what_the_caller_leaves_out(served: Artifact, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert resolved(served) == EngineOptions(
        max_batch_tokens=96,
        max_sequences=5,
        kv_bytes=4_000_000,
        kv_host_bytes=8_000_000,
        kv_disk_bytes=16_000_000,
        kv_disk_path=cache_dir() / "kv" / "fp32-cpu",
        kv_policy="arc",
        kv_restore="always",
    )
    assert "options set by the artifact: max_batch_tokens=96, max_sequences=5, kv_bytes=4000000" in caplog.text


def test_any_value_of_the_caller_counts(served: Artifact, tmp_path: Path) -> None:
    off = resolved(served, max_sequences=None, kv_bytes=None, kv_host_bytes=0, kv_disk_bytes=0, kv_policy="lru")
    assert off == EngineOptions(max_batch_tokens=96, kv_policy="lru", kv_restore="always")
    assert resolved(served, kv_blocks=7).kv_bytes is None
    assert resolved(served, kv_disk_path=None).kv_disk_bytes == 0
    elsewhere = resolved(served, kv_disk_path=tmp_path)
    assert (elsewhere.kv_disk_path, elsewhere.kv_disk_bytes) == (tmp_path, 16_000_000)
    assert resolved(served, **vars(EngineOptions())) == EngineOptions(), "all given: the artifact sets none"


def test_a_disk_tier_without_a_folder_is_in_the_cache(build_unmeasured: BuildArtifact, two_layers: Path) -> None:
    artifact = build_unmeasured("fp32-cpu", two_layers)
    assert serving_defaults(artifact.manifest, {}) == {}
    assert resolved(artifact, kv_disk_bytes=9).kv_disk_path == cache_dir() / "kv" / "fp32-cpu"
    with pytest.raises(UsageError, match=r"kv_disk_path is 'kv' and kv_disk_bytes is 0; .* give both or neither"):
        resolved(artifact, kv_disk_path="kv")


def test_an_engine_serves_as_its_artifact_says(
    served: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))
    prompt = list(range(1, 60))
    with Engine.load(served) as engine:
        first = engine.generate(prompt)
        assert engine.max_batch_tokens == 96
        assert engine.metrics().blocks_total == 4_000_000 // served.manifest.kv.block_bytes
        assert engine.metrics().kv_tiers is not None
    assert list((tmp_path / "kv" / "fp32-cpu").iterdir()), "the blocks are in the cache folder"
    with Engine.load(served, kv_host_bytes=0, kv_disk_path=None) as engine:
        assert engine.generate(prompt).token_ids == first.token_ids
        assert engine.metrics().kv_tiers is None


def test_an_async_engine_serves_as_its_artifact_says(served: Artifact, tmp_path: Path) -> None:
    async def load_both() -> None:
        async with AsyncEngine.load(served, kv_disk_path=tmp_path / "kv") as engine:
            assert engine.engine.max_batch_tokens == 96
            assert engine.metrics().kv_tiers is not None
        async with AsyncEngine.load(served, max_batch_tokens=32, kv_host_bytes=0, kv_disk_bytes=0) as engine:
            assert engine.engine.max_batch_tokens == 32
            assert engine.metrics().kv_tiers is None

    asyncio.run(load_both())


def test_a_build_serves_no_machine_but_its_own(build_unmeasured: BuildArtifact, two_layers: Path) -> None:
    """A pool, tiers and a disk that no machine of ours has are sealed: the build loads the artifact without them."""
    huge = build_unmeasured("fp32-cpu", two_layers, "serving={kv_bytes: 900TiB, kv_host_bytes: 900TiB}")
    assert huge.manifest.serving == ServingOptions(kv_bytes=900 << 40, kv_host_bytes=900 << 40)
    with pytest.raises(EngineError, match="kv_bytes"):
        Engine.load(huge)


@pytest.mark.parametrize("engine", [Engine, AsyncEngine])
def test_load_takes_the_fields_of_engine_options_as_keywords(engine: type[Engine | AsyncEngine]) -> None:
    assert list(inspect.signature(engine.load).parameters) == [
        "artifact",
        *(each.name for each in fields(EngineOptions)),
    ]
    with pytest.raises(UsageError, match=r"unknown option 'kv_block'\. Did you mean 'kv_blocks'"):
        engine.load("artifact", kv_block=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("limit", ["max_batch_tokens", "max_sequences"])
@pytest.mark.parametrize("value", [0, 10**12])
def test_limits_out_of_range_are_refused_before_anything_is_loaded(limit: str, value: int) -> None:
    with pytest.raises(UsageError, match=f"{limit} is {value}; it must be from 1 to 1048576"):
        Engine.load("no such artifact", **{limit: value})  # type: ignore[arg-type]  # the limits are integers
