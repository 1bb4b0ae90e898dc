"""Keep a program's wall clock within the moments that Python can represent.

A dead battery or a wrong time server may set the system's clock centuries away. From 2262 on `time.time` raises
OverflowError: in each record of a log, in the head of each answer, even where `logging` is imported. Times that pass
are measured by `time.monotonic` and are right whatever the wall clock says.
"""

import time

EARLIEST_SECONDS, LATEST_SECONDS = 0, 9_214_646_400
"""1970 and 2262: the formats of logs and traces have no time outside."""

_READ, _READ_NS = time.time, time.time_ns
_NANOSECONDS = 10**9


def bound_wall_clock() -> None:
    """Have `time.time` and `time.time_ns` return the nearest moment from 1970 to 2262, from now on.

    It is the clock of the whole process, so only programs call this, never a library. Call it before other imports.
    """
    time.time, time.time_ns = _seconds, _nanoseconds


def _seconds() -> float:
    try:
        now = _READ()
    except OverflowError:
        return float(LATEST_SECONDS)
    return min(max(now, EARLIEST_SECONDS), float(LATEST_SECONDS))


def _nanoseconds() -> int:
    try:
        now = _READ_NS()
    except OverflowError:
        return LATEST_SECONDS * _NANOSECONDS
    return min(max(now, EARLIEST_SECONDS), LATEST_SECONDS * _NANOSECONDS)
