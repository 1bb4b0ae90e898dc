"""Restored keys and values give the same bits: from host memory, from disk after a restart, after a preemption."""

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.runtime import Completion, Engine, SamplingParams
from tests.conftest import BuildArtifact
from tests.e2e.test_batch_invariance import assert_equal_bits

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


def prompts(artifact: Artifact, count: int, num_tokens: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    tokens: list[list[int]] = rng.integers(3, artifact.manifest.model.vocab_size, (count, num_tokens)).tolist()
    return tokens


def served(engine: Engine, requests: list[list[int]], params: SamplingParams) -> list[Completion]:
    """Complete prompts together. Blocks are saved before every other step: one that needs their place does not wait."""
    ids = [engine.add(prompt, params, keep_logits=True) for prompt in requests]
    results: dict[int, Completion] = {}
    for number in count():
        if not engine.has_unfinished():
            return [results[request_id] for request_id in ids]
        if number % 2:
            engine.flush_kv()
        results |= {output.request_id: output.result for output in engine.step() if output.result}
    raise AssertionError


@pytest.mark.parametrize("recipe", ["fp32-cpu", "int4-kv8-cpu"])
def test_a_prefix_from_host_memory_or_disk_gives_the_same_bits_as_a_computed_one(
    build_unmeasured: BuildArtifact, two_layers: Path, tmp_path: Path, recipe: str
) -> None:
    artifact = build_unmeasured(recipe, two_layers)
    first, *others = prompts(artifact, 4, 150)
    with Engine.load(artifact, kv_blocks=12, prefix_cache=False) as engine:
        cold = engine.generate(first, PARAMS, keep_logits=True)
    disk: dict[str, Any] = {"kv_disk_path": tmp_path / "kv", "kv_disk_bytes": 1 << 30}
    with Engine.load(artifact, kv_blocks=12, kv_host_bytes=1 << 26, kv_restore="always", **disk) as engine:
        found = [engine.generate(first, PARAMS, keep_logits=True)]
        assert engine.flush_kv()
        for prompt in others:
            engine.generate(prompt, PARAMS)
        found.append(engine.generate(first, PARAMS, keep_logits=True))
        engine.check()
    with Engine.load(artifact, kv_blocks=12, kv_restore="always", **disk) as engine:
        found.append(engine.generate(first, PARAMS, keep_logits=True))
    assert [each.cached_tokens_by_tier for each in found] == [(0, 0, 0), (0, 144, 0), (0, 0, 144)]
    assert_equal_bits(found, [cold] * 3)


def test_preempted_requests_resume_from_host_memory_with_the_same_bits(
    build_unmeasured: BuildArtifact, two_layers: Path
) -> None:
    artifact = build_unmeasured("fp32-cpu", two_layers)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    requests = prompts(artifact, 6, 60)
    alone: list[Completion] = []
    with Engine.load(artifact, kv_blocks=12, prefix_cache=False) as engine:
        alone = [engine.generate(prompt, params, keep_logits=True) for prompt in requests]
    with Engine.load(artifact, kv_blocks=24, kv_host_bytes=1 << 26, kv_restore="always") as engine:
        together = served(engine, requests, params)
        metrics = engine.metrics()
        engine.check()
    assert_equal_bits(together, alone)
    assert metrics.num_preemptions > 0
    assert metrics.kv_tiers is not None
    assert metrics.kv_tiers.restored_blocks > 0


def test_blocks_of_other_weights_are_not_found(
    build_unmeasured: BuildArtifact, two_layers: Path, tmp_path: Path
) -> None:
    """Both artifacts have the same tokens, layout and folder."""
    disk: dict[str, Any] = {"kv_disk_path": tmp_path / "kv", "kv_disk_bytes": 1 << 30}
    for recipe, overrides in (("fp32-cpu", ()), ("int8-cpu", ("passes.quantize-kv-cache.precision=float32",))):
        artifact = build_unmeasured(recipe, two_layers, *overrides)
        (prompt,) = prompts(artifact, 1, 100)
        with Engine.load(artifact, kv_blocks=12, **disk) as engine:
            assert engine.generate(prompt, PARAMS).cached_tokens == 0
