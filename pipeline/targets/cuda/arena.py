"""Where each buffer lies in one arena, so that no two that live at one time overlap.

Buffers go by falling size; each takes the lowest place where no buffer of an overlapping lifetime lies (greedy by size,
Pisarchyk and Lee, arXiv:2001.03288, who find it within a few per cent of the lower bound on networks). The largest sum
of sizes that live at one time is that bound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ingot.sizes import round_up

ALIGNMENT = 256  # bytes: what cudaMalloc gives, and every vector load asks for


@dataclass(frozen=True)
class Lifetime:
    """A buffer's bytes, and the first and the last step that use it."""

    bytes: int
    first: int
    last: int

    def overlaps(self, other: "Lifetime") -> bool:
        """Whether both live at some step."""
        return self.first <= other.last and other.first <= self.last


def lifetimes(uses: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> dict[str, Lifetime]:
    """Lifetimes of the buffers in `sizes` from the names that each step uses."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for step, names in enumerate(uses):
        for name in names:
            first.setdefault(name, step)
            last[name] = step
    return {name: Lifetime(size, first[name], last[name]) for name, size in sizes.items() if name in first}


def plan_arena(buffers: Mapping[str, Lifetime]) -> dict[str, int]:
    """Offset of each buffer in bytes, a multiple of ALIGNMENT."""
    placed: dict[str, int] = {}
    for name in sorted(buffers, key=lambda name: (-buffers[name].bytes, buffers[name].first, name)):
        taken = sorted(
            (offset, offset + round_up(buffers[other].bytes, ALIGNMENT))
            for other, offset in placed.items()
            if buffers[name].overlaps(buffers[other])
        )
        placed[name] = _lowest_gap(taken, round_up(buffers[name].bytes, ALIGNMENT))
    return placed


def arena_bytes(buffers: Mapping[str, Lifetime], offsets: Mapping[str, int]) -> int:
    """Size of the arena."""
    return max((offset + round_up(buffers[name].bytes, ALIGNMENT) for name, offset in offsets.items()), default=0)


def least_bytes(buffers: Mapping[str, Lifetime]) -> int:
    """What no plan can go below: the largest sum of sizes at one step."""
    steps = {lifetime.first for lifetime in buffers.values()}
    living = ([b for b in buffers.values() if b.first <= step <= b.last] for step in steps)
    return max((sum(round_up(b.bytes, ALIGNMENT) for b in alive) for alive in living), default=0)


def _lowest_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    at = 0
    for start, end in taken:
        if start - at >= size:
            break
        at = max(at, end)
    return at
