"""The program's weights on the device: from the mapped file through two pinned buffers, in turns.

    file (mapped) ─► pinned buffer ─► device        while one buffer is copied to the device, the other is filled

The host holds no more than the two buffers: what was read is in the system's page cache, which gives it up when asked.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from ingot.artifact.safetensors import MappedTensors
from ingot.runtime.cuda.device import Bytes, Device, Stream
from ingot.sizes import format_bytes, round_up

_LOG = logging.getLogger(__name__)
_ALIGNMENT = 256  # bytes: what kernels are compiled to expect, and more
_STAGING_BYTES = 32 * 2**20


class DeviceWeights:
    """All tensors of a file in one allocation, each at a multiple of 256 bytes.

    Raises ArtifactError for a file that is no safetensors file, EngineError when the device has no room.
    """

    def __init__(self, device: Device, stream: Stream, file: Path, staging_bytes: int = _STAGING_BYTES) -> None:
        mapped = MappedTensors(file)
        self.dtypes = {name: stored.dtype for name, stored in mapped.tensors.items()}
        sizes = {name: stored.num_bytes for name, stored in mapped.tensors.items()}
        offsets, self.num_bytes = _layout(sizes)
        self._base = device.allocate(max(1, self.num_bytes), f"{file.name} ({len(sizes)} weights)")
        self.addresses: Mapping[str, int] = {name: self._base + offset for name, offset in offsets.items()}
        upload = _Upload(device, stream, self._base, min(staging_bytes, max(1, self.num_bytes)))
        for target, part in _parts(mapped, offsets, upload.size):
            upload.add(target, part)
        upload.finish()
        _LOG.info("weights: %d tensors, %s on the device", len(sizes), format_bytes(self.num_bytes))


def _layout(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Offsets in the file's order, and the bytes of all."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += round_up(size, _ALIGNMENT)
    return offsets, end


def _parts(mapped: MappedTensors, offsets: Mapping[str, int], size: int) -> Iterator[tuple[int, Bytes]]:
    """Pieces of tensors, none across a multiple of `size` of the device's layout, with their offsets there."""
    for name, offset in offsets.items():
        begin, end = 0, mapped.tensors[name].num_bytes
        while begin < end:
            count = min(end - begin, size - (offset + begin) % size)
            yield offset + begin, mapped.view(name, begin, count)
            begin += count


class _Upload:
    """Two pinned buffers in turns: each is a window of the layout, filled piece by piece and then copied as a whole."""

    def __init__(self, device: Device, stream: Stream, base: int, size: int) -> None:
        self.size = size
        self._device, self._stream, self._base = device, stream, base
        self._buffers = [(device.allocate_pinned(size, "staging of weights"), device.make_event()) for _ in range(2)]
        self._window, self._end = 0, 0

    def add(self, offset: int, part: Bytes) -> None:
        """One piece; pieces come in the order of their offsets."""
        window, begin = divmod(offset, self.size)
        if window != self._window:
            self._send()
            self._window = window
            self._device.wait_on_host(self._buffers[window % 2][1], "copying weights")
        self._end = begin + len(part)
        self._buffers[window % 2][0][begin : self._end] = part

    def finish(self) -> None:
        """Copy the last window, and wait for all."""
        self._send()
        self._device.synchronize("copying weights")

    def _send(self) -> None:
        buffer, event = self._buffers[self._window % 2]
        if self._end:
            self._device.copy_in(self._base + self._window * self.size, buffer[: self._end], self._stream)
            self._device.record(event, self._stream)
            self._end = 0
