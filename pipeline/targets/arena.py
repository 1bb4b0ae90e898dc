"""Plans the offsets of buffers in one arena so that no two buffers overlap that are alive at the same step.

Greedy by size: buffers are placed from the largest to the smallest, each at the lowest offset that is free during its
lifetime (Pisarchyk and Lee, arXiv:2001.03288, who find it within a few percent of the lower bound on networks). The
lower bound is the largest sum of sizes that are alive at one step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ingot.sizes import round_up

ALIGNMENT = 256  # bytes: as cudaMalloc aligns, and enough for every vector load and cache line


@dataclass(frozen=True)
class Lifetime:
    """A buffer's bytes, and the first and last step that use it."""

    bytes: int
    first: int
    last: int

    def overlaps(self, other: "Lifetime") -> bool:
        """Report whether both are alive at some step."""
        return self.first <= other.last and other.first <= self.last


def lifetimes(uses: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> dict[str, Lifetime]:
    """Return lifetimes of the buffers in `sizes`, from the names that each step uses."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for step, names in enumerate(uses):
        for name in names:
            first.setdefault(name, step)
            last[name] = step
    return {name: Lifetime(size, first[name], last[name]) for name, size in sizes.items() if name in first}


def plan_arena(buffers: Mapping[str, Lifetime]) -> dict[str, int]:
    """Return the offset of each buffer in bytes, a multiple of ALIGNMENT."""
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
    """Return the size of the arena."""
    return max((offset + round_up(buffers[name].bytes, ALIGNMENT) for name, offset in offsets.items()), default=0)


def _lowest_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    at = 0
    for start, end in taken:
        if start - at >= size:
            break
        at = max(at, end)
    return at
