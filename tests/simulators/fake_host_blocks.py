"""Host memory of the fake executor, with copies that end when they like, in any order, and fail if they are to.

A copy is torn: its first half is made when it begins, its second half when it ends. In between, and after a failure,
the target holds damaged marks. So a step that uses a block before its copy has ended, a block that is written while it
is saved, and a failed copy that counts as complete all change tokens.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ingot.errors import EngineError
from ingot.runtime.kv.keys import BlockContent
from ingot.runtime.kv.tier_metrics import DiskMetrics
from ingot.runtime.kv.transfers.transfer import Bytes, Cancelled, Task

if TYPE_CHECKING:
    from tests.simulators.fake_executor import FakeExecutor

_DAMAGED = 0xBD


@dataclass
class Transfers:
    """How transfers behave: the chance that one moves on when it is polled, and that it fails."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    moves: float = 1.0
    fails: float = 0.0
    is_dead: bool = False  # the thread that copies has died

    def move_on(self) -> bool:
        """Whether a transfer moves on now."""
        return self.rng.random() < self.moves

    def fail(self) -> bool:
        """Whether a transfer fails."""
        return self.rng.random() < self.fails


class FakeTransfer:
    """One copy. `done` moves it on."""

    seconds = 1e-6

    def __init__(self, owner: "FakeHostBlocks", source: Bytes, target: Bytes, may_begin: Callable[[], bool]) -> None:
        self._owner, self._source, self._target, self._may_begin = owner, source, target, may_begin
        self._half = len(source) // 2
        self._begun = self.ended = False
        self.fails = False  # whatever the chance of it
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended; moves it on by a step, or not."""
        if not self.ended and self._owner.behaviour.move_on():
            self.move_on()
        return self.ended

    def move_on(self) -> None:
        """Begin, or end."""
        if not self._begun and self._may_begin():
            self._begun = True
            self._target[:] = _DAMAGED
            self._target[: self._half] = self._source[: self._half]
        elif self._begun and not self.ended:
            self.ended = True
            if self._owner.behaviour.fail() or self.fails:
                self._target[:] = _DAMAGED
                self.error = EngineError("the copy failed")
            else:
                self._target[self._half :] = self._source[self._half :]

    def cancel(self) -> bool:
        """Drop it if it has not begun."""
        if self._begun or self.ended:
            return False
        self.ended, self.error = True, Cancelled("dropped")
        return True


class FakeHostBlocks:
    """Slots for the blocks of a fake executor, or for its side states.

    place          the bytes of a block, or of a state's slot on the device
    waits_to_save  whether a save waits for what is queued; blocks are computed before they are saved, states may not be
    """

    def __init__(
        self,
        executor: "FakeExecutor",
        num_slots: int,
        behaviour: Transfers,
        *,
        place: Callable[[int], Bytes],
        num_bytes: int,
        waits_to_save: bool = False,
    ) -> None:
        self.num_slots = num_slots
        self.threads = ()
        self.behaviour = behaviour
        self._executor = executor
        self._place = place
        self._waits_to_save = waits_to_save
        self._slots = np.zeros((num_slots, num_bytes), np.uint8)
        self._saves: dict[int, FakeTransfer] = {}  # the last to each slot
        self._restores: dict[int, list[FakeTransfer]] = {}
        self.closed = False

    def save(self, block: int, slot: int) -> FakeTransfer:
        """Queue a copy of a block to a slot that has no transfer."""
        self.view(slot)
        assert all(restore.ended for restore in self._restores.pop(slot, ())), f"slot {slot} is overwritten while read"
        num_queued = self._executor.num_queued if self._waits_to_save else 0
        source = self._place(block)
        self._saves[slot] = self._queue(source, self._slots[slot], lambda: self._executor.work_until(num_queued))
        return self._saves[slot]

    def restore(self, slot: int, block: int) -> FakeTransfer:
        """Queue a copy of a slot, which begins after the steps that were queued before."""
        num_queued = self._executor.num_queued
        target = self._place(block)
        transfer = self._queue(self.view(slot), target, lambda: self._executor.has_worked(num_queued))
        self._restores.setdefault(slot, []).append(transfer)
        return transfer

    def view(self, slot: int) -> Bytes:
        """A slot's bytes; AssertionError while it is being written."""
        assert slot not in self._saves or self._saves[slot].ended, f"slot {slot} is used while it is written"
        view: Bytes = self._slots[slot]
        return view

    def check(self) -> None:
        """Raise EngineError when the thread that copies has died."""
        if self.behaviour.is_dead:
            raise EngineError("the thread that copies has died")

    def close(self) -> None:
        """End all copies that can."""
        for transfer in [*self._saves.values(), *(each for some in self._restores.values() for each in some)]:
            for _ in range(2):
                transfer.move_on()
        self.closed = True

    def _queue(self, source: Bytes, target: Bytes, may_begin: Callable[[], bool]) -> FakeTransfer:
        assert not self.closed
        return FakeTransfer(self, source, target, may_begin)


