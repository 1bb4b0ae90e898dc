"""Tiers for blocks that the device evicts: host memory, then disk. Policy only: moves are data, with their cost.

Blocks are identified by content hash, so a stored block serves any sequence with that history, and no other. Every tier
evicts its least recently used block first, to the next tier; the last tier drops it. A block is in at most one tier; a
restored one keeps its copy there, so that evicting it again is free. To add a kind of tier, add a row to the list that
the manager is made with.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

DEVICE = "device"


@dataclass(frozen=True)
class Tier:
    """One store, with its capacity and speed. Bandwidths are bytes per second, to and from the device."""

    name: str
    capacity_blocks: int
    write_bandwidth: float
    read_bandwidth: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        assert self.name != DEVICE
        assert self.capacity_blocks > 0
        assert self.write_bandwidth > 0
        assert self.read_bandwidth > 0

    def write_seconds(self, num_bytes: int) -> float:
        """Seconds to store `num_bytes`."""
        return self.latency_seconds + num_bytes / self.write_bandwidth

    def read_seconds(self, num_bytes: int) -> float:
        """Seconds to load `num_bytes`."""
        return self.latency_seconds + num_bytes / self.read_bandwidth


@dataclass(frozen=True, slots=True)
class Move:
    """Copy a block from `source` to `target`, or drop it if `target` is None.

    A source other than the device loses the block, unless the target is the device.
    """

    hash: bytes
    source: str
    target: str | None
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class RestorePlan:
    """The leading blocks that load faster than they compute; `saved_seconds` is the difference."""

    moves: tuple[Move, ...]
    saved_seconds: float


class TierManager:
    """Records which block is in which tier, fastest tier first. Moves must be made in the order given."""

    def __init__(self, tiers: Sequence[Tier], *, block_bytes: int) -> None:
        assert tiers
        assert len({tier.name for tier in tiers}) == len(tiers)
        self.tiers = tuple(tiers)
        self.block_bytes = block_bytes
        self._blocks: tuple[OrderedDict[bytes, None], ...] = tuple(OrderedDict() for _ in tiers)

    def locate(self, block: bytes) -> Tier | None:
        """The tier that the block is in; None if it is in none."""
        level = self._level(block)
        return None if level is None else self.tiers[level]

    def save(self, block: bytes) -> tuple[Move, ...]:
        """Store a block that the device evicts in the fastest tier, after making room there.

        No move when it is there already. A block in a slower tier was used again, and moves up.
        """
        level = self._level(block)
        if level == 0:
            self._blocks[0].move_to_end(block)
            return ()
        moves = []
        if level is not None:
            moves.append(self._drop(level, block))
        moves += self._make_room(0)
        self._blocks[0][block] = None
        moves.append(Move(block, DEVICE, self.tiers[0].name, self.block_bytes, self._write_seconds(0)))
        return tuple(moves)

    def restore(self, chain: Sequence[bytes], *, compute_seconds: float) -> RestorePlan:
        """Plan to load the leading blocks of a prompt's chain of hashes instead of computing them.

        `compute_seconds` is the time to compute one block. A prefix must be whole, so a slow block is loaded only
        where the blocks after it make up for it. Planned blocks count as used.
        """
        moves = tuple(self._loads(chain))
        saved = [0.0, *accumulate(compute_seconds - move.seconds for move in moves)]
        best = max(range(len(saved)), key=saved.__getitem__)
        for move in moves[:best]:
            level = self._level(move.hash)
            assert level is not None
            self._blocks[level].move_to_end(move.hash)
        return RestorePlan(moves[:best], saved[best])

    def check(self) -> None:
        """Assert the invariants: no tier over its capacity, no block in two of them."""
        for tier, blocks in zip(self.tiers, self._blocks, strict=True):
            assert len(blocks) <= tier.capacity_blocks
        assert len(set().union(*self._blocks)) == sum(map(len, self._blocks))

    def _level(self, block: bytes) -> int | None:
        return next((level for level, blocks in enumerate(self._blocks) if block in blocks), None)

    def _loads(self, chain: Sequence[bytes]) -> Iterator[Move]:
        for block in chain:
            tier = self.locate(block)
            if tier is None:
                return
            yield Move(block, tier.name, DEVICE, self.block_bytes, tier.read_seconds(self.block_bytes))

    def _make_room(self, level: int) -> list[Move]:
        """Moves that free a place in a tier: its oldest block moves to the next tier, which makes room first."""
        blocks = self._blocks[level]
        if len(blocks) < self.tiers[level].capacity_blocks:
            return []
        oldest = next(iter(blocks))
        if level + 1 == len(self.tiers):
            return [self._drop(level, oldest)]
        moves = self._make_room(level + 1)
        del blocks[oldest]
        self._blocks[level + 1][oldest] = None
        seconds = self.tiers[level].read_seconds(self.block_bytes) + self._write_seconds(level + 1)
        source, target = self.tiers[level].name, self.tiers[level + 1].name
        return [*moves, Move(oldest, source, target, self.block_bytes, seconds)]

    def _drop(self, level: int, block: bytes) -> Move:
        del self._blocks[level][block]
        return Move(block, self.tiers[level].name, None, 0, 0.0)

    def _write_seconds(self, level: int) -> float:
        return self.tiers[level].write_seconds(self.block_bytes)
