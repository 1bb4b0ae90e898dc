"""Engines with tiers on the CUDA executor: tokens of plain engines, whatever the order in which the device works."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from ingot.artifact import Artifact
from ingot.errors import EngineError
from ingot.runtime import Completion, Engine, SamplingParams
from ingot.runtime.clock import SYSTEM_CLOCK, Clock
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.cuda.host_blocks import BlockTransfer
from ingot.runtime.engine.open_tiers import OpenTiers, open_tiers
from ingot.runtime.executors import Executor, OffloadingExecutor
from ingot.runtime.kv.blocks import BlockManager
from ingot.runtime.kv.cost_model import CostModel
from ingot.runtime.kv.tiers import TierManager
from ingot.runtime.options import EngineOptions
from tests.runtime.cuda.batches import token_ids
from tests.simulators.fake_host_blocks import SlowWorkers, Transfers
from tests.simulators.interpreted_device import InterpretedDevice

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
PROMPTS: list[list[int]] = [token_ids(count, seed).tolist() for seed, count in enumerate((11, 9, 10, 13))]
SAMPLED = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.9, seed=3)


def polled_tiers(
    executor: Executor, blocks: BlockManager, root: bytes, *, clock: Clock = SYSTEM_CLOCK, num_slots: int = 16
) -> TierManager:
    """Tiers without threads: transfers are polled by steps alone."""
    assert isinstance(executor, CudaExecutor)
    return TierManager(
        blocks,
        executor.host_blocks(num_slots),
        CostModel(blocks.block_tokens),
        block_bytes=executor.kv_geometry.block_bytes,
        threads=lambda name, number: SlowWorkers(Transfers()),
        clock=clock,
    )


def engine_of(
    launches: Artifact,
    device: InterpretedDevice,
    *,
    kv_blocks: int = 6,
    tiers: OpenTiers | None = polled_tiers,
) -> Engine:
    executor = CudaExecutor(launches, device, EngineOptions(kv_blocks=kv_blocks))
    return Engine(executor, max_sequences=executor.max_sequences, tiers=tiers)


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]


@pytest.fixture(scope="module")
def wanted(launches: Artifact) -> list[list[int]]:
    """Tokens of PROMPTS without tiers."""
    with engine_of(launches, InterpretedDevice(), kv_blocks=40, tiers=None) as engine:
        return tokens([engine.generate(prompt, PARAMS) for prompt in PROMPTS])


DEVICES: dict[str, Callable[[], InterpretedDevice]] = {
    "late": InterpretedDevice,
    "hasty": lambda: InterpretedDevice(hasty=True),
    "random": lambda: InterpretedDevice(rng=random.Random(0)),
    "random again": lambda: InterpretedDevice(rng=random.Random(1)),
}


@pytest.mark.parametrize("make_device", DEVICES.values(), ids=list(DEVICES))
def test_evicted_prompts_are_restored_from_host_memory_with_the_same_tokens(
    launches: Artifact, wanted: list[list[int]], make_device: Callable[[], InterpretedDevice]
) -> None:
    with engine_of(launches, make_device()) as engine:
        for _ in range(2):
            assert tokens([engine.generate(prompt, PARAMS) for prompt in PROMPTS]) == wanted
            engine.check()
        metrics = engine.metrics().kv_tiers
        assert metrics is not None
        assert metrics.saved_blocks >= 8
        assert metrics.restored_blocks >= 4
        assert metrics.failed_transfers == 0


@pytest.mark.parametrize("seed", range(2))
def test_preempted_requests_swap_their_blocks_and_have_the_same_tokens(launches: Artifact, seed: int) -> None:
    params = [SamplingParams(max_tokens=most, ignore_eos=True) for most in (16, 9)]  # the first takes the whole pool
    with engine_of(launches, InterpretedDevice(), kv_blocks=40, tiers=None) as engine:
        plain = tokens(engine.generate(PROMPTS[:2], params))
    with engine_of(launches, InterpretedDevice(rng=random.Random(seed)), kv_blocks=7) as engine:
        assert tokens(engine.generate(PROMPTS[:2], params)) == plain
        metrics = engine.metrics()
        assert metrics.num_preemptions > 0
        assert metrics.kv_tiers is not None
        assert metrics.kv_tiers.restored_blocks > 0
        engine.check()


def test_an_engine_that_uses_blocks_before_they_have_arrived_is_found(
    launches: Artifact, wanted: list[list[int]]
) -> None:
    """The tests above can fail: on this device a copy runs only when it is polled."""
    with patch.object(BlockTransfer, "done", property(lambda self: True)):
        with engine_of(launches, InterpretedDevice()) as engine:
            found = [engine.generate(prompt, PARAMS) for prompt in (*PROMPTS, *PROMPTS)]
    assert tokens(found) != [*wanted, *wanted]


def test_a_prefix_is_restored_from_a_folder_by_the_next_engine(
    launches: Artifact, wanted: list[list[int]], tmp_path: Path
) -> None:
    options = EngineOptions(kv_disk_path=tmp_path / "kv", kv_disk_bytes=1 << 20, kv_host_bytes=1 << 20)
    for cached in (0, 8):
        with engine_of(launches, InterpretedDevice(), tiers=partial(open_tiers, options=options)) as engine:
            found = engine.generate(PROMPTS[0], PARAMS)
            assert list(found.token_ids) == wanted[0]
            assert found.cached_tokens_by_tier == (0, 0, cached)
            engine.check()


def test_prompts_of_queued_steps_are_measured_so_that_restoring_is_compared_with_computing(launches: Artifact) -> None:
    options = EngineOptions(kv_host_bytes=1 << 20)
    with engine_of(launches, InterpretedDevice(), tiers=partial(open_tiers, options=options)) as engine:
        tiers = engine._tiers
        assert tiers is not None
        assert tiers.costs.block_seconds("host") > 0
        assert tiers.costs.token_seconds(8) is None
        engine.generate(PROMPTS[0], PARAMS)
        assert (tiers.costs.token_seconds(8) or 0) > 0


def test_a_device_that_can_no_longer_copy_ends_the_engine_with_its_reason(launches: Artifact) -> None:
    with engine_of(launches, InterpretedDevice()) as engine:
        engine.generate(PROMPTS[0], PARAMS)
        with patch.object(InterpretedDevice, "reached", side_effect=EngineError("queued work: CUDA_ERROR_UNKNOWN")):
            with pytest.raises(EngineError, match=r"CUDA_ERROR_UNKNOWN"):
                for prompt in PROMPTS:
                    engine.generate(prompt, PARAMS)


def test_sampled_tokens_are_the_same_with_restored_blocks(launches: Artifact) -> None:
    with engine_of(launches, InterpretedDevice(rng=random.Random(9))) as engine:
        first = engine.generate(PROMPTS[3], SAMPLED)
        for prompt in PROMPTS[:3]:
            engine.generate(prompt, PARAMS)
        again = engine.generate(PROMPTS[3], SAMPLED)
    assert again.cached_tokens_by_tier.host > 0
    assert again.token_ids == first.token_ids


# A slow part of the pool


@pytest.mark.parametrize("make_device", DEVICES.values(), ids=list(DEVICES))
def test_conversations_longer_than_the_fast_part_have_the_tokens_of_a_large_pool(
    launches: Artifact, make_device: Callable[[], InterpretedDevice]
) -> None:
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with engine_of(launches, InterpretedDevice(), kv_blocks=40, tiers=None) as engine:
        expected = tokens([engine.generate(prompt, params) for prompt in PROMPTS])
    device = make_device()
    executor = CudaExecutor(launches, device, EngineOptions(kv_blocks=4, kv_offload="200%"))
    assert isinstance(executor, OffloadingExecutor)
    assert (executor.num_fast_blocks, executor.num_blocks) == (4, 12)
    assert 0 < executor.slow_bytes_per_second < float("inf")
    with Engine(executor, max_sequences=executor.max_sequences) as engine:
        assert tokens([engine.generate(prompt, params) for prompt in PROMPTS]) == expected
        assert tokens(engine.generate(PROMPTS, params)) == expected
        metrics = engine.metrics()
        assert metrics.blocks_slow == 8
        assert metrics.blocks_moved["down"] > 0
        engine.check()


def test_a_pool_without_kv_offload_has_no_slow_part(launches: Artifact) -> None:
    for offload in ("auto", "off"):
        executor = CudaExecutor(launches, InterpretedDevice(), EngineOptions(kv_blocks=4, kv_offload=offload))
        assert executor.num_blocks == executor.num_fast_blocks == 4
        executor.close()
