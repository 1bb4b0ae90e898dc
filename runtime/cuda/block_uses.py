"""Which steps and copies that the GPU has not reached yet use a block of the pool.

A copy from or to a block waits for the newest of these that matters to it, and for nothing else that is queued. A step
is recorded with its block tables as they are, a few microseconds; they are searched only when a block moves. What the
GPU has reached is forgotten.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ingot.runtime.cuda.driver.device import Device, Event, Stream
from ingot.runtime.forward_batch import Int32Array, Int64Array

Blocks = Int32Array | Int64Array  # of any shape; -1 for none


@dataclass(slots=True, eq=False)
class QueuedWork:
    """A step on the compute stream and the copies within the pool before it; `event` marks their end."""

    number: int
    event: Event
    is_marked: bool = False
    used: list[Blocks] = field(default_factory=list)
    written: list[Blocks] = field(default_factory=list)
    index: NDArray[np.bool_] | None = None  # [blocks + 1], whether each is in `used`; made when it is first needed


class BlockUses:
    """Records uses in the order in which they are queued on `compute`; one thread may call it at a time."""

    def __init__(self, device: Device, compute: Stream, num_blocks: int) -> None:
        self._device, self._compute, self._num_blocks = device, compute, num_blocks
        self._queued: deque[QueuedWork] = deque()  # oldest first; only the newest may be unmarked
        self._free: list[Event] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._queued)

    def add_copy(self, source: int, target: int) -> None:
        """Record a copy within the pool that was queued."""
        self._add(np.array([source, target]), np.array([target]))

    def add_step(self, tables: Int32Array, written: Int64Array) -> None:
        """Record a step that was queued: its tables, which may change later, and the blocks that it writes.

        EngineError when earlier work on the GPU failed.
        """
        self._add(tables.copy(), written)
        self._mark(self._queued[-1])
        while self._queued and self._queued[0].is_marked and self._device.reached(self._queued[0].event):
            self._free.append(self._queued.popleft().event)

    def last_use(self, block: int) -> QueuedWork | None:
        """The newest queued work that reads or writes a block, marked; None if nothing does."""
        return self._newest(work for work in reversed(self._queued) if self._uses(work, block))

    def last_write(self, block: int) -> QueuedWork | None:
        """The newest queued work that writes a block, marked; None if nothing does."""
        return self._newest(
            work for work in reversed(self._queued) if any((blocks == block).any() for blocks in work.written)
        )

    def _add(self, used: Blocks, written: Blocks) -> None:
        if not self._queued or self._queued[-1].is_marked:
            self._number += 1
            event = self._free.pop() if self._free else self._device.make_event()
            self._queued.append(QueuedWork(self._number, event))
        work = self._queued[-1]
        work.used += (used, written)
        work.written.append(written)
        work.index = None

    def _newest(self, found: Iterator[QueuedWork]) -> QueuedWork | None:
        work = next(found, None)
        if work:
            self._mark(work)
        return work

    def _mark(self, work: QueuedWork) -> None:
        if not work.is_marked:
            work.is_marked = True
            self._device.record(work.event, self._compute)

    def _uses(self, work: QueuedWork, block: int) -> bool:
        if work.index is None:
            work.index = np.zeros(self._num_blocks + 1, np.bool_)  # the last one is for -1
            for blocks in work.used:
                work.index[blocks.reshape(-1)] = True
        return bool(work.index[block])
