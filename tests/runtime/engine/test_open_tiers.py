"""Tiers made from options: sizes, refusals, first measurements, and a disk tier across engines."""

import logging
import threading
from functools import partial
from pathlib import Path

import pytest

from ingot.errors import UsageError
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.engine.open_tiers import open_tiers
from ingot.runtime.kv.blocks import BlockManager
from ingot.runtime.kv.disk.folder import StoreFolder
from ingot.runtime.kv.disk.store import DiskStore
from ingot.runtime.kv.states import StateManager
from ingot.runtime.options import EngineOptions
from tests.runtime.engines import token_engine
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.layered_executor import LayeredExecutor

BLOCK_BYTES = 32  # of the fake executor, with 4 tokens in a block


def fake() -> FakeExecutor:
    return FakeExecutor(block_tokens=4)


def test_an_engine_has_no_tiers_by_default() -> None:
    executor = fake()
    assert open_tiers(executor, BlockManager(8, 4), bytes(32), EngineOptions()) is None


def test_host_memory_is_sized_by_its_option_and_measured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tiers = open_tiers(fake(), BlockManager(8, 4), bytes(32), EngineOptions(kv_host_bytes=10 * BLOCK_BYTES + 5))
    assert tiers is not None
    assert tiers.metrics().host_blocks_total == 10
    assert tiers.costs.block_seconds("host") > 0
    assert "KV tiers: 10 blocks in host memory" in caplog.text
    tiers.close()
    tiers.close()


def test_host_memory_smaller_than_a_block_is_refused() -> None:
    with pytest.raises(UsageError, match="kv_host_bytes is 31; one block takes 32 bytes"):
        open_tiers(fake(), BlockManager(8, 4), bytes(32), EngineOptions(kv_host_bytes=31))


def test_a_disk_tier_without_host_memory_has_slots_to_pass_through(tmp_path: Path) -> None:
    options = EngineOptions(kv_disk_path=tmp_path / "kv", kv_disk_bytes=10_000)
    tiers = open_tiers(fake(), BlockManager(8, 4), bytes(32), options)
    assert tiers is not None
    assert tiers.metrics().host_blocks_total > 8
    tiers.close()


def test_engines_that_cannot_move_their_blocks_are_refused() -> None:
    executor = fake()
    executor._geometry = executor.kv_geometry.model_copy(update={"state_bytes": 8})
    with pytest.raises(UsageError, match="this engine, of a model with side state, has no tiers"):
        open_tiers(executor, BlockManager(8, 4), bytes(32), EngineOptions(kv_host_bytes=1000))


def test_host_memory_is_shared_by_blocks_and_side_states() -> None:
    executor = LayeredExecutor("side state", block_tokens=4, num_blocks=8)
    kv, states = executor.kv_geometry, StateManager(16, 4)
    options = EngineOptions(kv_host_bytes=kv.state_bytes + 16 * (kv.block_bytes + kv.state_bytes // 8))
    tiers = open_tiers(executor, BlockManager(8, 4, states=states), bytes(32), options)
    assert tiers is not None
    metrics = tiers.metrics()
    assert (metrics.host_blocks_total, metrics.host_states_total) == (16, 3)
    assert tiers.costs.state_seconds("host") == tiers.costs.block_seconds("host") * kv.state_bytes / kv.block_bytes
    tiers.close()
    with pytest.raises(UsageError, match=f"bytes, and its side state {kv.state_bytes}: give more"):
        small = EngineOptions(kv_host_bytes=kv.block_bytes)
        open_tiers(executor, BlockManager(8, 4, states=states), bytes(32), small)


def test_reads_from_disk_are_measured_before_the_first_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In an empty folder a block of its own is read, later those that are stored."""
    caplog.set_level(logging.INFO)
    options = EngineOptions(kv_disk_path=tmp_path / "kv", kv_disk_bytes=100_000)
    for source in ("one that was written just now", "8 that were stored"):
        with Engine(fake(), tiers=partial(open_tiers, options=options)) as engine:
            assert engine._tiers is not None
            costs = engine._tiers.costs
            assert costs.block_seconds("disk") > costs.block_seconds("host")
            assert source in caplog.text
            engine.generate(list(range(42)), SamplingParams(max_tokens=3))
    assert not list((tmp_path / "kv" / "tmp").iterdir())


def test_a_folder_that_cannot_be_used_is_refused_and_nothing_is_left_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    executor = fake()
    options = EngineOptions(kv_disk_path=tmp_path / "file", kv_disk_bytes=10_000)
    with pytest.raises(UsageError, match="file"):
        open_tiers(executor, BlockManager(8, 4), bytes(32), options)


def test_a_prefix_is_restored_from_a_folder_by_the_next_engine_with_threads(tmp_path: Path) -> None:
    prompt, params = list(range(42)), SamplingParams(max_tokens=3)
    options = EngineOptions(kv_disk_path=tmp_path / "kv", kv_disk_bytes=100_000)
    with token_engine(block_tokens=4) as plain:
        expected = plain.generate(prompt, params).token_ids
    for cached in [(0, 0, 0), (0, 0, 40)]:
        with Engine(fake(), tiers=partial(open_tiers, options=options)) as engine:
            completion = engine.generate(prompt, params)
            assert completion.cached_tokens_by_tier == cached
            assert completion.token_ids == expected
            engine.check()


def test_a_folder_that_does_not_answer_is_refused_and_closed_once_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, closed = threading.Event(), threading.Event()
    folder, close = StoreFolder.__init__, DiskStore.close

    def hanging(self: StoreFolder, path: Path) -> None:
        answers.wait()
        folder(self, path)

    def closing(self: DiskStore) -> None:
        close(self)
        closed.set()

    monkeypatch.setattr(StoreFolder, "__init__", hanging)
    monkeypatch.setattr(DiskStore, "close", closing)
    monkeypatch.setattr("ingot.runtime.engine.open_tiers._OPEN_SECONDS", 0.02)
    options = EngineOptions(kv_disk_path=tmp_path / "kv", kv_disk_bytes=100_000)
    with pytest.raises(UsageError, match=r"folder .*kv.* has not answered for 0\.02 seconds; check its mount"):
        open_tiers(fake(), BlockManager(8, 4), bytes(32), options)
    assert not closed.is_set()
    answers.set()
    assert closed.wait(60)
