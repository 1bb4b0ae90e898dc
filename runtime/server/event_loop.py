"""The event loop of a process that serves, which answers at once while the engine's threads keep all processors busy.

uvloop         needs fewer system calls than asyncio's own loop; used where it is installed
Python's lock  is given up after half a millisecond by the Python part of a step, instead of 5
time slices    the loop's thread has short ones. On Linux 6.12 and later a thread that woke up then takes the
               processor of one with longer slices before that one's slice ends.
"""

import asyncio
import ctypes
import os
import platform
import struct
import sys

_SWITCH_SECONDS = 0.0005
_SLICE_NANOSECONDS = 100_000  # the shortest that Linux takes
_SYSTEM_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr, sched_getattr
_ATTRIBUTES = "=IIQiIQQQ"  # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
_OTHER, _RESET_ON_FORK = 0, 1


def event_loop() -> asyncio.AbstractEventLoop:
    """A new loop; the thread that calls this is to run it."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    shorten_slices()
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


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
