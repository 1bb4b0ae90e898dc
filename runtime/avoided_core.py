"""The core that the threads of a server leave to the engine's thread.

Where all cores are busy, a message wakes its reader on the core of the thread that sent it: on Linux the wake-up of a
socket says that the sender is about to sleep. The engine's thread goes on instead, and a step waits for it. So the
server's threads keep off the core on which the engine's thread runs, and follow when it moves. For a process that does
nothing but serve: the cores of all its threads are changed. Linux only; nothing happens elsewhere.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

_TASKS = Path("/proc/self/task")
_lock = threading.Lock()
_avoided: frozenset[int] = frozenset()  # one core, or none
_exempt: set[int] = set()  # threads that may run on it


def avoid_core(core: int) -> None:
    """Have all threads of this process keep off `core`, and no more off the one before it.

    Threads that start later have the cores of the thread that starts them. A thread that may run on `core` alone keeps
    it.
    """
    global _avoided  # cores are the process's
    with _lock:
        before, _avoided = _avoided, frozenset((core,))
        for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
            thread = int(task.name)
            with suppress(OSError):  # it has ended
                cores = os.sched_getaffinity(thread) | before
                _set_cores(thread, cores | _avoided if thread in _exempt else cores - _avoided)


def usable_cores() -> int:
    """Cores that this process may run on, the avoided one included."""
    return len(_cores()) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def all_cores() -> Iterator[None]:
    """Let this thread run on all cores, and the processes that it starts: they have the cores of the thread."""
    thread = threading.get_native_id()
    with _lock:
        _exempt.add(thread)
        if _avoided:
            _set_cores(0, _cores())
    try:
        yield
    finally:
        with _lock:
            _exempt.discard(thread)
            if _avoided:
                _set_cores(0, _cores() - _avoided)


def current_core() -> int | None:
    """The core on which this thread runs; None where the system does not say."""
    ask = _sched_getcpu()
    core = ask() if ask else -1
    return core if core >= 0 else None


def _set_cores(thread: int, cores: set[int]) -> None:
    if cores:
        with suppress(OSError):  # it has ended, or the system does not let it
            os.sched_setaffinity(thread, cores)


def _cores() -> set[int]:
    return os.sched_getaffinity(0) | _avoided


@cache
def _sched_getcpu() -> Callable[[], int] | None:
    """Source: https://man7.org/linux/man-pages/man3/sched_getcpu.3.html"""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.PyDLL(None), "sched_getcpu", None)  # it takes less time than to give up the interpreter
