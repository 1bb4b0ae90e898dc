"""Where and when the system runs threads: cores that others leave to the engine's thread, and short time slices.

Where all cores are busy, a message wakes its reader on the core of the thread that sent it: Linux expects that a
thread which wakes another through a socket sleeps next. The engine's thread continues instead, and a step waits for it.
So these threads keep off the core on which the engine's thread runs, and follow when it moves. `avoid_core` is for a
process that does nothing but serve: it changes the cores of all threads.

A thread that has to answer at once gets short time slices (`shorten_slices`): on Linux 6.12 and later, when it wakes up
it takes the processor of a thread with longer ones before that one's slice ends. Linux only; nothing happens elsewhere.
"""

import ctypes
import os
import platform
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

_TASKS = Path("/proc/self/task")
_LOWEST_PRIORITY = 19  # as nice has it
_SLICE_NANOSECONDS = 100_000  # the shortest that Linux takes
_SYSTEM_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr, sched_getattr
_ATTRIBUTES = "=IIQiIQQQ"  # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
_OTHER, _RESET_ON_FORK = 0, 1
_lock = threading.Lock()
_usable: set[int] = set()  # cores of the engine's process; none: threads have not been changed
_avoided: set[int] = set()  # one of them
_exempt: set[int] = set()  # threads that may run on it


def avoid_core(process: int, core: int) -> None:
    """Have all threads of this process run on the cores of an engine's `process` apart from `core`.

    Threads that start later have the cores of the thread that starts them. Where there is one core alone, they have it.
    """
    global _usable, _avoided  # cores are the process's
    if not hasattr(os, "sched_setaffinity"):
        return
    with _lock, suppress(OSError):  # the engine's process has ended
        _usable, _avoided = os.sched_getaffinity(process), {core}
        for task in _TASKS.iterdir():
            _set_cores(int(task.name))


@contextmanager
def all_cores() -> Iterator[None]:
    """Let this thread run on all cores, and the processes that it starts: they have the cores of the thread."""
    thread = threading.get_native_id()
    with _lock:
        _exempt.add(thread)
        _set_cores(thread)
    try:
        yield
    finally:
        with _lock:
            _exempt.discard(thread)
            _set_cores(thread)


class ThreadsElsewhere:
    """Threads of this process that work while the engine's computes, and would delay it on its own core."""

    def __init__(self, threads: Sequence[threading.Thread]) -> None:
        self._threads = [thread.native_id for thread in threads if thread.native_id is not None]
        self._core: int | None = None  # which they have left
        self._usable = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else set[int]()

    def leave(self, core: int | None) -> None:
        """Have them run on all other cores of the process. With one core, or where it is unknown, nothing changes."""
        if core is None or core == self._core or not self._usable - {core}:
            return
        self._core = core
        for thread in self._threads:
            _run_on(thread, self._usable - {core})

    def give_way(self) -> None:
        """Have them run where no other thread wants the core: for an engine that computes on all of them."""
        if sys.platform != "linux":
            return  # threads have no priorities of their own, or others
        for thread in self._threads:
            with suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, thread, _LOWEST_PRIORITY)


def current_core() -> int | None:
    """The core on which this thread runs; None where the system does not say."""
    ask = _sched_getcpu()
    core = ask() if ask else -1
    return core if core >= 0 else None


def _set_cores(thread: int) -> None:
    cores = _usable if thread in _exempt else (_usable - _avoided or _usable)
    if cores:
        _run_on(thread, cores)


def _run_on(thread: int, cores: set[int]) -> None:
    with suppress(OSError):  # it has ended, or the system does not let it
        os.sched_setaffinity(thread, cores)


@cache
def _sched_getcpu() -> Callable[[], int] | None:
    """Source: https://man7.org/linux/man-pages/man3/sched_getcpu.3.html"""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.PyDLL(None), "sched_getcpu", None)  # it takes less time than to give up the interpreter


def shorten_slices() -> bool:
    """Give this thread short time slices, and none of those that it starts; returns whether the system did.

    Source: https://man7.org/linux/man-pages/man2/sched_setattr.2.html
    """
    calls = _SYSTEM_CALLS.get(platform.machine())
    if sys.platform != "linux" or not calls or os.sched_getscheduler(0) != _OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    size = struct.calcsize(_ATTRIBUTES)
    wanted = struct.pack(_ATTRIBUTES, size, _OTHER, _RESET_ON_FORK, nice, 0, _SLICE_NANOSECONDS, 0, 0)
    done: int = ctypes.CDLL(None).syscall(calls[0], 0, ctypes.create_string_buffer(wanted, size), 0)
    return done == 0 and slice_nanoseconds() == _SLICE_NANOSECONDS


def slice_nanoseconds() -> int | None:
    """The time slice of this thread; None where the system does not say."""
    calls = _SYSTEM_CALLS.get(platform.machine())
    if sys.platform != "linux" or not calls:
        return None
    found = ctypes.create_string_buffer(struct.calcsize(_ATTRIBUTES))
    if ctypes.CDLL(None).syscall(calls[1], 0, found, len(found), 0):
        return None
    nanoseconds: int = struct.unpack(_ATTRIBUTES, found.raw)[5]
    return nanoseconds
