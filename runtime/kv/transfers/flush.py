"""A flush: all that is cached goes to the lowest tier, for as long as that advances.

With a disk, what the device and host memory have is written there. Its length depends on the disk and on the size of
the tiers, so it is not bounded by a fixed time: it ends when nothing has reached its tier for `STALL_SECONDS`, and
earlier only where the caller sets a limit.
"""

import time
from collections.abc import Callable, Sequence

from ingot.runtime.kv.pool_tiers import PoolTiers
from ingot.runtime.kv.transfers.saves import Saves

STALL_SECONDS = 30.0  # without a block that reaches its tier


class Flush:
    """One flush of several pools, each with what saves it. Its owner guards it with a lock, and advances it.

    seconds   most that it takes; None: as long as it advances
    """

    def __init__(
        self,
        pools: Sequence[tuple[Saves, PoolTiers]],
        seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools, self._seconds, self._clock = pools, seconds, clock
        self._failed_before = [tiers.num_failed for _, tiers in pools]
        for saves, _ in pools:
            saves.begin_flush()
        self._num_ended = -1
        self._started = self._advanced = clock()
        self.is_done = False  # nothing is left: it was stored, or failed

    def advance(self) -> bool:
        """Begin to store what there is room for; returns whether to go on."""
        for saves, _ in self._pools:
            saves.flush()
        self.is_done = not any(saves.has_unflushed for saves, _ in self._pools)
        num_ended = sum(tiers.num_ended for _, tiers in self._pools)
        if num_ended != self._num_ended:
            self._num_ended, self._advanced = num_ended, self._clock()
        return not (self.is_done or self.reason)

    @property
    def reason(self) -> str:
        """Why it has to be given up; empty while it advances."""
        now = self._clock()
        if self._seconds is not None and now - self._started >= self._seconds:
            return f"the limit of {self._seconds:g} seconds was reached"
        refusal = next((tiers.disk_refusal for _, tiers in self._pools if tiers.disk_refusal), None)
        if refusal:
            return refusal
        if now - self._advanced >= STALL_SECONDS:
            return f"none was written for {STALL_SECONDS:g} seconds"
        return ""

    def lost(self) -> list[set[bytes]]:
        """For each pool, keys of what it holds that is not stored, because time was up or transfers failed.

        A write that has begun may still end, so what is stored by then is not lost.
        """
        pairs = zip(self._pools, self._failed_before, strict=True)
        return [
            saves.unflushed | (saves.unstored() if tiers.num_failed > before else set())
            for (saves, tiers), before in pairs
        ]