class SlowTask(Task):
    """A task that runs when it is polled often enough."""

    __slots__ = ("_behaviour", "_ended")

    def __init__(self, run: Callable[[], object], behaviour: Transfers) -> None:
        self._ended = False
        super().__init__(run)
        self._behaviour = behaviour

    @property
    def done(self) -> bool:
        """Whether it has ended; runs it, or not."""
        if not self._ended and self._behaviour.move_on():
            self.run()
        return self._ended

    @done.setter
    def done(self, value: bool) -> None:
        self._ended = value


class SlowWorkers:
    """Stands in for `transfer.Workers` without threads: tasks run in any order."""

    def __init__(self, behaviour: Transfers) -> None:
        self._behaviour = behaviour
        self._tasks: list[SlowTask] = []
        self.threads = ()

    def submit(self, run: Callable[[], object]) -> SlowTask:
        """Queue a call."""
        self._tasks.append(SlowTask(run, self._behaviour))
        return self._tasks[-1]

    def check(self) -> None:
        """Raise EngineError when the threads have died."""
        if self._behaviour.is_dead:
            raise EngineError("a thread that reads blocks has died")

    def close(self, seconds: float | None = None) -> bool:
        """Run what is left."""
        for task in self._tasks:
            task.run()
        return True


class FakeStore:
    """Blocks in a dict that outlives its engines. Reading may miss, or leave damaged bytes and fail."""

    def __init__(self, behaviour: Transfers | None = None, max_blocks: int = 1 << 30) -> None:
        self.behaviour = behaviour or Transfers()
        self.max_blocks = max_blocks
        self.blocks: dict[bytes, tuple[BlockContent, bytes]] = {}
        self.num_written = 0
        self.refusal: str | None = None  # set by tests

    @property
    def metrics(self) -> DiskMetrics:
        """Contents and counters of the store."""
        num_bytes = sum(len(data) for _, data in self.blocks.values())
        return DiskMetrics(
            num_blocks=len(self.blocks),
            num_bytes=num_bytes,
            max_bytes=1 << 30,
            num_damaged=0,
            num_evicted=0,
            num_errors=0,
            refusal=self.refusal,
        )

    def contains(self, key: bytes) -> bool:
        """Whether a block is there."""
        return key in self.blocks

    def look(self) -> None:
        """All blocks are known."""

    def read_into(self, content: BlockContent, buffer: Bytes) -> None:
        """Read a block; KeyError when it is not there, or damaged."""
        stored, data = self.blocks.get(content.hash, (None, b""))
        if stored != content or self.behaviour.fail():
            buffer[:] = _DAMAGED
            self.blocks.pop(content.hash, None)
            raise KeyError("the block is damaged")
        buffer[:] = np.frombuffer(data, np.uint8)

    def write(self, content: BlockContent, buffer: Bytes) -> bool:
        """Store a block; the oldest makes room."""
        if self.refusal or self.behaviour.fail():
            return False
        self.blocks[content.hash] = (content, buffer.tobytes())
        self.num_written += 1
        while len(self.blocks) > self.max_blocks:
            del self.blocks[next(iter(self.blocks))]
        return True

    def remove(self, key: bytes) -> None:
        """Remove a block."""
        self.blocks.pop(key, None)

    def close(self) -> None:
        """Keep the blocks."""
