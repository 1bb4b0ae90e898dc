"""Sequences run from the slow part of the pool where that makes more tokens a second than waiting, and say why.

The blocks of which steps read the most bytes are in the fast part.
"""

import logging
from array import array

import pytest

from ingot.artifact import KVGeometry
from ingot.runtime.kv.blocks import BlockManager, BlockMove
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.sequence import ScheduledBatch, Sequence
from ingot.runtime.scheduling.slow_blocks import PlacedSequence, ReadCost, SlowBlocks, move_blocks

KV = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=32, block_tokens=4)  # float32: 1 KiB a block
FAST, SLOW = 8, 24
STEP = 0.010
UNIFORM = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=8, block_tokens=4)
WINDOWS = KVGeometry.model_validate(
    {"num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "window": [0, 8], "block_tokens": 4}
)


class Engine:
    """A scheduler whose steps last STEP and, for the blocks of the slow part, as long as a link takes."""

    def __init__(self, bytes_per_second: float, *, most_moves: int = 100) -> None:
        self.blocks = BlockManager(FAST + SLOW, KV.block_tokens, num_fast=FAST, most_moves=most_moves)
        self.bytes_per_second = bytes_per_second
        self.slow = SlowBlocks(self.blocks, KV, bytes_per_second)
        self.scheduler = Scheduler(self.blocks, max_batch_tokens=64, max_sequences=8, slow=self.slow)

    def add(self, number: int, prompt_tokens: int, max_tokens: int = 40) -> Sequence:
        sequence = Sequence.of(number, range(number * 100, number * 100 + prompt_tokens), max_tokens)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        self.scheduler.complete(batch)
        self.slow.observe(batch, STEP + self.slow._slow_bytes(batch) / self.bytes_per_second)
        for entry in batch.entries:
            if entry.samples:
                entry.sequence.tokens.append(7)
                if entry.sequence.is_full:
                    self.scheduler.remove(entry.sequence)
        self.blocks.check()
        return batch

    def run(self, count: int) -> list[ScheduledBatch]:
        return [self.step() for _ in range(count)]


def names(batch: ScheduledBatch) -> set[int]:
    return {entry.sequence.id for entry in batch.entries}


def test_a_sequence_alone_fills_both_parts() -> None:
    engine = Engine(1e3)
    sequence = engine.add(1, 60, max_tokens=60)
    batches = engine.run(60)
    assert all(names(batch) == {1} for batch in batches)
    assert len(sequence.tokens) == 120
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize(("speed", "together"), [(1e9, True), (1e3, False)])
def test_another_runs_from_the_slow_part_if_that_is_fast(
    speed: float, together: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = Engine(speed)
    engine.add(1, 20)
    engine.run(3)
    engine.add(2, 16)
    assert (names(engine.run(4)[-1]) == {1, 2}) == together
    decision = "runs from the slow part of the KV pool" if together else "waits for blocks of the fast part"
    assert [text for text in caplog.messages if decision in text]
    assert "tokens a second with it" in caplog.text
    assert len(caplog.messages) == 1, "each further decision is for debugging"
    engine.run(100)
    assert not engine.scheduler.has_sequences


@pytest.mark.parametrize(("speed", "preemptions"), [(1e9, 0), (1e3, 1)])
def test_a_sequence_that_outgrows_the_fast_part_is_preempted_only_if_the_slow_part_costs_more(
    speed: float, preemptions: int
) -> None:
    engine = Engine(speed)
    engine.add(1, 11, max_tokens=30)
    engine.add(2, 10, max_tokens=30)
    while engine.scheduler.has_sequences:
        engine.step()
    assert (engine.scheduler.num_preemptions > 0) == (preemptions > 0)


def test_two_of_which_each_needs_more_than_the_fast_part_end() -> None:
    for speed in (1e9, 1e6, 1e3):
        engine = Engine(speed)
        both = [engine.add(number, 50, max_tokens=30) for number in (1, 2)]
        for _ in range(500):
            engine.step()
        assert [len(sequence.tokens) for sequence in both] == [80, 80]


def test_blocks_move_up_when_another_sequence_ends() -> None:
    engine = Engine(1e9)
    engine.add(1, 20, max_tokens=8)
    engine.run(2)
    engine.add(2, 18, max_tokens=40)
    engine.run(3)
    assert engine.blocks.num_slow_in_use > 0
    moves = [copy for batch in engine.run(12) for copy in batch.copies if isinstance(copy, BlockMove)]
    assert [move for move in moves if move.target < FAST <= move.source]
    assert engine.blocks.num_slow_in_use == 0, "the one that is left fits into the fast part"
    assert engine.blocks.num_moved_up > 0


def test_no_more_blocks_move_in_a_step_than_may() -> None:
    engine = Engine(1e9, most_moves=2)
    engine.add(1, 24, max_tokens=4)
    engine.run(1)
    engine.add(2, 24, max_tokens=40)
    for batch in engine.run(20):
        assert sum(isinstance(copy, BlockMove) for copy in batch.copies) <= 2


def test_what_a_step_shows_of_the_slow_part_counts_more_than_its_disk() -> None:
    engine = Engine(1e5)
    engine.bytes_per_second = 1e12  # the system keeps the file in memory
    engine.add(1, 20)
    engine.run(3)
    engine.add(2, 12, max_tokens=60)
    engine.run(60)
    assert 1 / engine.slow._byte_seconds > 1e6


def manager(num_fast: int, num_slow: int, most_moves: int = 100) -> BlockManager:
    return BlockManager(num_fast + num_slow, 4, num_fast=num_fast, most_moves=most_moves)


def admit(blocks: BlockManager, number: int, num_tokens: int) -> PlacedSequence:
    assert blocks.admit(number, array("q", range(number * 100, number * 100 + num_tokens)))
    return PlacedSequence(blocks.tables[number], num_tokens, is_read=True)


def test_a_layer_with_a_window_reads_its_last_blocks_alone() -> None:
    cost = ReadCost(WINDOWS)
    layer = WINDOWS.block_bytes // 2
    assert cost.varies
    assert [cost.bytes_read(index, 20) for index in range(5)] == [layer, layer, layer, 2 * layer, 2 * layer]
    uniform = ReadCost(UNIFORM)
    assert not uniform.varies
    assert {uniform.bytes_read(index, 20) for index in range(5)} == {UNIFORM.block_bytes}


def test_new_blocks_take_the_place_of_those_that_windows_have_left() -> None:
    blocks = manager(3, 7)
    sequence = admit(blocks, 1, 20)
    assert [block < 3 for block in sequence.table.blocks] == [True, True, True, False, False]
    for copy in move_blocks(blocks, [sequence], ReadCost(WINDOWS)):
        assert (copy.source < 3) != (copy.target < 3)
    assert [block < 3 for block in sequence.table.blocks[3:]] == [True, True]
    assert sum(block < 3 for block in sequence.table.blocks) == 3
    assert move_blocks(blocks, [sequence], ReadCost(WINDOWS)) == [], "each is where it belongs"
    blocks.check()


@pytest.mark.parametrize("is_read", [True, False])
def test_blocks_of_a_sequence_that_reads_nothing_stay(is_read: bool) -> None:
    blocks = manager(4, 6)
    admit(blocks, 1, 16)
    waiting = admit(blocks, 2, 16)._replace(is_read=is_read)
    blocks.release(1)
    moves = move_blocks(blocks, [waiting], ReadCost(UNIFORM))
    assert len(moves) == (4 if is_read else 0)
    blocks.check()


def test_a_block_that_a_sequence_elsewhere_shares_stays() -> None:
    blocks = manager(4, 6)
    admit(blocks, 1, 16)
    parent = admit(blocks, 2, 16)
    blocks.fork(2, 3)
    blocks.release(1)
    assert move_blocks(blocks, [parent], ReadCost(UNIFORM)) == []
    both = [parent, PlacedSequence(blocks.tables[3], 16, is_read=True)]
    assert len(move_blocks(blocks, both, ReadCost(UNIFORM))) == 4
    assert blocks.tables[2].blocks == blocks.tables[3].blocks
    blocks.check()
