"""A conversation longer than the fast part of the KV pool gets the bits that it gets from a pool that holds it."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.cli.main import run
from ingot.errors import EngineError, RequestError, UsageError
from ingot.runtime import Completion, Engine, SamplingParams
from tests.cli.refusals import assert_refused
from tests.conftest import BuildArtifact
from tests.e2e.test_batch_invariance import assert_equal_bits
from tests.e2e.test_kv_tiers import prompts, served

FAST, SLOW_BYTES = 20, 64 << 20
LONG = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module", params=["fp32-cpu", "int4-kv8-cpu"])
def artifact(request: pytest.FixtureRequest, build_unmeasured: BuildArtifact, two_layers: Path) -> Artifact:
    return build_unmeasured(request.param, two_layers)


def expected(artifact: Artifact, requests: list[list[int]], params: SamplingParams) -> list[Completion]:
    """Answers from a pool that holds each request alone."""
    with Engine.load(artifact, kv_blocks=80, kv_offload="off", prefix_cache=False) as engine:
        return [engine.generate(prompt, params, keep_logits=True) for prompt in requests]


@pytest.mark.parametrize("place", ["file", "memory"])
@pytest.mark.parametrize("times", [3, 16])
def test_a_request_of_many_times_the_fast_part_gets_the_same_bits(
    artifact: Artifact, tmp_path: Path, times: int, place: str
) -> None:
    request = prompts(artifact, 1, 700)
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    fast = 1000 // 16 // times
    options: dict[str, Any] = {"kv_blocks": fast, "kv_offload": SLOW_BYTES, "kv_offload_to": place}
    with Engine.load(artifact, **options, kv_offload_path=tmp_path) as engine:
        assert not [*tmp_path.iterdir()], "the file has no name"
        found = [engine.generate(request[0], params, keep_logits=True)]
        metrics = engine.metrics()
    assert metrics.blocks_slow == SLOW_BYTES // artifact.manifest.kv.block_bytes
    assert metrics.blocks_total == fast + metrics.blocks_slow
    assert_equal_bits(found, expected(artifact, request, params))


def test_four_at_once_with_hits_drafts_and_preemption_get_the_same_bits(artifact: Artifact) -> None:
    requests = [prompt[:size] for prompt, size in zip(prompts(artifact, 4, 600), (600, 200, 280, 90), strict=True)]
    with Engine.load(artifact, kv_blocks=FAST, kv_offload="400%", speculation="lookup", num_threads=1) as engine:
        first = served(engine, requests, LONG)
        again = served(engine, requests, LONG)
        engine.check()
        metrics = engine.metrics()
    right = expected(artifact, requests, LONG)
    assert_equal_bits(first, right)
    assert_equal_bits(again, right)
    assert metrics.prefix_hit_tokens > 500, "idle blocks moved down instead of being lost"
    assert metrics.blocks_moved["down"] > 0


def test_blocks_of_both_parts_come_back_from_host_memory_and_disk(artifact: Artifact, tmp_path: Path) -> None:
    requests = prompts(artifact, 3, 500)
    options: dict[str, Any] = {"kv_blocks": FAST, "kv_offload": "100%", "kv_restore": "always"}
    tiers: dict[str, Any] = {"kv_host_bytes": 1 << 26, "kv_disk_path": tmp_path / "kv", "kv_disk_bytes": 1 << 28}
    with Engine.load(artifact, **options, **tiers) as engine:
        served(engine, requests, LONG)
        found = served(engine, requests, LONG)
        assert engine.flush_kv()
        engine.check()
        assert engine.metrics().prefix_hit_tokens_by_tier["host"] > 0
    with Engine.load(artifact, **options, **tiers) as engine:
        restarted = served(engine, requests, LONG)
        assert engine.metrics().prefix_hit_tokens_by_tier["disk"] > 0
    right = expected(artifact, requests, LONG)
    assert_equal_bits(found, right)
    assert_equal_bits(restarted, right)


def test_prompt_logits_may_take_the_slow_part(artifact: Artifact) -> None:
    request = prompts(artifact, 1, 700)[0]
    small_options: dict[str, Any] = {"kv_blocks": FAST, "kv_offload": "200%"}
    with Engine.load(artifact, kv_blocks=80) as large, Engine.load(artifact, **small_options) as small:
        right, found = large.prompt_logits(request), small.prompt_logits(request)
        assert np.array_equal(right.view(np.int32), found.view(np.int32))
        small.check()


def test_without_a_slow_part_a_request_that_may_outgrow_the_pool_is_refused(
    artifact: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    request, params = prompts(artifact, 1, 400)[0], SamplingParams(max_tokens=106)
    with Engine.load(artifact, kv_blocks=FAST) as engine:
        with pytest.raises(RequestError, match=r"may grow to 506 tokens, which takes 32 KV blocks .*the pool has 20"):
            engine.generate(request, params)
    assert not [text for text in caplog.messages if "slow" in text]
    with Engine.load(artifact, kv_blocks=FAST, kv_offload="100%") as engine:
        assert engine.generate(request, params).error is None
    assert len([text for text in caplog.messages if "20 slow blocks" in text]) == 1


def test_what_cannot_be_had_is_one_error(
    artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    too_many = 1 << 49
    with pytest.raises(EngineError, match=rf"slow part of the KV pool needs 562.9 TB in .*{tmp_path.name}.* are free"):
        Engine.load(artifact, kv_blocks=FAST, kv_offload=too_many, kv_offload_path=tmp_path)
    with pytest.raises(EngineError, match=r"needs 562.9 TB, and this machine has .*; lower kv_offload"):
        Engine.load(artifact, kv_blocks=FAST, kv_offload=too_many, kv_offload_to="memory")
    with pytest.raises(UsageError, match=r"kv_offload_path .*gone is not a folder; make it, or name another"):
        Engine.load(artifact, kv_blocks=FAST, kv_offload_path=tmp_path / "gone")
    code = run(["run", str(artifact.path), "x", "--set", "kv_offload=20000%"])
    assert_refused(
        code,
        capsys.readouterr().err.splitlines()[-1],
        "kv_offload is '20000%'; it must be auto, off",
        expected_code=code,
    )
