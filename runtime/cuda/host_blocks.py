"""KV blocks in pinned host memory, copied from and to the pool on a side stream while the GPU computes.

    compute  ──step──step──●────────────step──────○──step──        ● the side stream waits for earlier steps
    side     ──────────────●──save 3─○──restore 5─○────────        ○ compute waits, if a step uses the block

Each block is one copy. A block is not overwritten before it is saved, and only a step that reads a restored block
waits for its copy. The host waits only when it reads or writes a slot.
"""

import itertools
from collections.abc import Iterable

import numpy as np

from ingot.errors import EngineError
from ingot.runtime.cuda.device import Bytes, Device, Event, Stream
from ingot.runtime.cuda.kv_pool import DevicePool
from ingot.sizes import format_bytes


class HostBlocks:
    """`num_slots` blocks of pinned host memory for a pool."""

    def __init__(self, device: Device, compute: Stream, pool: DevicePool, num_slots: int) -> None:
        self.num_slots = num_slots
        self._device, self._compute, self._pool = device, compute, pool
        size = pool.geometry.block_bytes
        what = f"{num_slots} KV blocks in host memory ({format_bytes(num_slots * size)})"
        self._slots = device.allocate_pinned(num_slots * size, what).reshape(num_slots, size)
        self._side = device.make_stream()
        self._events: dict[int, Event] = {}  # the last copy from or to each slot
        self._saving: dict[int, Event] = {}  # by block: copies that compute has not waited for
        self._restoring: dict[int, Event] = {}
        self._now = device.make_event()

    @property
    def pending(self) -> bool:
        """Whether compute may have to wait for a copy."""
        return bool(self._saving or self._restoring)

    def save(self, block: int, slot: int) -> None:
        """Copy a block to a slot, as the steps queued so far leave it."""
        self._begin(slot)
        self._device.copy_out(self._slots[slot], self._pool.block(block), self._side)
        self._saving[block] = self._end(slot)

    def restore(self, slot: int, block: int) -> None:
        """Copy a slot to a block, after the steps queued so far and before later steps that use the block."""
        self._begin(slot)
        self._device.copy_in(self._pool.block(block), self._slots[slot], self._side)
        self._restoring[block] = self._end(slot)

    def before_use(self, read: Iterable[int], written: Iterable[int]) -> None:
        """Make compute wait for pending copies of these blocks, before a step that reads and writes them."""
        if self._saving:
            self._wait(self._saving, written)
        if self._restoring:
            self._wait(self._restoring, itertools.chain(read, written))

    def read(self, slot: int) -> bytes:
        """Return a slot's content. Waits for its last copy."""
        return self._settled(slot).tobytes()

    def write(self, slot: int, content: bytes) -> None:
        """Set a slot's content. Waits for its last copy."""
        target = self._settled(slot)
        if len(content) != len(target):
            raise EngineError(
                f"slot {slot} takes {len(target)} bytes, not {len(content)}: the content is of another model or KV "
                "precision"
            )
        target[:] = np.frombuffer(content, np.uint8)

    def _begin(self, slot: int) -> None:
        self._check(slot)
        self._device.record(self._now, self._compute)
        self._device.wait(self._side, self._now)

    def _end(self, slot: int) -> Event:
        if slot not in self._events:
            self._events[slot] = self._device.make_event()
        self._device.record(self._events[slot], self._side)
        return self._events[slot]

    def _wait(self, copies: dict[int, Event], blocks: Iterable[int]) -> None:
        for block in copies.keys() & set(blocks):
            self._device.wait(self._compute, copies.pop(block))

    def _settled(self, slot: int) -> Bytes:
        self._check(slot)
        if slot in self._events:
            self._device.wait_on_host(self._events[slot], f"the copy of slot {slot}")
        view: Bytes = self._slots[slot]
        return view

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise EngineError(f"slot {slot} does not exist: host memory has {self.num_slots}")
