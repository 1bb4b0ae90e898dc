"""KV blocks in pinned host memory, copied from and to the pool while the GPU computes; the host never waits.

    compute  ──step 7──────────────step 8 ─────────────step 9──
                       ╲ writes 3          ╲ reads 5                 a copy waits for the last step that matters to it
    save     ───────────●─3─12─40─│────────────────────────────      │ one event for all copies since the last poll
    restore  ──────6─19─│───────────────────●─5─21─│───────────

A block is one run of bytes in the pool, all layers and scales, and so is a slot: blocks and slots that follow each
other are one copy, which the link moves at a higher rate than one for each block. It begins with the next step or poll,
or when it cannot grow. All that moves between two polls in one direction takes a few calls more (a wait, two events, a
query, a time). Each direction has a stream, because the link carries both at once. A save waits for the step that
writes its block; a restore for the last step or copy that uses its target (`block_uses.py`). No step waits for a copy:
the caller uses a block again only when its transfer is done, which the GPU has then reached.

Only so much is begun at a time; the rest waits on the host, where it can be cancelled.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ingot.artifact.kv_geometry import BlockRun
from ingot.errors import EngineError
from ingot.runtime.cpu.kv_pool import physical_bytes
from ingot.runtime.cuda.block_uses import BlockUses, QueuedWork
from ingot.runtime.cuda.driver.device import Bytes, Device, Event, Stream
from ingot.runtime.cuda.kv_pool import DevicePool, DeviceStates
from ingot.runtime.forward_batch import Int32Array, Int64Array
from ingot.runtime.kv.transfers.transfer import Cancelled
from ingot.sizes import format_bytes

MOST_BEGUN_BYTES = 512 * 2**20  # in one direction: 10 to 20 ms of a link, which is polled once in a step
MOST_BEGUN = 512  # calls of the driver between two polls: small blocks must not hold up the step that follows


class BlockTransfer:
    """One copy of a block. Implements `ingot.runtime.kv.transfers.transfer.Transfer`."""

    __slots__ = ("_owner", "_seen", "begun", "block", "ended", "error", "seconds", "slot")

    def __init__(self, owner: "PinnedBlocks", block: int, slot: int) -> None:
        self._owner, self.block, self.slot = owner, block, slot
        self._seen = owner.num_polls
        self.begun = self.ended = False
        self.error: Exception | None = None
        self.seconds = 0.0

    @property
    def done(self) -> bool:
        """Whether it has ended. However many transfers are asked in turn, the device is polled once."""
        if not self.ended and self._seen == self._owner.num_polls:
            self._owner.poll()
        self._seen = self._owner.num_polls
        return self.ended

    def cancel(self) -> bool:
        """Drop it if it waits on the host."""
        return self._owner.cancel(self)

    def end(self, error: Exception | None = None) -> None:
        """Record the outcome."""
        self.error, self.ended = error, True


@dataclass(slots=True, eq=False)
class _Batch:
    """Copies that were begun one after the other, between two timed events."""

    first: Event
    last: Event
    transfers: list[BlockTransfer] = field(default_factory=list)


@dataclass(frozen=True)
class SlotLayout:
    """Bytes of a slot, and the places in it of a pool's part of a block; see `KVGeometry.block_runs`."""

    slot_bytes: int
    runs: tuple[BlockRun, ...]


