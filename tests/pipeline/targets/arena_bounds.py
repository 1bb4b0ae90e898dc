"""Bounds of the sizes of an arena."""

from collections.abc import Mapping

from ingot.pipeline.targets.arena import ALIGNMENT, Lifetime
from ingot.sizes import round_up


def least_bytes(buffers: Mapping[str, Lifetime]) -> int:
    """Return the lower bound of every plan: the largest sum of sizes at one step."""
    steps = {lifetime.first for lifetime in buffers.values()}
    living = ([b for b in buffers.values() if b.first <= step <= b.last] for step in steps)
    return max((sum(round_up(b.bytes, ALIGNMENT) for b in alive) for alive in living), default=0)
