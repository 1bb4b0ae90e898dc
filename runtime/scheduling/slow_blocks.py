"""When running sequences may use more blocks than the fast part of the pool has, and which blocks are there.

A step reads every block of its sequences. Those in the slow part add `bytes / speed` to it, so one more sequence that
runs from there slows down all others of the batch. It pays if the batch still makes more tokens a second than without:

    with it     n tokens in       step + (blocks in use - fast blocks) * bytes / speed
    without     n - 1 tokens in   step + the same without its blocks, plus, for one that runs, what it lost

Without it, it waits until the first of the others ends. Then it computes again what it lost, or restores it. The time
of a step from the fast part and the seconds for a byte of the slow part are running averages. The latter begins with
what was measured at load, which is the disk: it falls where the system keeps the file in memory.

In the fast part belong the blocks of which a step reads the most bytes. A layer with full attention reads every block
of its sequence in each step, one with a window only the last ones. So blocks differ in cost where layers have windows,
and where a sequence waits for others of its group and reads nothing.
"""

import logging
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Several
from typing import NamedTuple

from ingot.artifact import KVGeometry
from ingot.runtime.kv.blocks import BlockManager, BlockMove, BlockTable
from ingot.runtime.scheduling.sequence import ScheduledBatch, Sequence, SequenceState

_log = logging.getLogger(__name__)
_NEWEST = 0.2  # weight of the newest step in an average
_LEAST_SHARE = 0.1
"""Share of a step's time that is not the slow part's."""


class PlacedSequence(NamedTuple):
    """A running sequence: its table, its tokens, and whether steps read its blocks."""

    table: BlockTable
    num_tokens: int
    is_read: bool


class ReadCost:
    """Bytes that a step reads from a block, by how many tokens of its sequence follow the block."""

    def __init__(self, geometry: KVGeometry) -> None:
        self._block_tokens = geometry.block_tokens
        self._reads = [
            (layer.window, (layer.key_bytes + layer.value_bytes) * layer.num_kv_heads * geometry.block_tokens)
            for layer in geometry.layers
        ]
        self._whole = sum(size for _, size in self._reads)
        # Some layer has a window, so old blocks cost less than new ones.
        self.varies = any(window for window, _ in self._reads)

    def bytes_read(self, index: int, num_tokens: int) -> int:
        """Bytes that a step reads from block `index` of a sequence of so many tokens. Scales are left out."""
        distance = num_tokens - (index + 1) * self._block_tokens
        if not self.varies:
            return self._whole
        return sum(size for window, size in self._reads if not window or distance < window)


class _Place(NamedTuple):
    """A block of a sequence, by its number in the table, and the bytes that a step reads from it."""

    cost: int
    number: int
    table: BlockTable


def move_blocks(blocks: BlockManager, running: Several[PlacedSequence], cost: ReadCost) -> list[BlockMove]:
    """Move the most expensive blocks in use to the fast part: where it has room, and in place of cheaper ones.

    The manager bounds how many move in a step. Copies are to be made in order.
    """
    moves: list[BlockMove] = []
    if not blocks.num_slow_in_use or not (blocks.has_fast_room or cost.varies):
        return moves
    tables = [each.table for each in running]
    places = _places(running, cost)
    slow = sorted((place for block, place in places.items() if block >= blocks.num_fast), key=lambda each: -each.cost)
    fast = sorted((place for block, place in places.items() if block < blocks.num_fast), key=lambda each: each.cost)
    cheapest = iter(fast)
    for expensive in slow:
        if not expensive.cost:
            break
        if not blocks.has_fast_room:
            cheap = next(cheapest, None)
            if cheap is None or cheap.cost >= expensive.cost:
                break
            moves += blocks.move_down(_first(cheap.table, tables), cheap.number)
        if blocks.has_fast_room:
            moves += blocks.move_up(_first(expensive.table, tables), expensive.number)
    return moves


def _places(running: Iterable[PlacedSequence], cost: ReadCost) -> dict[int, _Place]:
    """Where each block is used, by its number; for one that is shared, by the sequence that reads the most of it."""
    places: dict[int, _Place] = {}
    for table, num_tokens, is_read in running:
        for index, block in enumerate(table.blocks):
            place = _Place(cost.bytes_read(index, num_tokens) if is_read else 0, index, table)
            if block not in places or place.cost > places[block].cost:
                places[block] = place
    return places


def _first(table: BlockTable, tables: Iterable[BlockTable]) -> list[BlockTable]:
    return [table, *(other for other in tables if other is not table)]


