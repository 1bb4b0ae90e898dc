"""A thread that shortens its time slices has short ones, and threads that it starts have the usual ones."""

import os
import threading
from collections.abc import Callable

import pytest

from ingot.runtime.time_slices import shorten_slices, slice_nanoseconds


def in_thread(task: Callable[[], object]) -> list[object]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(task()))
    thread.start()
    thread.join()
    return found


def test_a_thread_gets_short_slices_and_keeps_its_priority() -> None:
    def shorten() -> tuple[bool, int | None, list[object], int]:
        done = shorten_slices()
        return done, slice_nanoseconds(), in_thread(slice_nanoseconds), os.getpriority(os.PRIO_PROCESS, 0)

    own, nice = slice_nanoseconds(), os.getpriority(os.PRIO_PROCESS, 0)  # another test may have shortened this thread's
    (usual,) = in_thread(slice_nanoseconds)
    (found,) = in_thread(shorten)
    assert isinstance(found, tuple)
    if not found[0]:
        pytest.skip("this system has no time slices of threads: Linux 6.12 is the first")
    assert found == (True, 100_000, [usual], nice)
    assert slice_nanoseconds() == own
