"""Short time slices for a thread that has to answer at once while others keep all processors busy.

On Linux 6.12 and later a thread that woke up takes the processor of one with longer slices before that one's slice
ends.
"""

import ctypes
import os
import platform
import struct
import sys

_SLICE_NANOSECONDS = 100_000  # the shortest that Linux takes
_SYSTEM_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr, sched_getattr
_ATTRIBUTES = "=IIQiIQQQ"  # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
_OTHER, _RESET_ON_FORK = 0, 1


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
