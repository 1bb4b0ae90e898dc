"""Slots of host memory: examples, then random operations against the invariants."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ingot.runtime.kv.eviction import make_policy
from ingot.runtime.kv.host_tier import HostBlock, HostTier, SlotState
from ingot.runtime.kv.keys import BlockContent, Tree


def content(number: int) -> BlockContent:
    return BlockContent(bytes([number]), b"root", bytes([number]))


def tree(number: int) -> Tree:
    return Tree(bytes([number % 3]), private=False)


def tier(num_slots: int) -> HostTier:
    return HostTier(num_slots, make_policy("lru", num_slots))


def filled(host: HostTier, number: int) -> HostBlock:
    block = host.reserve(content(number), tree(number), "host")
    assert block is not None
    host.fill(block)
    return block


def test_a_block_is_found_while_it_is_filled_and_compared_as_a_whole() -> None:
    host = tier(2)
    block = host.reserve(content(1), tree(1), "host")
    assert host.find(content(1)) is block
    assert host.find(content(1)._replace(tokens=b"other")) is None
    assert host.reserve(content(1)._replace(tokens=b"other"), tree(1), "host") is None


def test_the_least_recently_used_block_that_is_not_pinned_gives_up_its_slot() -> None:
    host = tier(3)
    blocks = [filled(host, number) for number in range(3)]
    host.touch(content(0).hash)
    host.pin(blocks[1])
    filled(host, 9)
    assert [host.find(content(number)) for number in range(3)] == [*blocks[:2], None]
    host.check()


def test_a_lost_block_keeps_its_slot_until_the_last_pin_is_gone() -> None:
    host = tier(1)
    block = host.reserve(content(1), tree(1), "host")
    assert block is not None
    host.lose(block)
    host.lose(block)
    assert host.find(content(1)) is None
    assert host.reserve(content(2), tree(2), "host") is None
    host.unpin(block)
    assert host.reserve(content(2), tree(2), "host") is not None
    host.check()


def test_a_tree_is_lost_as_a_whole() -> None:
    host = tier(6)
    for number in range(6):
        filled(host, number)
    assert sorted(host.lose_tree(bytes([1]))) == [content(1), content(4)]
    assert host.lose_tree(bytes([1])) == []
    assert len(host) == 4
    host.check()


def test_spare_blocks_go_before_those_that_are_kept_the_one_that_the_device_used_last_first() -> None:
    host = tier(4)
    for number in range(4):
        filled(host, number)
    host.spare(content(3).hash)
    host.spare(content(2).hash)
    assert host.num_spare == 2
    gone = []
    for number in range(10, 13):
        filled(host, number)
        gone.append([each for each in range(4) if host.find(content(each)) is None])
    assert gone == [[2], [2, 3], [0, 2, 3]]
    host.check()


def test_a_spare_block_that_the_device_gives_up_is_kept_as_the_newest() -> None:
    host = tier(2)
    filled(host, 0)
    filled(host, 1)
    host.spare(content(0).hash)
    assert host.keep(content(0).hash)
    assert not host.keep(content(5).hash)
    filled(host, 2)
    assert [host.find(content(number)) is None for number in range(3)] == [False, True, False]
    host.check()


def test_a_block_that_is_demoted_is_the_last_spare_one_and_still_found() -> None:
    host = tier(3)
    blocks = [filled(host, number) for number in range(3)]
    host.spare(content(2).hash)
    assert host.demote() is blocks[0]
    assert host.find(content(0)) is blocks[0]
    assert host.reserve(content(8), tree(8), "disk", takes_kept=False)
    assert host.find(content(2)) is None
    assert host.reserve(content(9), tree(9), "disk", takes_kept=False)
    assert host.find(content(0)) is None
    assert host.reserve(content(10), tree(10), "disk", takes_kept=False) is None
    host.check()


class HostOperations(RuleBasedStateMachine):
    """Random use; a pinned slot never changes its block."""

    def __init__(self) -> None:
        super().__init__()
        self.host = tier(4)
        self.pinned: list[HostBlock] = []

    @rule(number=st.integers(0, 8), keeps=st.booleans(), takes_kept=st.booleans())
    def reserve(self, number: int, keeps: bool, takes_kept: bool) -> None:
        block = self.host.reserve(content(number), tree(number), "host", keeps=keeps, takes_kept=takes_kept)
        if block:
            assert block.slot not in {other.slot for other in self.pinned}, "a pinned slot was given away"
            self.pinned.append(block)

    @rule(number=st.integers(0, 20), succeeds=st.booleans())
    def end(self, number: int, succeeds: bool) -> None:
        if self.pinned:
            block = self.pinned.pop(number % len(self.pinned))
            if block.state is SlotState.FILLING and succeeds:
                self.host.fill(block)
            else:
                if block.state is SlotState.FILLING:
                    self.host.lose(block)
                self.host.unpin(block)

    @rule(number=st.integers(0, 8))
    def pin(self, number: int) -> None:
        block = self.host.find(content(number))
        if block and block.state is SlotState.READY:
            self.host.pin(block)
            self.pinned.append(block)

    @rule(number=st.integers(0, 8))
    def touch(self, number: int) -> None:
        self.host.touch(content(number).hash)

    @rule(number=st.integers(0, 8), is_kept=st.booleans())
    def keep_or_spare(self, number: int, is_kept: bool) -> None:
        if is_kept:
            self.host.keep(content(number).hash)
        else:
            self.host.spare(content(number).hash)

    @rule()
    def demote(self) -> None:
        block = self.host.demote()
        assert block is None or not block.pins

    @rule(number=st.integers(0, 2))
    def lose(self, number: int) -> None:
        self.host.lose_tree(bytes([number]))

    @invariant()
    def bookkeeping_is_consistent(self) -> None:
        self.host.check()


TestHostOperations = HostOperations.TestCase
TestHostOperations.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
