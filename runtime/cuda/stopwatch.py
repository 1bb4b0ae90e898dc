"""How long work takes on a device, by the device's own clock: marks between what a stream holds, read later.

The tuner and the benchmarks measure with it; nothing that serves requests does.
"""

import itertools
import time
from typing import Any, Protocol

from ingot.runtime.cuda.device import Device, Queue, Stream
from ingot.runtime.cuda.driver_calls import Calls, load_driver

Mark = Any


class Stopwatch(Protocol):
    """Marks on streams. Only good for the stopwatch that made them."""

    def mark(self, stream: Stream) -> Mark:
        """Queue a mark on the stream."""
        ...

    def reached(self, mark: Mark) -> bool:
        """Whether the device has come to the mark. Waits for nothing."""
        ...

    def seconds(self, first: Mark, last: Mark) -> float:
        """Time between two marks; waits for the last. EngineError when what was queued failed."""
        ...


class EventStopwatch:
    """Events of the CUDA driver with timing, half a microsecond fine. Implements `Stopwatch`."""

    def __init__(self) -> None:
        self._driver = load_driver()
        self._call = Calls(self._driver)

    def mark(self, stream: Stream) -> Mark:
        """An event."""
        event = self._call("making an event", self._driver.cuEventCreate, 0)
        self._call("recording an event", self._driver.cuEventRecord, event, stream)
        return event

    def reached(self, mark: Mark) -> bool:
        """Whether the event has happened."""
        (status,) = self._driver.cuEventQuery(mark)
        if status == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if status:
            raise self._call.failure("asking for an event", status)
        return True

    def seconds(self, first: Mark, last: Mark) -> float:
        """Time between the events."""
        self._call("waiting for an event", self._driver.cuEventSynchronize, last)
        milliseconds: float = self._call("reading events", self._driver.cuEventElapsedTime, first, last)
        return milliseconds / 1e3


class HostStopwatch:
    """The computer's clock, for a device that has none: each mark waits for the device. Implements `Stopwatch`."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def mark(self, stream: Stream) -> Mark:
        """The time when all that was queued is done."""
        self._device.synchronize("taking the time")
        return time.perf_counter()

    def reached(self, mark: Mark) -> bool:
        """Always: a mark has waited."""
        return True

    def seconds(self, first: Mark, last: Mark) -> float:
        """Time between the marks."""
        return float(last - first)


def laps(stopwatch: Stopwatch, stream: Stream, work: Queue, count: int, warm_up: int = 2) -> list[float]:
    """Seconds of each of `count` runs of the work, one right behind the other, after some that are not counted."""
    for _ in range(warm_up):
        work(stream)
    marks = [stopwatch.mark(stream)]
    for _ in range(count):
        work(stream)
        marks.append(stopwatch.mark(stream))
    return [stopwatch.seconds(first, last) for first, last in itertools.pairwise(marks)]
