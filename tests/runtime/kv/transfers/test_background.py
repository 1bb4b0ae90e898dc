"""Blocks that move while the executor computes: on a thread of their own, and never once the step has ended."""

import os
import random
import threading
import time
from array import array
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.clock import SYSTEM_CLOCK, Clock
from ingot.runtime.engine.engine import Engine
from ingot.runtime.engine.open_tiers import open_tiers
from ingot.runtime.executors import Executor
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.kv.blocks import BlockManager
from ingot.runtime.kv.cost_model import CostModel
from ingot.runtime.kv.tiers import TierManager
from ingot.runtime.kv.transfers.background import Background, GoesOn
from ingot.runtime.kv.transfers.transfer import TransferGate
from ingot.runtime.options import EngineOptions
from tests.runtime.engines import VOCAB_SIZE, token_engine
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.fake_host_blocks import FakeHostBlocks

_SECONDS = 60.0  # after which a test fails
CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()


class ObservedExecutor(FakeExecutor):
    """Computes for `seconds`, which leaves the interpreter to other threads. Implements `ObservedExecutor`."""

    leaves_a_core = True

    def __init__(self, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._seconds = seconds
        self.is_computing = False

    def forward(self, batch: ForwardBatch) -> FloatArray:
        self.is_computing = True
        time.sleep(self._seconds)
        logits = super().forward(batch)
        time.sleep(self._seconds)
        self.is_computing = False
        return logits


def make_tiers(executor: Executor, blocks: BlockManager, root: bytes, *, clock: Clock = SYSTEM_CLOCK) -> TierManager:
    """Host memory, moved by real threads."""
    assert isinstance(executor, FakeExecutor)
    costs = CostModel(blocks.block_tokens, "always")
    return TierManager(
        blocks, executor.host_blocks(64), costs, block_bytes=executor.kv_geometry.block_bytes, clock=clock
    )


@pytest.mark.parametrize(("seconds", "mover"), [(0.002, "ingot-kv-tiers"), (0.0, "MainThread")])
def test_blocks_move_during_steps_and_before_steps_that_leave_no_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float, mover: str
) -> None:
    movers: list[str] = []
    restore = FakeHostBlocks.restore

    def recorded(self: FakeHostBlocks, slot: int, block: int) -> Any:
        movers.append(threading.current_thread().name)
        return restore(self, slot, block)

    monkeypatch.setattr(FakeHostBlocks, "restore", recorded)
    rng = random.Random(0)
    starts = [[rng.randrange(VOCAB_SIZE) for _ in range(21)] for _ in range(6)]
    prompts = [start + [number] * rng.randrange(1, 9) for number in range(5) for start in starts]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    executor = ObservedExecutor(seconds, num_blocks=24, block_tokens=4, vocab_size=VOCAB_SIZE)
    with Engine(executor, max_sequences=3, tiers=make_tiers) as engine:
        completions = engine.generate(prompts, params)
        engine.check()
        metrics = engine.metrics().kv_tiers
    assert metrics is not None
    assert metrics.restored_blocks > 10
    assert metrics.failed_transfers == 0
    with token_engine() as alone:
        assert [each.token_ids for each in completions] == [alone.generate(each, params).token_ids for each in prompts]
    assert mover in movers


@pytest.mark.skipif(len(CORES) < 2, reason="threads cannot leave the only core")
@pytest.mark.parametrize("leaves_a_core", [False, True])
def test_threads_that_move_blocks_leave_the_core_of_the_engines_and_give_way_where_it_uses_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, leaves_a_core: bool
) -> None:
    monkeypatch.setattr("ingot.runtime.kv.tiers.current_core", lambda: min(CORES))
    monkeypatch.setattr(ObservedExecutor, "leaves_a_core", leaves_a_core)
    options = EngineOptions(kv_host_bytes=10_000, kv_disk_path=tmp_path / "kv", kv_disk_bytes=100_000)
    executor, before = ObservedExecutor(0.001, block_tokens=4), set(threading.enumerate())
    with Engine(executor, tiers=partial(open_tiers, options=options)) as engine:
        moving = sorted(set(threading.enumerate()) - before, key=lambda thread: thread.name)
        names = ["kv-look", "kv-read-0", "kv-read-1", "kv-tiers", "kv-write-0"]
        assert [thread.name for thread in moving] == [f"ingot-{name}" for name in names]
        engine.generate(list(range(9)), SamplingParams(max_tokens=6))
        found = [os.sched_getaffinity(thread.native_id or 0) for thread in moving]
        priorities = [os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) for thread in moving]
    assert found == [CORES - {min(CORES)}] * 5
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert priorities == [own if leaves_a_core else 19] * 5


def test_saves_end_although_every_step_is_too_short_for_the_other_thread() -> None:
    executor, blocks = FakeExecutor(num_blocks=8, block_tokens=4), BlockManager(8, 4)
    tiers = make_tiers(executor, blocks, b"")
    tokens = array("q", range(9))
    blocks.admit(1, tokens, tiers=tiers)
    blocks.commit(1, tokens, 9)
    for _ in range(100):
        tiers.poll()
        with tiers.during(lambda: False):
            pass
    metrics = tiers.metrics()
    assert metrics.saved_blocks == 2
    assert metrics.host_blocks == 2
    tiers.close()


class Steps:
    """A background thread whose moves last until they may not go on, and a step that the test ends."""

    def __init__(self) -> None:
        self.begun, self.is_inside, self.num_moves = threading.Event(), False, 0
        self.is_computing = False

    def move(self, goes_on: GoesOn) -> bool:
        self.is_inside = True
        self.num_moves += 1
        self.begun.set()
        while goes_on():
            time.sleep(0.0005)
        time.sleep(0.01)  # what is done for one block
        self.is_inside = False
        return False


def test_a_step_that_ends_waits_for_the_block_at_hand_and_no_other_begins() -> None:
    steps = Steps()
    background = Background(steps.move, lambda: None, lambda: False, TransferGate())
    for number in (1, 2):
        steps.is_computing = True
        with background.during(lambda: steps.is_computing):
            assert steps.begun.wait(_SECONDS)
            steps.begun.clear()
            steps.is_computing = False
        assert not steps.is_inside
        assert background.has_charge
        time.sleep(0.01)
        assert steps.num_moves == number
    background.check()
    background.close()


def test_after_some_steps_that_were_too_short_the_engines_thread_does_what_is_left() -> None:
    background = Background(lambda goes_on: False, lambda: None, lambda: False, TransferGate())
    num_short = 0
    while not background.is_behind:
        with background.during(lambda: False):
            num_short += 1
    assert num_short > 1
    background.note_done()
    assert not background.is_behind
    assert not background.has_charge
    background.close()


def test_a_step_that_was_long_enough_leaves_nothing_to_the_engines_thread() -> None:
    has_moved = threading.Event()

    def move(goes_on: GoesOn) -> bool:
        has_moved.set()
        return goes_on()

    background = Background(move, lambda: None, lambda: False, TransferGate())
    for _ in range(6):
        for _ in range(8):
            with background.during(lambda: False):
                pass
        has_moved.clear()
        with background.during(lambda: True):
            assert has_moved.wait(_SECONDS)
    assert not background.is_behind
    background.close()