class SlowBlocks:
    """The use of a pool's slow part. `Scheduler` calls `pays` and `move`, `StepLoop` reports the times of steps.

    bytes_per_second   measured speed of the slow part; infinite for memory
    """

    def __init__(self, blocks: BlockManager, geometry: KVGeometry, bytes_per_second: float) -> None:
        self._blocks = blocks
        self._cost = ReadCost(geometry)
        self._block_bytes = self._cost.bytes_read(0, 0)
        self._byte_seconds = 1 / bytes_per_second
        self._step_seconds = 0.0
        """Time of a step from the fast part; 0 before one was measured."""
        self._prompt_token_seconds = 0.0
        self._is_reported = False
        self.read_seconds = 0.0
        """Time of decode steps beyond that from the fast part, estimated."""

    def pays(self, sequence: Sequence, num_blocks: int, running: Collection[Sequence]) -> bool:
        """Return whether a sequence should run next to others, though together they need more blocks than are fast.

        num_blocks   that it has or needs
        running      all that run, with it if it does
        """
        others = [each for each in running if each is not sequence]
        if not others or not self._step_seconds:
            return not others
        is_running = len(others) < len(running)
        in_use = self._blocks.num_in_use + (0 if is_running else num_blocks)
        if not is_running and in_use <= self._blocks.num_fast:
            return False  # nothing to decide
        with_it = (len(others) + 1) / self._seconds(in_use)
        alone, steps = self._seconds(in_use - num_blocks), min(each.num_left for each in others)
        lost = len(sequence.tokens) * self._prompt_token_seconds if is_running else 0.0
        without = len(others) * steps / (alone * steps + lost)
        self._report(sequence, with_it, without)
        return with_it > without

    def _seconds(self, num_blocks: int) -> float:
        """Predicted time of a step that reads so many blocks."""
        slow = max(0, num_blocks - self._blocks.num_fast)
        return self._step_seconds + slow * self._block_bytes * self._byte_seconds

    def _report(self, sequence: Sequence, with_it: float, without: float) -> None:
        """Log a decision: the first one as information, the others for debugging."""
        level, self._is_reported = logging.DEBUG if self._is_reported else logging.INFO, True
        _log.log(
            level,
            "sequence %d %s: %.1f tokens a second with it, %.1f without, at %.2f ms a step and %.2f GB/s of the slow"
            " part",
            sequence.id,
            "runs from the slow part of the KV pool" if with_it > without else "waits for blocks of the fast part",
            with_it,
            without,
            self._step_seconds * 1e3,
            1e-9 / self._byte_seconds if self._byte_seconds else float("inf"),
        )

    def observe(self, batch: ScheduledBatch, seconds: float) -> None:
        """Take note of the time of a step, whose batch is as it was scheduled."""
        num_tokens = sum(entry.num_tokens for entry in batch.entries)
        if num_tokens > 2 * len(batch.entries):
            self._prompt_token_seconds = _average(self._prompt_token_seconds, seconds / num_tokens)
            return
        slow_bytes = self._slow_bytes(batch)
        if not slow_bytes:
            self._step_seconds = _average(self._step_seconds, seconds)
        elif self._step_seconds:
            measured = max(0.0, seconds - self._step_seconds) / slow_bytes
            self._byte_seconds = _average(self._byte_seconds, measured)
        else:
            self._byte_seconds = min(self._byte_seconds, (1 - _LEAST_SHARE) * seconds / slow_bytes)
            self._step_seconds = seconds - slow_bytes * self._byte_seconds
        self.read_seconds += min(seconds, slow_bytes * self._byte_seconds)

    def _slow_bytes(self, batch: ScheduledBatch) -> int:
        if not self._blocks.num_slow_in_use:
            return 0
        num_fast, total = self._blocks.num_fast, 0
        for entry in batch.entries:
            if entry.sequence.state is SequenceState.RUNNING:
                end = entry.start + entry.num_tokens
                table = self._blocks.table(entry.sequence.id)
                slow = (index for index, block in enumerate(table) if block >= num_fast)
                total += sum(self._cost.bytes_read(index, end) for index in slow)
        return total

    def move(self, running: Collection[Sequence]) -> list[BlockMove]:
        """Move blocks of running sequences to the part that they belong in; the copies, in order."""
        if not self._blocks.num_slow_in_use:
            return []
        placed = [
            PlacedSequence(self._blocks.tables[each.id], len(each.tokens), is_read=each.num_pending > 0)
            for each in running
            if each.state is SequenceState.RUNNING
        ]
        return move_blocks(self._blocks, placed, self._cost)


def _average(before: float, newest: float) -> float:
    return newest if not before else before + _NEWEST * (newest - before)
