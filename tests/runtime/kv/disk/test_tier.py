"""The disk tier calls its store in threads alone, and what it forgets is not found from then on."""

import numpy as np
import pytest

from ingot.runtime.kv.disk.threads import DiskThreads
from ingot.runtime.kv.disk.tier import DiskTier
from ingot.runtime.kv.eviction import DEFAULT_POLICY, make_policy
from ingot.runtime.kv.host_tier import HostTier, SlotState
from ingot.runtime.kv.keys import Tree
from ingot.runtime.kv.transfers.transfer import Transfer
from tests.runtime.kv.disk.stored_blocks import BLOCK_BYTES, bytes_of, content_of
from tests.simulators.fake_host_blocks import FakeStore, SlowTask, SlowWorkers, Transfers

BLOCK = content_of(1)
TREE = Tree(BLOCK.hash, private=False)


class BegunTask(SlowTask):
    """A task that a thread has begun, so that it cannot be dropped."""

    __slots__ = ()

    def cancel(self) -> bool:
        """It is not dropped."""
        return False


def begin(transfer: Transfer) -> None:
    """Let a thread have begun a call, which has not returned."""
    assert isinstance(transfer, SlowTask)
    transfer.__class__ = BegunTask


class Bench:
    """A tier with four slots over a store that has one block."""

    def __init__(self) -> None:
        self.behaviour = Transfers(moves=0)
        self.store = FakeStore()
        self.store.write(BLOCK, bytes_of(BLOCK))
        self.host = HostTier(4, make_policy(DEFAULT_POLICY, 4))
        self.slots = np.zeros((4, BLOCK_BYTES), np.uint8)
        self.threads = DiskThreads(lambda *_: SlowWorkers(self.behaviour), None)
        self.tier = DiskTier(
            self.store,
            self.host,
            lambda slot: self.slots[slot],
            lambda *_: None,
            most_in_flight=2,
            threads=self.threads,
        )

    def move(self) -> None:
        """Let all calls end."""
        self.behaviour.moves = 1
        self.tier.advance()
        self.behaviour.moves = 0


def test_a_block_is_not_found_from_when_its_removal_begins() -> None:
    bench = Bench()
    assert bench.tier.offers(BLOCK.hash)
    bench.tier.remove(BLOCK.hash)
    assert BLOCK.hash in bench.store.blocks, "the store is called in a thread"
    assert not bench.tier.contains(BLOCK.hash)
    bench.move()
    assert BLOCK.hash not in bench.store.blocks
    bench.store.write(BLOCK, bytes_of(BLOCK))
    assert bench.tier.contains(BLOCK.hash), "it was stored again"


def test_reads_and_writes_in_flight_are_bounded() -> None:
    bench = Bench()
    bench.store.write(content_of(2), bytes_of(content_of(2)))
    for number in (1, 2):
        assert bench.tier.has_room
        assert bench.tier.read(content_of(number), TREE)
    assert not bench.tier.has_room
    assert bench.tier.has_room_to_write
    for number in (3, 4):
        block = bench.host.reserve(content_of(number), TREE, "host")
        assert block
        bench.host.fill(block)
        assert bench.tier.has_room_to_write
        bench.tier.write(block)
    assert not bench.tier.has_room_to_write
    bench.move()
    assert bench.tier.has_room
    assert bench.tier.has_room_to_write


def test_a_read_that_hangs_is_given_up_and_keeps_its_slot_until_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    block = bench.tier.read(BLOCK, TREE)
    assert block
    monkeypatch.setattr(type(bench.threads.answers), "are_missing", True)
    begin(bench.tier._reads[0].transfer)
    bench.tier.advance()
    assert bench.tier.is_hanging
    assert block.state is SlotState.LOST
    assert bench.host.num_free == 3
    assert not bench.tier.offers(BLOCK.hash)
    assert bench.tier.contains(BLOCK.hash)
    assert not bench.tier.has_room
    assert not bench.tier.has_room_to_write
    assert bench.tier.num_failed == 1
    monkeypatch.setattr(type(bench.threads.answers), "are_missing", False)
    bench.move()
    assert (bench.host.num_free, bench.tier.num_read, bench.tier.num_failed) == (4, 0, 1)
    assert bench.tier.offers(BLOCK.hash)
    bench.host.check()


def test_a_write_that_hangs_keeps_its_slot_and_those_that_wait_give_theirs_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    blocks = []
    for number in (2, 3):
        block = bench.host.reserve(content_of(number), TREE, "host")
        assert block
        bench.host.fill(block)
        bench.tier.write(block)
        blocks.append(block)
    monkeypatch.setattr(type(bench.threads.answers), "are_missing", True)
    begin(bench.tier._writes[blocks[0]])
    for _ in range(2):
        bench.tier.advance()
    assert [block.pins for block in blocks] == [1, 0]
    bench.move()
    assert [block.pins for block in blocks] == [0, 0]
    assert content_of(2).hash in bench.store.blocks
    assert content_of(3).hash not in bench.store.blocks
    bench.host.check()
