"""Tiers under an engine with the fake executor: what is restored, what fails, what a shortage does."""

import logging
import random
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ingot.artifact.serving import KVRestore
from ingot.errors import EngineError, UsageError
from ingot.runtime.asking.outputs import Completion
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.kv.blocks import BlockManager
from ingot.runtime.kv.keys import PrefixScope
from ingot.runtime.kv.tiers import TierManager
from ingot.runtime.kv.transfers.restored_prefix import RestoredPrefix
from ingot.runtime.kv.transfers.saves import STALL_SECONDS, Flush
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.sequence import ScheduledBatch
from tests.each_case import each_case
from tests.runtime.engines import token_engine
from tests.runtime.kv.tiered_engines import make_tiers, tiered_engine
from tests.runtime.steps.test_deadlines import Clock as StillClock
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.fake_host_blocks import FakeStore, FakeTransfer, Transfers
from tests.simulators.faulty_executors import FaultyExecutor, FaultyPipelinedExecutor
from tests.simulators.pipelined_executor import FakePipelinedExecutor

EXECUTORS = pytest.mark.parametrize("kind", [FakeExecutor, FakePipelinedExecutor])
FEW = SamplingParams(max_tokens=3)


def tokens_alone(prompt: list[int], params: SamplingParams = FEW) -> tuple[int, ...]:
    with token_engine() as engine:
        return engine.generate(prompt, params).token_ids


def run(engine: Engine, prompt: Sequence[int], **options: Any) -> Completion:
    completion = engine.generate(list(prompt), FEW, **options)
    engine.check()
    return completion


def fill_pool(engine: Engine, num_blocks: int = 12, start: int = 100) -> None:
    """Evict what other requests left on the device."""
    run(engine, [start + number % 50 for number in range(num_blocks * 4 - 3)])


def by_tier(completion: Completion) -> tuple[int, int, int]:
    return completion.cached_tokens_by_tier


@EXECUTORS
def test_an_evicted_prefix_is_restored_from_host_memory(kind: type[FakeExecutor]) -> None:
    prompt = list(range(22))
    with tiered_engine(kind, num_blocks=12) as engine:
        assert by_tier(run(engine, prompt)) == (0, 0, 0)
        assert by_tier(run(engine, prompt)) == (20, 0, 0)
        fill_pool(engine)
        again = run(engine, prompt)
        assert by_tier(again) == (0, 20, 0)
        assert again.cached_tokens == 20
        assert again.token_ids == tokens_alone(prompt)
        metrics = engine.metrics().kv_tiers
        assert metrics is not None
        assert (metrics.restored_blocks, metrics.restored_prefixes, metrics.failed_transfers) == (5, 1, 0)


@EXECUTORS
def test_a_prefix_is_restored_from_disk_by_the_next_engine(kind: type[FakeExecutor]) -> None:
    prompt, store = list(range(22)), FakeStore()
    with tiered_engine(kind, store=store) as engine:
        run(engine, prompt)
    assert len(store.blocks) == 6, "closing the engine lets what is cached reach the disk"
    with tiered_engine(kind, store=store) as engine:
        again = run(engine, prompt)
        assert by_tier(again) == (0, 0, 20)
        assert again.token_ids == tokens_alone(prompt)


def test_a_prefix_may_be_in_all_three_tiers() -> None:
    prompt, store = list(range(42)), FakeStore()
    with tiered_engine(store=store) as engine:
        run(engine, prompt)
    with tiered_engine(store=store, num_blocks=16) as engine:
        run(engine, prompt[:21])
        fill_pool(engine, 16)
        run(engine, prompt[:9])
        again = run(engine, prompt)
        assert by_tier(again) == (8, 12, 20)
        assert again.token_ids == tokens_alone(prompt)


