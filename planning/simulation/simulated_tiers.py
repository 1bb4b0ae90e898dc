"""Host memory of a simulated engine: blocks move one after the other, at the speed of a link, in virtual time."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.runtime.clock import Clock
from ingot.runtime.executors import Executor, TieredExecutor
from ingot.runtime.kv.blocks import BlockManager
from ingot.runtime.kv.cost_model import CostModel
from ingot.runtime.kv.tiers import TierManager
from ingot.runtime.kv.transfers.transfer import Bytes, Cancelled, Task
from ingot.runtime.options import EngineOptions


@dataclass(frozen=True)
class CopyLink:
    """A way for bytes: what a copy takes, and what each byte adds. The default is PCIe 4.0 x16 as it is measured."""

    bytes_per_second: float = 25e9
    latency_seconds: float = 10e-6

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of one copy."""
        return self.latency_seconds + num_bytes / self.bytes_per_second


PCIE = CopyLink()


class SimulatedCopy:
    """A copy that ends at a moment of a clock. Implements `Transfer`."""

    def __init__(self, clock: Callable[[], float], begins: float, seconds: float) -> None:
        self._clock, self._begins, self.ends, self.seconds = clock, begins, begins + seconds, seconds
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        """Return True once it has ended."""
        return self.error is not None or self._clock() >= self.ends

    def cancel(self) -> bool:
        """Drop it if it has not begun."""
        if self.error is None and self._clock() < self._begins:
            self.error = Cancelled("the transfer was cancelled before it began")
            return True
        return False


class SimulatedHostBlocks:
    """Slots without bytes. Each direction has a link of its own. Implements `HostBlocks`."""

    threads: Sequence[threading.Thread] = ()

    def __init__(self, num_slots: int, block_bytes: int, link: CopyLink, clock: Callable[[], float]) -> None:
        self.num_slots = num_slots
        self._seconds = link.seconds(block_bytes)
        self._clock = clock
        self._free_at = {"save": 0.0, "restore": 0.0}
        self._unread = np.zeros(1, np.uint8)

    def save(self, block: int, slot: int) -> SimulatedCopy:
        """Queue a copy to the host."""
        return self._queue("save")

    def restore(self, slot: int, block: int) -> SimulatedCopy:
        """Queue a copy to the device."""
        return self._queue("restore")

    def _queue(self, way: str) -> SimulatedCopy:
        copy = SimulatedCopy(self._clock, max(self._clock(), self._free_at[way]), self._seconds)
        self._free_at[way] = copy.ends
        return copy

    def view(self, slot: int) -> Bytes:
        """Bytes that nothing reads."""
        return self._unread

    def check(self) -> None:
        """Find nothing wrong."""

    def close(self) -> None:
        """Hold nothing."""


class NoThreads:
    """Runs what is queued at once. Implements `TaskQueue`."""

    threads: Sequence[threading.Thread] = ()

    def submit(self, run: Callable[[], object]) -> Task:
        """Run a call."""
        task = Task(run)
        task.run()
        return task

    def check(self) -> None:
        """Find nothing wrong."""

    def close(self, seconds: float | None = None) -> bool:
        """End nothing."""
        return True


def simulated_tiers(
    executor: Executor, blocks: BlockManager, root: bytes, *, num_slots: int, options: EngineOptions, clock: Clock
) -> TierManager:
    """Make tiers whose copies take virtual time; what a block takes is known from the start, as after a measurement."""
    assert isinstance(executor, TieredExecutor)
    host, costs = executor.host_blocks(num_slots), CostModel(blocks.block_tokens, options.kv_restore)
    costs.observe_block("host", host.restore(0, 0).seconds)
    return TierManager(
        blocks,
        host,
        costs,
        block_bytes=executor.kv_geometry.block_bytes,
        policy=options.kv_policy,
        threads=lambda name, count: NoThreads(),
        clock=clock,
    )
