"""Pinned staging areas in a ring: the host fills one while the device still copies from the others."""

from collections.abc import Iterator
from contextlib import contextmanager

from ingot.runtime.cuda.device import Bytes, Device, Stream


class StagingRing:
    """So many areas of so many bytes. An area is taken again when the copies from it are done."""

    def __init__(self, device: Device, count: int, size: int, what: str) -> None:
        self._device, self._what = device, what
        memory = device.allocate_pinned(count * size, what)
        self._areas = [(memory[index * size : (index + 1) * size], device.make_event()) for index in range(count)]
        self._next = 0

    @contextmanager
    def area(self, stream: Stream) -> Iterator[Bytes]:
        """The next area, to be filled and copied from on `stream` within the block."""
        area, event = self._areas[self._next % len(self._areas)]
        self._next += 1
        self._device.wait_on_host(event, self._what)
        try:
            yield area
        finally:
            self._device.record(event, stream)
