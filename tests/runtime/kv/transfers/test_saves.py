"""What is saved, and when: the tiers together hold what fits into them, and nothing is written before it must be."""

from array import array

import pytest

from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.kv.blocks import BlockManager
from ingot.runtime.kv.keys import BlockContent
from ingot.runtime.kv.transfers.saves import Saves
from ingot.runtime.kv.transfers.transfer import Bytes
from tests.runtime.kv.tiered_engines import make_tiers, tiered_engine
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.fake_host_blocks import FakeStore

ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def chain(number: int) -> list[int]:
    """A prompt of 3 blocks of 4 tokens and one token more; no two share a block."""
    return [number, *range(12)]


def settle(engine: Engine) -> None:
    """Let all transfers end that the tiers begin by themselves."""
    assert engine.tiers is not None
    for _ in range(100):
        engine.tiers.poll()
        engine.tiers.start()
    engine.check()


def serve(engine: Engine, *numbers: int) -> list[tuple[int, ...]]:
    """Serve prompts; returns their cached tokens by tier."""
    cached = []
    for number in numbers:
        cached.append(tuple(engine.generate(chain(number), ONE).cached_tokens_by_tier))
        settle(engine)
    return cached


def test_pool_and_host_memory_together_hold_more_than_either() -> None:
    """90 blocks fit into 64 of the pool and 48 slots. If each block of the pool took a slot, LRU would find none."""
    with tiered_engine(num_blocks=64, num_slots=48) as engine:
        serve(engine, *range(30), *range(30))  # the pool is measured, and host memory is full
        assert {sum(cached) for cached in serve(engine, *range(30))} == {12}


def test_a_block_that_host_memory_gave_up_is_saved_again_before_it_is_evicted() -> None:
    with tiered_engine(num_blocks=64, num_slots=48) as engine:
        serve(engine, *range(40))  # the pool is measured: only what is evicted next is saved
        assert engine.tiers is not None
        content = lost_block(engine, 6)
        serve(engine, 90)  # which evicts 4 blocks
        assert engine.tiers.host.find(content) is not None


def test_nothing_is_looked_for_while_host_memory_has_room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, look = list[int](), Saves._look

    def noted(saves: Saves, block: int, keeps: bool) -> None:
        looks.append(block)
        look(saves, block, keeps)

    monkeypatch.setattr(Saves, "_look", noted)
    with tiered_engine(num_blocks=64, num_slots=100) as engine:
        serve(engine, *range(15), *range(15))
        assert engine.tiers
        assert len(engine.tiers.host) == 45
        assert not looks
        lost_block(engine, 3)
        serve(engine, *range(15), *range(15))
        assert looks
        assert len(engine.tiers.host) == 45, "the lost one is saved again"


def test_what_is_evicted_later_is_found_in_host_memory_that_had_room_for_all() -> None:
    with tiered_engine(num_blocks=32, num_slots=400) as engine:
        serve(engine, *range(100))
        assert {sum(cached) for cached in serve(engine, *range(100))} == {12}


def lost_block(engine: Engine, number: int) -> BlockContent:
    """Take the block that is evicted after so many others out of host memory, and return its content."""
    assert engine.tiers is not None
    cached = engine._blocks.cached([*engine._blocks.by_age()][number])
    assert cached is not None
    held = engine.tiers.host.find(cached[0])
    assert held is not None
    engine.tiers.host.lose(held)
    return cached[0]


def test_closing_writes_what_pool_and_host_memory_hold_and_nothing_is_written_while_both_have_room() -> None:
    store = FakeStore()
    with tiered_engine(num_blocks=32, store=store) as engine:
        serve(engine, 0, 1, 2)
        assert store.num_written == 0
    assert len(store.blocks) == 9
    with tiered_engine(num_blocks=32, num_slots=2, store=store) as engine:
        assert serve(engine, 0, 1, 2) == [(0, 0, 12)] * 3
    assert store.num_written == 9


def test_a_crash_loses_what_was_not_demoted_and_nothing_else() -> None:
    store = FakeStore()
    engine = tiered_engine(num_blocks=16, num_slots=8, store=store)
    serve(engine, *range(12))
    written = set(store.blocks)  # the process ends here
    assert 12 <= len(written) < 36
    with tiered_engine(num_blocks=64, store=store) as after:
        cached = serve(after, *range(12))
    assert 24 <= sum(map(sum, cached)) <= 4 * len(written)
    engine.close()


def test_a_block_that_comes_back_from_disk_is_not_written_again() -> None:
    store = FakeStore()
    with tiered_engine(num_blocks=16, num_slots=8, store=store) as engine:
        serve(engine, *range(12))
        for _ in range(3):
            assert {sum(cached) for cached in serve(engine, *range(12))} == {12}
    assert store.num_written == len(store.blocks) == 36


def test_a_disk_that_takes_no_writes_costs_host_memory_nothing() -> None:
    """Its blocks are kept and given up as without a disk; no copy is made for a write that would fail."""
    found = []
    for is_off in (True, False):
        store = FakeStore() if is_off else None
        with tiered_engine(num_blocks=24, num_slots=32, store=store) as engine:
            serve(engine, *range(4))
            if store:
                store.refusal = "the folder was deleted"
            hits = serve(engine, *(number * 5 % 16 for number in range(100)))
            tiers = engine.metrics().kv_tiers
            assert tiers
            assert tiers.failed_transfers == 0
            found.append((hits, tiers.saved_blocks, tiers.dropped_saves))
            assert tiers.disk_written_blocks == 0
    assert found[0] == found[1]


class _Unreadable(FakeStore):
    """A store that finds every block, and reads none."""

    num_read = 0

    def read_into(self, content: BlockContent, buffer: Bytes) -> None:
        """Fail."""
        self.num_read += 1
        raise OSError("input/output error")


def test_a_block_that_cannot_be_read_leaves_the_disk() -> None:
    store = FakeStore()
    with tiered_engine(num_blocks=32, store=store) as engine:
        serve(engine, 0)
    bad = _Unreadable()
    bad.blocks = store.blocks
    with tiered_engine(num_blocks=8, num_slots=2, store=bad) as engine:
        assert serve(engine, 0) == [(0, 0, 0)]
        assert bad.num_read > 0
        num_read = bad.num_read
        serve(engine, 1, 2, 3)
        assert bad.num_read == num_read


def test_a_step_that_evicts_many_leaves_its_saves_to_the_next() -> None:
    executor, blocks = FakeExecutor(num_blocks=64, block_tokens=4), BlockManager(64, 4)
    tiers = make_tiers(executor, blocks, b"", num_slots=200, store=None)

    def saved_by_a_step() -> int:
        before = tiers.metrics().saved_blocks
        tiers.start()
        while tiers.is_moving:
            tiers.poll()
        return tiers.metrics().saved_blocks - before

    first, second = array("q", range(48 * 4)), array("q", range(1000, 1000 + 60 * 4))
    blocks.admit(1, first, tiers=tiers)
    blocks.commit(1, first, len(first))
    assert [saved_by_a_step() for _ in range(4)] == [16, 16, 16, 0]
    blocks.release(1)
    blocks.admit(2, second, tiers=tiers)
    blocks.commit(2, second, len(second))
    assert blocks.num_evicted == 44
    assert [saved_by_a_step() for _ in range(4)] == [0, 16 + 44 // 2, 60 - 38, 0]
    tiers.check()
    tiers.close()
