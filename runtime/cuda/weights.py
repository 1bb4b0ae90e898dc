"""Upload of the program's weights from the mapped file through two pinned buffers in turns.

    file (mapped) ─► pinned buffer ─► device        one buffer is copied to the device while the other is filled

The host holds only the two buffers: the file's pages belong to the system's page cache, which drops them on demand.
Weights that steps copy again and again (`StreamedWeights`) stay in pinned memory.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.artifact.programs.launch_program import WeightCopy
from ingot.artifact.safetensors import MappedTensors
from ingot.runtime.cuda.driver.device import Bytes, Device, Queue, Stream
from ingot.sizes import format_bytes, round_up

_log = logging.getLogger(__name__)
_ALIGNMENT = 256  # bytes; kernels are compiled for multiples of 16
_STAGING_BYTES = 32 * 2**20


@dataclass(frozen=True)
class DeviceWeights:
    """Tensors on the device by name: their dtypes as safetensors spells them, and their addresses."""

    dtypes: Mapping[str, str]
    addresses: Mapping[str, int]
    num_bytes: int


LoadWeights = Callable[[Device, Stream, Path], DeviceWeights]


def upload_weights(device: Device, stream: Stream, file: Path, staging_bytes: int = _STAGING_BYTES) -> DeviceWeights:
    """Copy all tensors of a file into one allocation, each at a multiple of 256 bytes; wait for the copies.

    ArtifactError for a file that is not a valid safetensors file, EngineError when the device has too little memory.
    """
    mapped = MappedTensors(file)
    offsets, num_bytes = _offsets(mapped)
    placed = _placed(device, mapped, file.name)
    upload = _Upload(device, stream, min(placed.addresses.values(), default=0), min(staging_bytes, max(1, num_bytes)))
    for offset, piece in _pieces(mapped, offsets, upload.size):
        upload.add(offset, piece)
    upload.finish()
    _log.info("weights: %d tensors, %s on the device", len(offsets), format_bytes(num_bytes))
    return placed


def reserve_weights(device: Device, stream: Stream, file: Path) -> DeviceWeights:
    """Allocate as `upload_weights` does and copy nothing: the caller fills the tensors. Raises what that does."""
    return _placed(device, MappedTensors(file), file.name)


def _placed(device: Device, mapped: MappedTensors, name: str) -> DeviceWeights:
    offsets, num_bytes = _offsets(mapped)
    base = device.allocate(max(1, num_bytes), f"{name} ({len(offsets)} weights)")
    dtypes = {name: tensor.dtype for name, tensor in mapped.tensors.items()}
    return DeviceWeights(dtypes, {name: base + offset for name, offset in offsets.items()}, num_bytes)


def _offsets(mapped: MappedTensors) -> tuple[dict[str, int], int]:
    """Offsets in the file's order, and the total size in bytes."""
    offsets, end = {}, 0
    for name, tensor in mapped.tensors.items():
        offsets[name] = end
        end += round_up(tensor.num_bytes, _ALIGNMENT)
    return offsets, end


def _pieces(mapped: MappedTensors, offsets: Mapping[str, int], window: int) -> Iterator[tuple[int, Bytes]]:
    """Pieces of tensors with their offsets on the device; no piece crosses a multiple of `window`."""
    for name, offset in offsets.items():
        begin, end = 0, mapped.tensors[name].num_bytes
        while begin < end:
            count = min(end - begin, window - (offset + begin) % window)
            yield offset + begin, mapped.view(name, begin, count)
            begin += count


class StreamedWeights:
    """Weights in pinned host memory, which steps copy to the arena on a stream of their own.

    ArtifactError for a file that is not valid or lacks a tensor, EngineError where so much memory cannot be pinned.
    """

    def __init__(self, device: Device, file: Path, tensors: Sequence[str]) -> None:
        mapped = MappedTensors(file)
        self._device, self._stream, self._event = device, device.make_stream(), device.make_event()
        self._copied = {name: device.make_event() for name in tensors}
        self._pinned = {name: self._read(mapped.view(name), name) for name in tensors}
        size = sum(map(len, self._pinned.values()))
        _log.info("experts of %d layers of the host, %s in pinned memory", len(tensors), format_bytes(size))

    def bind(self, copy: WeightCopy, address: int) -> Queue:
        """Bind a copy to its address, ready to be queued next to the launches of a stream."""
        source, copied = self._pinned[copy.tensor], self._copied[copy.tensor]

        def begin(stream: Stream) -> None:
            # Launches before it may read what was at that place.
            self._device.record(self._event, stream)
            self._device.wait(self._stream, self._event)
            self._device.copy_in(address, source, self._stream)
            self._device.record(copied, self._stream)

        return begin if copy.action == "begin" else lambda stream: self._device.wait(stream, copied)

    def _read(self, content: Bytes, name: str) -> Bytes:
        pinned = self._device.allocate_pinned(
            len(content), f"experts for the GPU, {name} (stream_experts: 0 builds without them),"
        )
        pinned[:] = content
        return pinned


class _Upload:
    """Two pinned buffers in turns: each is a window of the layout, filled piece by piece and copied as a whole."""

    def __init__(self, device: Device, stream: Stream, base: int, size: int) -> None:
        self.size = size
        self._device, self._stream, self._base = device, stream, base
        self._buffers = [(device.allocate_pinned(size, "staging of weights"), device.make_event()) for _ in range(2)]
        self._window, self._end = 0, 0

    def add(self, offset: int, piece: Bytes) -> None:
        """Add a piece; pieces arrive in the order of their offsets."""
        window, begin = divmod(offset, self.size)
        if window != self._window:
            self._send()
            self._window = window
            self._device.wait_on_host(self._buffers[window % 2][1], "copying weights")
        self._end = begin + len(piece)
        self._buffers[window % 2][0][begin : self._end] = piece

    def finish(self) -> None:
        """Copy the last window, and wait for all copies."""
        self._send()
        self._device.synchronize("copying weights")

    def _send(self) -> None:
        buffer, event = self._buffers[self._window % 2]
        if self._end:
            self._device.copy_in(self._base + self._window * self.size, buffer[: self._end], self._stream)
            self._device.record(event, self._stream)
            self._end = 0