class PinnedBlocks:
    """`num_slots` blocks of pinned host memory for a pool. Implements `ingot.runtime.kv.transfers.transfer.HostBlocks`.

    Of a pool of side states, a block is a slot. `slots` is the memory, [slots, slot bytes].

    Any thread may call it. Raises EngineError, naming kv_host_bytes, when the machine has too little memory.
    """

    def __init__(
        self,
        device: Device,
        compute: Stream,
        pool: DevicePool | DeviceStates,
        num_slots: int,
        layout: SlotLayout | None = None,
    ) -> None:
        assert num_slots > 0
        self.num_slots = num_slots
        self.threads = ()  # the device copies
        self.num_polls = 0
        layout = layout or SlotLayout(pool.block_bytes, (BlockRun(0, 0, pool.block_bytes),))
        size = layout.slot_bytes
        self._device, self._num_blocks = device, pool.num_blocks
        self.slots = _allocate(device, num_slots, size, pool.things)
        self._uses = BlockUses(device, compute, pool.num_blocks)
        self._lock = threading.RLock()
        self._failure: EngineError | None = None
        self._closed = False

        num_fast = pool.num_fast if isinstance(pool, DevicePool) else pool.num_blocks

        def copies(block: int, slot: int, count: int) -> Iterator[tuple[int, Bytes]]:
            """The address in the pool and the bytes in the slots of each copy of neighbours."""
            if layout.runs != (BlockRun(0, 0, size),):
                for at in range(count):
                    for part, whole, length in layout.runs:
                        yield pool.block(block + at) + part, self.slots[slot + at, whole : whole + length]
                return
            # Neighbours of the fast and of the slow part, which are memory of two kinds, are two copies.
            middle = min(max(num_fast - block, 0), count)
            for begin, end in ((0, middle), (middle, count)):
                if begin < end:
                    yield pool.block(block + begin), self.slots[slot + begin : slot + end].reshape(-1)

        def save(block: int, slot: int, count: int, stream: Stream) -> None:
            for address, memory in copies(block, slot, count):
                device.copy_out(memory, address, stream)

        def restore(block: int, slot: int, count: int, stream: Stream) -> None:
            for address, memory in copies(block, slot, count):
                device.copy_in(address, memory, stream)

        most = max(1, min(MOST_BEGUN, MOST_BEGUN_BYTES // size))
        self._saves = _CopyQueue(device, save, self._uses.last_write, most)
        self._restores = _CopyQueue(device, restore, self._uses.last_use, most)

    def save(self, block: int, slot: int) -> BlockTransfer:
        """Queue a copy of a block to a slot, as the steps queued so far leave it."""
        return self._queue(self._saves, block, slot)

    def restore(self, slot: int, block: int) -> BlockTransfer:
        """Queue a copy of a slot to a block, after the steps and copies queued so far have used the block."""
        return self._queue(self._restores, block, slot)

    def view(self, slot: int) -> Bytes:
        """The slot's bytes [block_bytes], writable."""
        view: Bytes = self.slots[slot]
        return view

    def add_step(self, tables: Int32Array, written: Int64Array) -> None:
        """Record the blocks that a step uses, once it is queued on the compute stream; see `BlockUses.add_step`."""
        with self._lock:
            self._uses.add_step(tables, written)
            if self._failure or self._closed:
                return
            self._call(self._saves.flush, self._restores.flush)

    def add_copy(self, source: int, target: int) -> None:
        """Record a copy within the pool that was queued on the compute stream."""
        with self._lock:
            self._uses.add_copy(source, target)

    def poll(self) -> None:
        """Note which copies are complete, and begin those that wait."""
        with self._lock:
            self.num_polls += 1
            if self._failure or self._closed or not (self._saves.is_moving or self._restores.is_moving):
                return
            self._call(self._saves.poll, self._restores.poll)

    def cancel(self, transfer: BlockTransfer) -> bool:
        """Drop a transfer that waits on the host."""
        with self._lock:
            if transfer.begun or transfer.ended:
                return False
            transfer.end(Cancelled("the transfer was cancelled before it began"))
            return True

    def check(self) -> None:
        """Raise EngineError if the GPU can copy no more blocks."""
        if self._failure and not self._closed:
            raise EngineError(
                f"KV blocks can no longer be copied between the GPU and host memory ({self._failure}); load the engine"
                " again"
            ) from self._failure

    def close(self) -> None:
        """Copy what is queued, wait for it, and free the memory. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._call(self._saves.finish, self._restores.finish)
            self._closed = True
            self.slots = np.empty((0, 0), np.uint8)

    def _queue(self, queue: "_CopyQueue", block: int, slot: int) -> BlockTransfer:
        assert not self._closed
        assert 0 <= slot < self.num_slots
        assert 0 <= block < self._num_blocks
        transfer = BlockTransfer(self, block, slot)
        with self._lock:
            if self._failure:
                transfer.end(self._failure)
                return transfer
            self._call(partial(queue.add, transfer))
        return transfer

    def _call(self, *calls: Callable[[], object]) -> None:
        """Let these call the driver. Its error ends all transfers, as none can be known to be complete.

        `check` then ends the engine.
        """
        try:
            self._device.activate()
            for call in calls:
                call()
        except EngineError as error:
            self._failure = self._failure or error
            self._saves.fail(error)
            self._restores.fail(error)


class _CopyQueue:
    """Copies in one direction, in order, on a stream of their own.

    copy        queues that of neighbours: (first block, first slot, number, stream)
    must_wait   the work on the compute stream that the copy of a block waits for
    most_begun  copies on the stream at a time
    """

    def __init__(
        self,
        device: Device,
        copy: Callable[[int, int, int, Stream], None],
        must_wait: Callable[[int], QueuedWork | None],
        most_begun: int,
    ) -> None:
        self._waiting: deque[BlockTransfer] = deque()
        self._device, self._copy, self._must_wait, self._most_begun = device, copy, must_wait, most_begun
        self._stream = device.make_stream()
        self._open: _Batch | None = None
        # The next copy: neighbours, which are in the open batch.
        self._run: list[BlockTransfer] = []
        self._begun: deque[_Batch] = deque()  # oldest first, without the open one
        self._num_begun = 0
        self._was_collected = False  # by `add`, since the last poll
        self._waited_for = 0  # number of the newest work that the stream waits for
        self._free: list[_Batch] = []  # whose events can be used again

    @property
    def is_moving(self) -> bool:
        """Whether any copy waits or is on the stream."""
        return bool(self._waiting or self._open or self._begun)

    def add(self, transfer: BlockTransfer) -> None:
        """Begin a copy, or let it wait while the stream is full.

        Before the first that would wait, the device is queried: what it has completed since the last poll makes room.
        Those that follow until the next poll rely on that, so that a thousand of them cost one query.
        """
        self._waiting.append(transfer)
        if self._num_begun >= self._most_begun and not self._was_collected:
            self._was_collected = True
            self._collect()
        self._begin_waiting()

    def poll(self) -> None:
        """End the transfers that are complete, and begin as many of those that wait."""
        self._was_collected = False
        self._collect()
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Put waiting copies on the stream, as many as may be there. One that the driver refuses fails alone."""
        while self._waiting and self._num_begun < self._most_begun:
            transfer = self._waiting[0]
            if not transfer.ended:
                self._begin(transfer)
            self._waiting.popleft()

    def _collect(self) -> None:
        """End the transfers of complete batches."""
        self._seal()
        while self._begun and self._device.reached(self._begun[0].last):
            batch = self._begun[0]
            seconds = self._device.seconds_between(batch.first, batch.last) / max(1, len(batch.transfers))
            self._begun.popleft()
            self._num_begun -= len(batch.transfers)
            for transfer in batch.transfers:
                transfer.seconds = seconds
                transfer.end()
            batch.transfers.clear()
            self._free.append(batch)

    def finish(self) -> None:
        """Make all copies, and wait for them."""
        while self.is_moving:
            self._begin_waiting()
            self._seal()
            for batch in self._begun:
                self._device.wait_on_host(batch.last, "copies of KV blocks")
            self._collect()

    def fail(self, error: EngineError) -> None:
        """End all transfers with an error."""
        batches = [*self._begun, *([self._open] if self._open else [])]
        for transfer in (*self._waiting, *(each for batch in batches for each in batch.transfers)):
            if not transfer.ended:
                transfer.end(error)
        self._waiting.clear()
        self._begun.clear()
        self._run.clear()
        self._open = None

    def _begin(self, transfer: BlockTransfer) -> None:
        work, last = self._must_wait(transfer.block), self._run[-1] if self._run else None
        if last and (transfer.block, transfer.slot) != (last.block + 1, last.slot + 1):
            self.flush()
        batch = self._batch_after(work)
        transfer.begun = True
        self._run.append(transfer)
        batch.transfers.append(transfer)
        self._num_begun += 1

    def flush(self) -> None:
        """Queue the copy of the neighbours that were begun. If the driver refuses it, they fail and no others."""
        run, self._run = self._run, []
        if not run or self._open is None:
            return
        try:
            self._copy(run[0].block, run[0].slot, len(run), self._stream)
        except EngineError as error:
            for transfer in run:
                transfer.end(error)
                self._open.transfers.remove(transfer)
            self._num_begun -= len(run)

    def _batch_after(self, work: QueuedWork | None) -> _Batch:
        """The batch that a copy joins; a new one where the stream has to wait first, so that times are of copies."""
        if work and work.number > self._waited_for:
            self._seal()
            self._device.wait(self._stream, work.event)
            self._waited_for = work.number
        if self._open is None:
            make = self._device.make_event
            self._open = self._free.pop() if self._free else _Batch(make(timed=True), make(timed=True))
            self._device.record(self._open.first, self._stream)
        return self._open

    def _seal(self) -> None:
        self.flush()
        if self._open:
            self._device.record(self._open.last, self._stream)
            self._begun.append(self._open)
            self._open = None


def _allocate(device: Device, num_slots: int, block_bytes: int, things: str) -> Bytes:
    size = num_slots * block_bytes
    what = f"host memory for {num_slots} {things} (kv_host_bytes)"
    if size > physical_bytes():
        raise EngineError(
            f"{what} takes {format_bytes(size)}, and this machine has {format_bytes(physical_bytes())}; give"
            " kv_host_bytes less, or keep blocks on disk (kv_disk_path)"
        )
    slots: Bytes = device.allocate_pinned(size, what).reshape(num_slots, block_bytes)
    return slots
