"""Transfers of blocks between the device, host memory and disk: the protocols, and threads that carry them out.

A step never waits for a transfer: it polls `done`. Both ends of a transfer that has begun are pinned by the caller, so
that nothing else uses them.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ingot.errors import EngineError

_CLOSED_SECONDS = 0.003  # what an engine's thread may take between two calls of its executor
_SHORT_SECONDS = 0.0015  # of a step: what can wait begins in longer ones
_PATIENCE_SECONDS = 0.05  # that it waits for one, after which it begins in any, until one is longer

Bytes = NDArray[np.uint8]


class Transfer(Protocol):
    """A copy that was queued."""

    @property
    def done(self) -> bool:
        """Whether it has ended: complete, failed or cancelled. Never waits."""
        ...

    @property
    def error(self) -> Exception | None:
        """Why it moved nothing, or not all. Only then is its target's content undefined."""
        ...

    @property
    def seconds(self) -> float:
        """How long the copy itself took, once it is done."""
        ...

    def cancel(self) -> bool:
        """Drop it if it has not begun: it is done then, with an error. Returns whether it was dropped."""
        ...


class HostBlocks(Protocol):
    """Slots in host memory, each as large as a block of the pool.

    An executor with side state has a second one of these for it (`TieredStatefulExecutor`). There, a block is a slot of
    the executor's state pool, and "block" in this protocol means that.
    """

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        ...

    def save(self, block: int, slot: int) -> Transfer:
        """Queue a copy of a block to a slot, as the steps and copies that were queued before leave it. Nothing that is
        queued later writes to the block until it is done."""
        ...

    def restore(self, slot: int, block: int) -> Transfer:
        """Queue a copy of a slot to a block. Steps that were queued before may still write to the block; later ones
        do not use it until the copy is done."""
        ...

    def view(self, slot: int) -> Bytes:
        """The slot's bytes [block_bytes], writable. Only for slots without a transfer."""
        ...

    @property
    def threads(self) -> Sequence[threading.Thread]:
        """The threads that copy; none where a device does."""
        ...

    def check(self) -> None:
        """Raise EngineError if a thread that copies has died."""
        ...

    def close(self) -> None:
        """Wait for queued copies, end threads and free the memory. Idempotent."""
        ...


class Cancelled(EngineError):
    """The error of a transfer that was dropped before it began."""


class Task:
    """One call in a thread of `Workers`. Implements `Transfer`."""

    __slots__ = ("_run", "done", "error", "seconds")
    _beginning = threading.Lock()  # held while the call of a task is taken, to make it or to cancel it

    def __init__(self, run: Callable[[], object]) -> None:
        self._run: Callable[[], object] | None = run
        self.done = False
        self.error: Exception | None = None
        self.seconds = 0.0

    def cancel(self) -> bool:
        """Drop it if no thread has begun it."""
        if self._take() is None:
            return False
        self.error = Cancelled("the transfer was cancelled before it began")
        self.done = True
        return True

    def run(self) -> None:
        """Make the call, unless it was cancelled, and keep the exception that it raises."""
        run = self._take()
        if run is None:
            return
        started = time.perf_counter()
        try:
            run()
        except Exception as error:  # noqa: BLE001 (the owner of the transfer handles it)
            self.error = error
        finally:
            del run  # what it refers to may go before the task does
            self.seconds = time.perf_counter() - started
        self.done = True

    def _take(self) -> Callable[[], object] | None:
        """The call, the first time; None later."""
        with self._beginning:
            run, self._run = self._run, None
            return run


class TaskQueue(Protocol):
    """Where tasks run: `Workers`."""

    def submit(self, run: Callable[[], object]) -> Transfer:
        """Queue a call."""
        ...

    @property
    def threads(self) -> Sequence[threading.Thread]:
        """The threads that run them."""
        ...

    def check(self) -> None:
        """Raise EngineError if a thread has died."""
        ...

    def close(self, seconds: float | None = None) -> bool:
        """Run what is queued, and end the threads; returns whether they ended within `seconds`. Idempotent."""
        ...


