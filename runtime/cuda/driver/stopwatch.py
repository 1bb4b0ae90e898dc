"""Timing of work on a device by the device's own clock: marks on a stream, read later.

The tuner and the benchmarks use it; serving does not.
"""

import itertools
import time
from typing import Any, Protocol

from ingot.runtime.cuda.driver.calls import DriverCalls, load_driver
from ingot.runtime.cuda.driver.device import Device, Queue, Stream

Mark = Any


class Stopwatch(Protocol):
    """Puts time marks on streams. A mark is valid only for the stopwatch that made it."""

    def mark(self, stream: Stream) -> Mark:
        """Queue a mark on the stream."""
        ...

    def reached(self, mark: Mark) -> bool:
        """Whether the device has reached the mark. Does not wait."""
        ...

    def seconds(self, first: Mark, last: Mark) -> float:
        """Wait for the last mark; return the time between both. EngineError when queued work failed."""
        ...


class EventStopwatch:
    """CUDA events with timing, accurate to half a microsecond. Implements `Stopwatch`."""

    def __init__(self) -> None:
        self._driver = load_driver()
        self._call = DriverCalls(self._driver)

    def mark(self, stream: Stream) -> Mark:
        """Record an event."""
        event = self._call("making an event", self._driver.cuEventCreate, 0)
        self._call("recording an event", self._driver.cuEventRecord, event, stream)
        return event

    def reached(self, mark: Mark) -> bool:
        """Whether the event has happened."""
        (status,) = self._driver.cuEventQuery(mark)
        if status == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if status:
            raise self._call.failure("querying an event", status)
        return True

    def seconds(self, first: Mark, last: Mark) -> float:
        """Wait for the last event; return the time between both."""
        self._call("waiting for an event", self._driver.cuEventSynchronize, last)
        milliseconds: float = self._call("reading events", self._driver.cuEventElapsedTime, first, last)
        return milliseconds / 1e3


class HostStopwatch:
    """The host's clock, for a device without one: each mark waits for the device. Implements `Stopwatch`."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def mark(self, stream: Stream) -> Mark:
        """Wait for all queued work; return the time."""
        self._device.synchronize("taking the time")
        return time.perf_counter()

    def reached(self, mark: Mark) -> bool:
        """Always true: making the mark waited for it."""
        return True

    def seconds(self, first: Mark, last: Mark) -> float:
        """Return the time between the marks."""
        return float(last - first)


def laps(stopwatch: Stopwatch, stream: Stream, work: Queue, count: int, warm_up: int = 2) -> list[float]:
    """Time `count` consecutive runs of the work, in seconds, after `warm_up` runs that are not counted."""
    for _ in range(warm_up):
        work(stream)
    marks = [stopwatch.mark(stream)]
    for _ in range(count):
        work(stream)
        marks.append(stopwatch.mark(stream))
    return [stopwatch.seconds(first, last) for first, last in itertools.pairwise(marks)]
