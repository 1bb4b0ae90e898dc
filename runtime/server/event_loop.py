"""The event loop of a process that serves, which answers at once while the engine's threads keep all processors busy.

uvloop         needs fewer system calls than asyncio's own loop; used where it is installed
Python's lock  is given up after half a millisecond by the Python part of a step, instead of 5
time slices    the loop's thread has short ones (`time_slices`)
collections    of all objects are rarer: with 256 open requests and thousands of refused clients one takes 15 to 30
               ms, in which nothing is answered
"""

import asyncio
import gc
import sys

from ingot.runtime.time_slices import shorten_slices

_SWITCH_SECONDS = 0.0005
_COLLECTIONS_BEFORE_FULL = 100  # Python's own: 10


def event_loop() -> asyncio.AbstractEventLoop:
    """A new loop; the thread that calls this is to run it."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.set_threshold(*gc.get_threshold()[:2], _COLLECTIONS_BEFORE_FULL)
    shorten_slices()
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