@pytest.mark.parametrize(("rule", "from_disk"), [("auto", 0), ("always", 20)])
def test_a_disk_that_was_slow_is_not_read_unless_all_that_is_stored_is_restored(
    rule: KVRestore, from_disk: int
) -> None:
    prompt, store = list(range(22)), FakeStore()
    with tiered_engine(store=store) as engine:
        run(engine, prompt)
    with tiered_engine(store=store, rule=rule) as engine:
        run(engine, [200] * 9)  # a prompt was computed
        assert engine.tiers is not None
        engine.tiers.costs.observe_block("disk", 3600.0)
        again = run(engine, prompt)
        assert by_tier(again) == (0, 0, from_disk)
        assert again.token_ids == tokens_alone(prompt)


def test_a_chain_longer_than_host_memory_is_restored_through_few_slots() -> None:
    prompt, store = list(range(62)), FakeStore()
    with tiered_engine(store=store, num_slots=4) as engine:
        run(engine, prompt)
    assert len(store.blocks) == 16
    with tiered_engine(store=store, num_slots=2) as engine:
        again = run(engine, prompt)
        assert by_tier(again) == (0, 0, 60)
        assert again.token_ids == tokens_alone(prompt)


@EXECUTORS
def test_a_preempted_sequence_resumes_from_its_own_blocks(kind: type[FakeExecutor]) -> None:
    """Both grow until one must give its blocks to the other."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    prompts = [list(range(16)), list(range(50, 66))]
    for shared in (True, False):
        store = FakeStore()
        with tiered_engine(kind, num_blocks=12, prefix_cache=shared, store=store) as engine:
            completions = engine.generate(prompts, params)
            metrics = engine.metrics()
            assert metrics.num_preemptions > 0
            assert metrics.kv_tiers is not None
            assert metrics.kv_tiers.restored_blocks > 0
            assert [each.token_ids for each in completions] == [tokens_alone(prompt, params) for prompt in prompts]
            assert (metrics.blocks_cached > 0) == shared
            assert (metrics.kv_tiers.host_blocks > 0) == shared, "a request that shares nothing left blocks"
            engine.check()
        assert (store.num_written > 0) == shared, "blocks of a request that shares nothing were on disk"


def test_requests_without_the_prefix_cache_leave_nothing_in_any_tier() -> None:
    store = FakeStore()
    with tiered_engine(store=store) as engine:
        for _ in range(2):
            assert by_tier(run(engine, range(22), options=RequestOptions(prefix_cache=False))) == (0, 0, 0)
        metrics = engine.metrics().kv_tiers
        assert metrics is not None
        assert metrics.host_blocks == 0
    assert not store.blocks


def test_another_salt_restores_nothing() -> None:
    store = FakeStore()
    with tiered_engine(store=store) as engine:
        run(engine, range(22), options=RequestOptions(cache_salt="a"))
    with tiered_engine(store=store) as engine:
        assert by_tier(run(engine, range(22), options=RequestOptions(cache_salt="b"))) == (0, 0, 0)
        assert by_tier(run(engine, range(22), options=RequestOptions(cache_salt="a"))) == (0, 0, 20)


def test_an_engine_with_another_order_of_keys_restores_nothing() -> None:
    """The same artifact, kernels and geometry: only the order of a head's keys differs."""

    class ByDim(FakeExecutor):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.key_order = "by-dim"

    store = FakeStore()
    with tiered_engine(store=store) as engine:
        run(engine, range(22))
    with tiered_engine(ByDim, store=store) as engine:
        assert by_tier(run(engine, range(22))) == (0, 0, 0)
    with tiered_engine(ByDim, store=store) as engine:
        assert by_tier(run(engine, range(22))) == (0, 0, 20)
    with tiered_engine(store=store) as engine:
        assert by_tier(run(engine, range(22))) == (0, 0, 20)


def test_blocks_of_a_failed_copy_are_computed_and_the_failure_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    prompt, transfers = list(range(22)), Transfers()
    with tiered_engine(num_blocks=12, transfers=transfers) as engine, caplog.at_level(logging.WARNING):
        run(engine, prompt)
        fill_pool(engine)
        transfers.fails = 1.0
        again = run(engine, prompt)
        assert by_tier(again) == (0, 0, 0)
        assert again.token_ids == tokens_alone(prompt)
        metrics = engine.metrics().kv_tiers
        assert metrics is not None
        assert metrics.failed_transfers >= 1
    assert len([record for record in caplog.records if "was not copied" in record.message]) == 1


