"""The event loop of a process that serves, which answers at once while the engine's threads keep all processors busy.

uvloop         needs fewer system calls than asyncio's own loop; used where it is installed
Python's lock  is given up after half a millisecond by the Python part of a step, instead of 5
time slices    the loop's thread has short ones (`thread_scheduling`)
collections    of all objects are rarer: with 256 open requests and thousands of refused clients one takes 15 to 30
               ms, in which nothing is answered
memory         all threads allocate from one arena of glibc's malloc: with one for each, every arena keeps the most that
               its thread ever needed, and memory grows for an hour. What is free goes back to the system every minute:
               the holes between what stays become more for hours, and so do the places that CPython keeps for objects
               like those that were freed, of tuples alone up to 40,000, which a collection of all objects empties
"""

import asyncio
import ctypes
import gc
import sys
from contextlib import suppress

from ingot.runtime.thread_scheduling import shorten_slices

_SWITCH_SECONDS = 0.0005
_COLLECTIONS_BEFORE_FULL = 100  # Python's own: 10
_M_ARENA_MAX = -8  # of malloc.h
_TRIM_SECONDS = 60.0


def event_loop() -> asyncio.AbstractEventLoop:
    """A new loop; the thread that calls this is to run it."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.set_threshold(*gc.get_threshold()[:2], _COLLECTIONS_BEFORE_FULL)
    shorten_slices()
    _have_one_arena()
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _have_one_arena() -> None:
    """Source: https://man7.org/linux/man-pages/man3/mallopt.3.html"""
    with suppress(AttributeError, OSError, TypeError):  # another library's malloc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


async def return_free_memory() -> None:
    """Empty CPython's free lists, and give the free pages of malloc's heap back to the system, again and again.

    It takes 10 to 30 ms each time.

    Source: https://man7.org/linux/man-pages/man3/malloc_trim.3.html
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    while True:
        await asyncio.sleep(_TRIM_SECONDS)
        gc.collect()
        if trim:  # else another library's malloc
            trim(0)
