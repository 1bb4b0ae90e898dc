"""The clock of an engine: all that schedules requests, or accounts for their time, reads this one object.

So an engine runs in virtual time where its clock is virtual (`ingot.planning.simulation`). Threads that wait for each
other, for a disk or for another process wait in real time, whatever the engine's clock says.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, and waiting by them."""

    def __call__(self) -> float:
        """Return the seconds since some moment."""
        ...

    def sleep(self, seconds: float) -> object:
        """Wait."""
        ...


class SystemClock:
    """The monotonic clock of the machine."""

    __call__ = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)


SYSTEM_CLOCK: Clock = SystemClock()