def test_a_block_that_is_damaged_on_disk_is_computed_with_all_that_follow_it() -> None:
    prompt, store = list(range(22)), FakeStore()
    with tiered_engine(store=store) as engine:
        run(engine, prompt)
    third = [content for content, _ in store.blocks.values()][2]
    other = next(iter(store.blocks.values()))
    store.blocks[third.hash] = other  # another prompt's block under this key
    with tiered_engine(store=store) as engine:
        again = run(engine, prompt)
        assert by_tier(again) == (0, 0, 8)
        assert again.token_ids == tokens_alone(prompt)


@pytest.mark.parametrize("kind", [FaultyExecutor, FaultyPipelinedExecutor])
def test_logits_that_are_not_finite_after_a_restore_end_the_request_alone_and_its_blocks_leave_all_tiers(
    kind: type[FaultyExecutor], caplog: pytest.LogCaptureFixture
) -> None:
    """A block with keys that are not numbers, whole by every check, is on disk."""
    prompt, mate, store = [number % 8 for number in range(22)], [3, 1, 4], FakeStore()
    with tiered_engine(kind, vocab_size=24, store=store) as engine:
        expected, of_mate = run(engine, prompt).token_ids, run(engine, mate).token_ids
    third = [*store.blocks][2]
    content, data = store.blocks[third]
    store.blocks[third] = (content, np.full(len(data) // 8, 0xBAD, np.uint64).tobytes())
    with tiered_engine(kind, vocab_size=24, store=store) as engine:
        failing, other = engine.add(prompt, FEW), engine.add(mate, FEW)
        done = finish(engine)
        assert done[failing].error is not None
        assert "finite" in str(done[failing].error)
        assert done[other].token_ids == of_mate
        engine.flush_kv()  # by then it has been removed
        assert third not in store.blocks
        again = run(engine, prompt)
        assert (again.token_ids, by_tier(again)) == (expected, (0, 0, 0))


def test_a_dead_thread_ends_all_requests_and_the_engine() -> None:
    transfers = Transfers()
    with tiered_engine(transfers=transfers) as engine:
        request_id = engine.add(list(range(22)), FEW)
        transfers.is_dead = True
        (output,) = engine.step()
        assert output.request_id == request_id
        assert isinstance(output.error, EngineError)
        assert "thread that copies has died" in str(engine.error)
        with pytest.raises(EngineError, match="died"):
            engine.add([1], FEW)


def test_decoding_goes_on_while_another_request_is_loading() -> None:
    transfers = Transfers()
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    with tiered_engine(num_blocks=32, transfers=transfers) as engine:
        run(engine, range(30))
        fill_pool(engine, 32)
        first = engine.add([7] * 5, long)
        engine.step()
        transfers.moves = 0.0
        second = engine.add(list(range(30)), FEW)
        outputs = [output for _ in range(10) for output in engine.step()]
        assert [output.request_id for output in outputs] == [first] * 10
        assert engine.metrics().num_running == 2
        engine.check()
        transfers.moves = 1.0
        done: dict[int, Completion] = {}
        while engine.has_unfinished():
            done |= {output.request_id: output.completion for output in engine.step() if output.completion}
        assert by_tier(done[second]) == (0, 28, 0)
        assert done[second].token_ids == tokens_alone(list(range(30)))
        assert done[first].token_ids == tokens_alone([7] * 5, long)


def test_a_restore_begins_when_the_copies_of_a_step_are_made_and_not_before() -> None:
    """A copy on write may still read the block that is restored to."""
    executor, blocks = FakeExecutor(num_blocks=8, block_tokens=4), BlockManager(8, 4)
    tiers = make_tiers(executor, blocks, b"", num_slots=4, store=None)
    tokens = array("q", range(9))
    blocks.admit(1, tokens, tiers=tiers)
    blocks.commit(1, tokens, 9)
    tiers.start()
    while tiers.metrics().saved_blocks < 2:
        tiers.poll()
    blocks.release(1)
    blocks.admit(2, array("q", range(100, 132)), tiers=tiers)
    blocks.release(2)
    blocks.admit(3, tokens, tiers=tiers)
    contents = list(blocks.following(3, tokens))
    load = tiers.load(contents, blocks.table(3)[:2], blocks.tree(3, contents), None)
    for _ in range(3):
        tiers.poll()
    assert not load.has_begun
    tiers.start()
    assert all(block.transfer for block in load.blocks)
    while not load.done:
        tiers.poll()
    assert load.contents() == contents
    tiers.check()
    tiers.close()


def test_a_load_that_is_cancelled_before_it_begins_pins_nothing_and_what_is_restored_later_is_whole() -> None:
    executor, blocks = FakeExecutor(num_blocks=8, block_tokens=4), BlockManager(8, 4)
    tiers = make_tiers(executor, blocks, b"", num_slots=4, store=None)
    tokens = array("q", range(9))
    blocks.admit(1, tokens, tiers=tiers)
    blocks.commit(1, tokens, 9)
    tiers.start()
    while tiers.metrics().saved_blocks < 2:
        tiers.poll()
    blocks.release(1)
    blocks.admit(2, array("q", range(100, 132)), tiers=tiers)
    blocks.release(2)
    for sequence, is_cancelled in ((3, True), (4, False)):
        blocks.admit(sequence, tokens, tiers=tiers)
        contents = tiers.plan(blocks.following(sequence, tokens), 0)
        assert len(contents) == 2
        load = tiers.load(contents, blocks.table(sequence)[:2], blocks.tree(sequence, contents), None)
        assert tiers.is_loading
        assert not load.done
        if is_cancelled:
            tiers.cancel(load)
            blocks.release(sequence)
            assert not tiers.is_loading
        for _ in range(9):
            tiers.start()
            tiers.poll()
        tiers.check()
        assert load.done
        assert load.contents() == ([] if is_cancelled else contents)
        assert blocks.num_pinned == 0
    tiers.close()


@pytest.mark.parametrize("seed", range(8))
def test_what_a_step_has_no_time_for_goes_on_in_the_next_wherever_it_ended(seed: int) -> None:
    rng = random.Random(seed)
    executor, blocks = FakeExecutor(num_blocks=24, block_tokens=4), BlockManager(24, 4)
    tiers = make_tiers(executor, blocks, b"", num_slots=48, store=FakeStore())
    tokens = array("q", range(77))  # 19 blocks and a token

    def make_short_step() -> bool:
        left = iter(range(rng.randrange(1, 30)))
        is_done = tiers._move(lambda: next(left, None) is not None)
        tiers.poll()
        tiers.check()
        return is_done

    blocks.admit(1, tokens, tiers=tiers)
    blocks.commit(1, tokens, 77)
    while tiers.metrics().saved_blocks < 19:
        make_short_step()
    blocks.release(1)
    blocks.admit(2, array("q", range(100, 196)), tiers=tiers)
    blocks.release(2)
    for sequence, num_steps in ((3, rng.randrange(6)), (4, 1000)):
        blocks.admit(sequence, tokens, tiers=tiers)
        contents = tiers.plan(blocks.following(sequence, tokens), 0)
        assert len(contents) == 19
        load = tiers.load(contents, blocks.table(sequence)[:19], blocks.tree(sequence, contents), None)
        for _ in range(num_steps):
            make_short_step()
        if not load.done:
            tiers.cancel(load)
        blocks.release(sequence)
    assert load.is_whole
    while not make_short_step():
        pass
    assert blocks.num_pinned == 0
    tiers.close()


@pytest.mark.parametrize("ends", ["abort", "preempt"])
def test_a_loading_request_that_ends_leaves_its_blocks_pinned_until_the_copies_have_ended(ends: str) -> None:
    transfers = Transfers()
    with tiered_engine(num_blocks=12, transfers=transfers) as engine:
        run(engine, range(22))
        fill_pool(engine)
        transfers.moves = 0.5
        request_id = engine.add(list(range(22)), FEW)
        for _ in range(3):
            engine.step()
            engine.check()
        if ends == "abort":
            engine.abort(request_id)
        else:
            scheduler = engine._loop.scheduler
            scheduler._preempt(scheduler.running[request_id], ScheduledBatch())
        engine.check()
        other = run(engine, range(60, 80))
        assert other.token_ids == tokens_alone(list(range(60, 80)))
        transfers.moves = 1.0
        while engine.has_unfinished():
            engine.step()
            engine.check()
        assert engine.metrics().blocks_in_use == 0


def test_a_queued_save_gives_way_to_a_step_that_needs_its_block() -> None:
    transfers = Transfers(moves=0.0)
    with tiered_engine(num_blocks=6, transfers=transfers) as engine:
        for start in (0, 50, 100):
            prompt = [start + number for number in range(18)]
            assert run(engine, prompt).token_ids == tokens_alone(prompt)
        metrics = engine.metrics().kv_tiers
        assert metrics is not None
        assert metrics.dropped_saves > 0
        assert metrics.saved_blocks == 0
        transfers.moves = 1.0


@pytest.mark.parametrize("on_disk", [False, True])
def test_flushed_blocks_are_stored_before_a_step_needs_their_place(on_disk: bool) -> None:
    transfers = Transfers(moves=0.0)
    store = FakeStore() if on_disk else None
    with tiered_engine(num_blocks=6, transfers=transfers, store=store) as engine:
        run(engine, range(18))
        assert not engine.flush_kv(seconds=0.0)
        transfers.moves = 0.5
        assert engine.flush_kv()
        metrics = engine.metrics().kv_tiers
        assert metrics is not None
        assert metrics.saved_blocks == 5
        assert store is None or store.num_written == 5
        transfers.moves = 0.0
        fill_pool(engine, num_blocks=6)
        transfers.moves = 1.0
        assert by_tier(run(engine, range(18))) == (0, 16, 0)


def test_a_flush_reports_a_dead_thread() -> None:
    transfers = Transfers(moves=0.0)
    with tiered_engine(transfers=transfers) as engine:
        run(engine, range(18))
        transfers.is_dead = True
        with pytest.raises(EngineError, match="has died"):
            engine.flush_kv()
        transfers.moves, transfers.is_dead = 1.0, False


class Clock:
    """Advances by a second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("ingot.runtime.kv.tiers.Flush", lambda pools, seconds, _: Flush(pools, seconds, clock))
    return clock


def losses(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "were not written to disk" in record.getMessage()]


def test_closing_writes_all_however_long_it_takes_while_it_advances(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    transfers, store = Transfers(), FakeStore()
    engine = tiered_engine(num_slots=4, num_blocks=64, transfers=transfers, store=store)
    for start in (0, 60, 120):
        run(engine, range(start, start + 60))
    transfers.moves = 0.3
    engine.close()
    assert len(store.blocks) == 3 * 15
    assert clock.now > 2 * STALL_SECONDS
    assert not losses(caplog)


def test_closing_gives_up_when_nothing_advances_and_logs_once_what_is_lost(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    transfers, store = Transfers(), FakeStore()
    engine = tiered_engine(num_slots=4, transfers=transfers, store=store)
    run(engine, range(60))
    transfers.moves = 0.0
    written = len(store.blocks)
    engine.close()
    engine.close()
    lost = 15 - len(store.blocks)
    assert lost > 0
    assert len(store.blocks) == written
    assert losses(caplog) == [
        f"{lost} KV blocks were not written to disk when the engine was closed (none was written for 30 seconds); they"
        " are computed again when they are needed"
    ]


@pytest.mark.parametrize("seconds", [0, 5.0])
def test_closing_takes_no_longer_than_the_caller_allows(
    clock: Clock, caplog: pytest.LogCaptureFixture, seconds: float
) -> None:
    transfers, store = Transfers(), FakeStore()
    engine = tiered_engine(num_slots=4, num_blocks=64, transfers=transfers, store=store)
    for start in (0, 60, 120):
        run(engine, range(start, start + 60))
    transfers.moves = 0.1
    engine.close(flush_seconds=seconds)
    assert clock.now < STALL_SECONDS
    (message,) = losses(caplog)
    assert f"{45 - len(store.blocks)} KV blocks were not" in message
    assert f"the limit of {seconds:g} seconds was reached" in message


def test_closing_does_not_wait_for_a_disk_that_takes_no_writes(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore()
    engine = tiered_engine(store=store)
    run(engine, range(22))
    store.refusal = "storing a block in /kv failed: the folder was deleted"
    assert not engine.flush_kv()
    engine.close()
    assert clock.now < STALL_SECONDS
    (message,) = losses(caplog)
    assert message.startswith(f"6 KV blocks were not written to disk when the engine was closed ({store.refusal});")


def test_a_disk_that_takes_no_block_ends_the_flush_and_the_blocks_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FakeStore(Transfers(fails=1.0))
    engine = tiered_engine(store=store)
    run(engine, range(22))
    engine.close()
    assert not store.blocks
    (message,) = losses(caplog)
    assert message.startswith("6 KV blocks were not written to disk")
    assert "(the disk did not take them)" in message


def test_closing_after_a_thread_died_ends_and_names_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    transfers, store = Transfers(), FakeStore()
    engine = tiered_engine(num_slots=4, transfers=transfers, store=store)
    run(engine, range(60))
    transfers.moves, transfers.is_dead = 0.0, True
    engine.close()
    (message,) = losses(caplog)
    assert "has died" in message


def test_blocks_of_cancelled_loads_do_not_keep_the_flush_from_its_slots() -> None:
    prompt, store, transfers = list(range(30)), FakeStore(), Transfers()
    with tiered_engine(store=store) as engine:
        run(engine, prompt)
    engine = tiered_engine(store=store, num_slots=2, transfers=transfers)
    run(engine, range(100, 122))
    engine.add(prompt, FEW)
    engine.step()
    transfers.moves = 0.5
    engine.step()
    assert engine.metrics().num_running == 1, "it is loading"
    engine.close()
    assert len(store.blocks) == 8 + 6


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), True, "5"])
def test_a_limit_that_is_not_a_time_is_refused_and_the_engine_stays_open(seconds: Any) -> None:
    with tiered_engine() as engine:
        with pytest.raises(UsageError, match=r"flush_seconds is .*; it must be a finite number, 0 or above, or None"):
            engine.close(flush_seconds=seconds)
        with pytest.raises(UsageError, match="seconds is"):
            engine.flush_kv(seconds)
        run(engine, range(9))


def test_prompt_logits_report_a_dead_thread_instead_of_waiting_for_it() -> None:
    transfers = Transfers()
    with tiered_engine(num_blocks=6, transfers=transfers) as engine:
        transfers.moves = 0.6
        run(engine, range(18))
        assert engine.tiers is not None
        while not any(pool.is_saving for pool in engine.tiers._pools):
            run(engine, [random.randrange(200) for _ in range(18)])
        for pool in engine.tiers._pools:
            for save in pool._saves:
                assert isinstance(save.transfer, FakeTransfer)
                save.transfer.move_on()  # begun: it can no longer be cancelled
        transfers.moves, transfers.is_dead = 0.0, True
        with pytest.raises(EngineError, match="has died"):
            engine.prompt_logits([9] * 24)
        transfers.moves, transfers.is_dead = 1.0, False


def test_without_tiers_there_is_nothing_to_flush() -> None:
    with token_engine() as engine:
        assert engine.flush_kv()


def test_waiting_requests_are_read_ahead_from_disk() -> None:
    store, transfers = FakeStore(), Transfers()
    prompts = [[start + number for number in range(22)] for start in (0, 50)]
    with tiered_engine(store=store) as engine:
        for prompt in prompts:
            run(engine, prompt)
    with tiered_engine(store=store, transfers=transfers, max_sequences=1) as engine:
        ids = [engine.add(prompt, SamplingParams(max_tokens=8, ignore_eos=True)) for prompt in prompts]
        while engine.metrics().num_waiting == 2:
            engine.step()
        for _ in range(4):
            engine.step()
        metrics = engine.metrics().kv_tiers
        assert metrics is not None
        assert metrics.disk_read_blocks == 10, "the second request still waits"
        done: dict[int, Completion] = {}
        while engine.has_unfinished():
            done |= {output.request_id: output.completion for output in engine.step() if output.completion}
        assert [by_tier(done[number]) for number in ids] == [(0, 0, 20)] * 2


@EXECUTORS
def test_a_load_that_ends_while_another_is_cancelled_runs_in_the_next_step(
    kind: type[FakeExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that yields leaves too little room for the urgent request, and the other can run only a step later."""
    transfers = Transfers()
    first, second, urgent = [*range(22)], [*range(50, 68)], [*range(100, 122)]
    with tiered_engine(kind, num_blocks=12, transfers=transfers) as engine:
        for prompt in (first, second):
            run(engine, prompt)
        fill_pool(engine, start=150)
        tiers = engine.tiers
        assert tiers is not None
        assert engine.flush_kv(), "what is being saved is pinned"
        transfers.moves = 0.0
        ids = [engine.add(prompt, FEW, options=RequestOptions(priority=1)) for prompt in (first, second)]
        engine.step()
        ids.append(engine.add(urgent, FEW))
        engine.step()
        assert (engine.metrics().num_running, tiers.is_loading) == (2, True)
        cancel = tiers.cancel

        def cancel_as_all_arrive(load: RestoredPrefix) -> None:
            transfers.moves = 1.0
            tiers._restores.advance(may_start=False)
            cancel(load)

        monkeypatch.setattr(tiers, "cancel", cancel_as_all_arrive)
        engine.step()
        assert (engine.metrics().num_preemptions, tiers.is_loading) == (1, False)
        done = finish(engine)
        assert [done[number].token_ids for number in ids] == [tokens_alone(each) for each in (first, second, urgent)]
        assert by_tier(done[ids[0]]) == (0, 20, 0)
        engine.check()


def begin_saves(tiers: TierManager) -> None:
    """Saves that have begun can no longer be cancelled."""
    for save in tiers._block_tiers._saves:
        assert isinstance(save.transfer, FakeTransfer)
        save.transfer.move_on()


@EXECUTORS
def test_saves_that_end_while_a_step_is_scheduled_make_room_for_the_next(
    kind: type[FakeExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that passes blocks on may take note of them when the request has just been refused their places."""
    transfers = Transfers(moves=0.0)
    with tiered_engine(kind, num_blocks=6, transfers=transfers) as engine:
        run(engine, range(18))
        assert engine.tiers is not None
        begin_saves(engine.tiers)
        number = engine.add(list(range(100, 122)), FEW)
        engine.step()
        assert engine.metrics().num_waiting == 1
        tiers, schedule = engine.tiers, Scheduler.schedule

        def schedule_as_saves_end(scheduler: Scheduler) -> ScheduledBatch:
            batch = schedule(scheduler)
            transfers.moves = 1.0
            tiers.pass_on()
            return batch

        with monkeypatch.context() as patched:
            patched.setattr(Scheduler, "schedule", schedule_as_saves_end)
            engine.step()
            assert not tiers.is_moving
        assert finish(engine)[number].token_ids == tokens_alone(list(range(100, 122)))
        engine.check()


def test_prompt_logits_wait_for_blocks_that_are_being_saved() -> None:
    transfers = Transfers(rng=random.Random(1), moves=0.2)
    with tiered_engine(num_blocks=6, transfers=transfers) as engine, token_engine() as plain:
        run(engine, range(18))
        prompt = [9] * 24
        assert (engine.prompt_logits(prompt) == plain.prompt_logits(prompt)).all()
        engine.check()


# Two requests with one prefix in a tier


def stored_on_disk(prompt: list[int]) -> FakeStore:
    store = FakeStore()
    with tiered_engine(store=store) as engine:
        run(engine, prompt)
    return store


def finish(engine: Engine) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    while engine.has_unfinished():
        done |= {output.request_id: output.completion for output in engine.step() if output.completion}
        engine.check()
    return done


def restored(engine: Engine) -> int:
    metrics = engine.metrics().kv_tiers
    assert metrics is not None
    return metrics.restored_blocks


@EXECUTORS
@pytest.mark.parametrize("moves", [0.3, 1.0])
def test_requests_with_one_prefix_restore_it_once(kind: type[FakeExecutor], moves: float) -> None:
    prompts = [[*range(20), 7], [*range(20), 8, 9], list(range(13)), list(range(22))]
    store = stored_on_disk(list(range(22)))
    with tiered_engine(kind, store=store, transfers=Transfers(moves=moves)) as engine:
        ids = [engine.add(prompt, FEW) for prompt in prompts]
        done = finish(engine)
        assert [by_tier(done[number]) for number in ids] == [(0, 0, 20), (0, 0, 20), (0, 0, 12), (0, 0, 20)]
        assert [done[number].token_ids for number in ids] == [tokens_alone(prompt) for prompt in prompts]
        assert restored(engine) == 5


@each_case("num_steps", range(1, 9))
@each_case("aborted", [0, 1])
def test_when_one_of_two_that_share_a_load_is_aborted_the_other_goes_on(num_steps: int, aborted: int) -> None:
    prompts, transfers = [[*range(20), 7], [*range(12), 8, 9]], Transfers(moves=0.5)
    with tiered_engine(store=stored_on_disk(list(range(22))), transfers=transfers) as engine:
        ids = [engine.add(prompt, FEW) for prompt in prompts]
        for _ in range(num_steps):
            engine.step()
            engine.check()
        engine.abort(ids[aborted])
        engine.check()
        other = finish(engine)[ids[1 - aborted]]
        assert other.token_ids == tokens_alone(prompts[1 - aborted])
        assert other.cached_tokens_by_tier.disk == (12 if aborted == 0 else 20)
        assert engine.metrics().blocks_in_use == 0


@EXECUTORS
@pytest.mark.parametrize("seed", range(8))
def test_a_failed_load_that_two_share_gives_both_their_tokens(kind: type[FakeExecutor], seed: int) -> None:
    prompts = [[*range(20), 7], [*range(20), 8], [*range(16), 9]]
    store = stored_on_disk(list(range(22)))
    store.behaviour = transfers = Transfers(random.Random(seed), moves=0.5, fails=0.6)
    with tiered_engine(kind, store=store, transfers=transfers) as engine:
        ids = [engine.add(prompt, FEW) for prompt in prompts]
        done = finish(engine)
        assert [done[number].token_ids for number in ids] == [tokens_alone(prompt) for prompt in prompts]
        metrics = engine.metrics().kv_tiers
        assert metrics is not None
        assert metrics.failed_transfers > 0
        assert engine.metrics().blocks_in_use == 0


@pytest.mark.parametrize(("seconds_of_step", "num_reads"), [(0.0, 16), (0.005, 25)])
def test_a_step_begins_few_reads_of_a_long_load_and_a_long_step_more(seconds_of_step: float, num_reads: int) -> None:
    clock = StillClock()
    tokens = array("q", range(161))
    store = stored_on_disk(list(tokens))
    executor, blocks = FakeExecutor(num_blocks=64, block_tokens=4), BlockManager(64, 4)
    executor.transfers.moves = 0.0
    tiers = make_tiers(executor, blocks, b"", num_slots=64, store=store, clock=clock)
    blocks.admit(1, tokens, scope=PrefixScope(next(iter(store.blocks.values()))[0].parent), tiers=tiers)
    contents = tiers.plan(blocks.following(1, tokens), 0)
    assert len(contents) == 40
    load = tiers.load(contents, blocks.table(1)[:40], blocks.tree(1, contents), None)
    clock.now = seconds_of_step
    tiers.start()
    tiers.poll()
    begun = [block.source is not None for block in load.blocks]
    assert begun == [True] * num_reads + [False] * (40 - num_reads)
    executor.transfers.moves = 1.0
    while not load.done:
        tiers.poll()
        tiers.start()
    assert load.is_whole
    tiers.check()
    tiers.close()


def test_a_fork_closes_its_engine_at_once_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    engine = tiered_engine(store=store)
    run(engine, list(range(22)))
    stored = dict(store.blocks)
    with monkeypatch.context() as child:
        child.setattr("ingot.runtime.kv.tiers.os.getpid", lambda: 0)
        engine.close()
    assert store.blocks == stored
