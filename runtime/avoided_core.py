"""The core that the threads of a server leave to the engine's thread.

Where all cores are busy, a message wakes its reader on the core of the thread that sent it: Linux expects that a
thread which wakes another through a socket sleeps next. The engine's thread continues instead, and a step waits for it.
So the server's threads keep off the core on which the engine's thread runs, and follow when it moves. For a process
that does nothing but serve: the cores of all its threads are changed. Linux only; nothing happens elsewhere.
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


def current_core() -> int | None:
    """The core on which this thread runs; None where the system does not say."""
    ask = _sched_getcpu()
    core = ask() if ask else -1
    return core if core >= 0 else None


def _set_cores(thread: int) -> None:
    cores = _usable if thread in _exempt else (_usable - _avoided or _usable)
    if cores:
        with suppress(OSError):  # it has ended, or the system does not let it
            os.sched_setaffinity(thread, cores)


@cache
def _sched_getcpu() -> Callable[[], int] | None:
    """Source: https://man7.org/linux/man-pages/man3/sched_getcpu.3.html"""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.PyDLL(None), "sched_getcpu", None)  # it takes less time than to give up the interpreter