class TransferGate:
    """Closed while the engine's thread needs the interpreter: tasks begin while it computes, or when it makes no step.

    A thread that runs Python for each block would delay it again and again: it must wait for the interpreter's lock
    wherever it gave it up.
    """

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()
        self._is_computing: Callable[[], bool] | None = None
        self._opened = 0.0  # when
        self._is_patient = True  # what can wait

    def open(self, is_computing: Callable[[], bool] | None = None) -> None:
        """Let tasks begin, as long as the engine's thread computes."""
        self._is_computing = is_computing
        self._opened = time.monotonic()
        if not self._is_open.is_set():
            self._is_open.set()

    def close(self) -> None:
        """Let no task begin, for a while."""
        self._is_open.clear()

    def pass_through(self) -> None:
        """Wait until it is open, or for so long that no step is being made."""
        is_computing = self._is_computing
        if is_computing and not is_computing():
            self.close()  # the engine's thread has yet to do so
        if not self._is_open.is_set() and not self._is_open.wait(_CLOSED_SECONDS):
            self.open()

    def pass_in_long_step(self) -> None:
        """Wait until a step has taken so long that it is likely to go on, or no step is being made.

        A short step would be delayed by what is done at its end. If all are short for a while, this waits for the next
        step only, until one is long again: disks must keep up.
        """
        patience_ends = time.monotonic() + _PATIENCE_SECONDS
        while True:
            self.pass_through()
            now = time.monotonic()
            left = self._opened + _SHORT_SECONDS - now
            if self._is_computing is None or left <= 0:
                self._is_patient = True
                return
            self._is_patient &= now < patience_ends
            if not self._is_patient:
                return
            time.sleep(left)


class Workers:
    """Threads that run tasks in order of arrival. One that dies is reported by `check`. Implements `TaskQueue`.

    Waking a thread costs the caller more than queueing a task, so tasks that come together wake a thread once.

    when_done   called after each task, in its thread
    admit       called before each task, in its thread: waits until it may begin
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        *,
        when_done: Callable[[], object] = lambda: None,
        admit: Callable[[], object] = lambda: None,
    ) -> None:
        self._name = name
        self._admit = admit
        self._when_done = when_done
        self._tasks: deque[Task] = deque()
        self._calls: SimpleQueue[None] = SimpleQueue()  # each wakes a thread, which then runs all that is queued
        self._calling = threading.Lock()
        self._num_calls = 0  # that no thread has taken
        self._failure: BaseException | None = None
        self._has_ended = False  # one of the threads
        self._closed = False
        self.threads: list[threading.Thread] = []
        try:
            for number in range(num_threads):
                thread = threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
                thread.start()
                self.threads.append(thread)
        except BaseException:
            self.close()
            raise

    def submit(self, run: Callable[[], object]) -> Task:
        """Queue a call."""
        assert not self._closed
        task = Task(run)
        self._tasks.append(task)
        if self._num_calls < len(self.threads):  # else a thread that has yet to take its call finds the task
            with self._calling:
                self._num_calls += 1
            self._calls.put(None)
        return task

    def check(self) -> None:
        """Raise EngineError if a thread has died: what is queued would never be done."""
        if self._closed or not self._has_ended:
            return
        reason = f"{type(self._failure).__name__}: {self._failure}" if self._failure else "it ended"
        raise EngineError(f"a thread that moves KV blocks ({self._name}) has died ({reason}); load the engine again")

    def close(self, seconds: float | None = None) -> bool:
        """Run what is queued, and end the threads; returns whether they ended within `seconds`. Idempotent.

        A thread that hangs in a call of the system is not waited for: it does not keep the process alive.
        """
        if not self._closed:
            self._closed = True
            for _ in self.threads:
                self._calls.put(None)
        deadline = None if seconds is None else time.monotonic() + seconds
        for thread in self.threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)

    def _work(self) -> None:
        try:
            while not self._closed or self._tasks:
                self._calls.get()
                with self._calling:
                    self._num_calls -= 1
                self._run_queued()
        except BaseException as error:  # noqa: BLE001 (`check` raises it in the engine's thread)
            self._failure = error
        finally:
            self._has_ended = True

    def _run_queued(self) -> None:
        while self._tasks:
            self._admit()
            try:
                task = self._tasks.popleft()
            except IndexError:  # another thread was faster
                return
            task.run()
            self._when_done()
