"""Blocks in pinned host memory, copied from and to the pool on a side stream while the card computes.

    compute  ──step──step──●────────────step──────○──step──        ● the side stream waits for what came before
    side     ──────────────●──save 3─○──restore 5─○────────        ○ compute waits, where a step touches the block

One copy a block. A block is not overwritten before it was saved, a step that reads a restored block waits for the copy,
and no other does; the host waits for nothing, but where it looks into a slot.

The KV pool in device memory: [blocks, block_bytes], a block with all its layers and scales in one piece.
"""

import itertools
from collections.abc import Iterable

import numpy as np

from ingot.artifact import KVGeometry
from ingot.errors import EngineError
from ingot.runtime.cuda.device import Bytes, Device, Event, Stream
from ingot.sizes import format_bytes


class DevicePool:
    """Memory for `num_blocks` blocks, zeroed. What is done to blocks is queued on the compute stream."""

    def __init__(self, device: Device, stream: Stream, geometry: KVGeometry, num_blocks: int) -> None:
        self.geometry, self.num_blocks = geometry, num_blocks
        self._device, self._stream = device, stream
        what = f"a KV pool of {num_blocks} blocks ({num_blocks * geometry.block_tokens} tokens)"
        self.address = device.allocate(self.num_bytes, what)
        device.clear(self.address, self.num_bytes, stream)
        self._passage = device.allocate_pinned(geometry.block_bytes, "a block on its way")

    @property
    def num_bytes(self) -> int:
        """Size of the pool."""
        return self.num_blocks * self.geometry.block_bytes

    def block(self, block: int) -> int:
        """Address of a block."""
        if not 0 <= block < self.num_blocks:
            raise EngineError(f"there is no block {block}: the pool has {self.num_blocks}")
        return self.address + block * self.geometry.block_bytes

    def copy_block(self, source: int, target: int) -> None:
        """Copy all of block `source` over block `target`."""
        self._device.copy(self.block(target), self.block(source), self.geometry.block_bytes, self._stream)

    def read_block(self, block: int) -> bytes:
        """A block's content. Waits for what is queued."""
        self._device.copy_out(self._passage, self.block(block), self._stream)
        self._device.synchronize(f"reading block {block}")
        return self._passage.tobytes()

    def write_block(self, block: int, content: bytes) -> None:
        """Set a block's content. Waits for what is queued."""
        if len(content) != self.geometry.block_bytes:
            raise EngineError(
                f"block {block} takes {self.geometry.block_bytes} bytes, not {len(content)}: the content is of another "
                "model or KV precision"
            )
        self._passage[:] = np.frombuffer(content, np.uint8)
        self._device.copy_in(self.block(block), self._passage, self._stream)
        self._device.synchronize(f"writing block {block}")

    def __str__(self) -> str:
        return f"{self.num_blocks} blocks of {self.geometry.block_tokens} tokens, {format_bytes(self.num_bytes)}"


class HostBlocks:
    """`num_slots` blocks of pinned host memory beside a pool."""

    def __init__(self, device: Device, compute: Stream, pool: DevicePool, num_slots: int) -> None:
        self.num_slots = num_slots
        self._device, self._compute, self._pool = device, compute, pool
        size = pool.geometry.block_bytes
        what = f"{num_slots} KV blocks in host memory ({format_bytes(num_slots * size)})"
        self._slots = device.allocate_pinned(num_slots * size, what).reshape(num_slots, size)
        self._side = device.make_stream()
        self._events: dict[int, Event] = {}  # the last copy from or to each slot
        self._saving: dict[int, Event] = {}  # by block: what compute has not waited for
        self._restoring: dict[int, Event] = {}
        self._now = device.make_event()

    @property
    def pending(self) -> bool:
        """Whether compute may have to wait for a copy."""
        return bool(self._saving or self._restoring)

    def save(self, block: int, slot: int) -> None:
        """Copy a block, as the steps queued so far leave it, to a slot."""
        self._begin(slot)
        self._device.copy_out(self._slots[slot], self._pool.block(block), self._side)
        self._saving[block] = self._end(slot)

    def restore(self, slot: int, block: int) -> None:
        """Copy a slot to a block, behind the steps queued so far and before those that touch the block."""
        self._begin(slot)
        self._device.copy_in(self._pool.block(block), self._slots[slot], self._side)
        self._restoring[block] = self._end(slot)

    def before_use(self, read: Iterable[int], written: Iterable[int]) -> None:
        """Let compute wait for what it may not overtake, before it reads and writes these blocks."""
        if self._saving:
            self._wait(self._saving, written)
        if self._restoring:
            self._wait(self._restoring, itertools.chain(read, written))

    def read(self, slot: int) -> bytes:
        """A slot's content. Waits for its last copy."""
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
            raise EngineError(f"there is no slot {slot}: host memory has {self.num_slots}")
