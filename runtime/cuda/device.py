"""What the CUDA runtime asks of a device. `driver.py` is the real one; tests have one that interprets kernels.

Streams are ordered queues; whatever takes a stream is queued there and may happen later. Addresses are plain integers;
streams, events, kernels and graphs are opaque, and only serve the device that made them. A failure of something queued
may show at any later call: it raises EngineError. To add a device, implement `Device` and run tests/runtime/cuda on it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.launch_program import CubinFacts, Kernel
from ingot.errors import EngineError
from ingot.sizes import format_bytes

Bytes = NDArray[np.uint8]
Stream = Any
Event = Any
LoadedKernel = Any
Graph = Any
Queue = Callable[[Stream], None]  # puts work on a stream
Given = tuple[str, int | float]  # an argument's type in Triton's words, and its value; an address for pointers


class Device(Protocol):
    """One card. A thread must `activate` it before it calls anything else."""

    @property
    def name(self) -> str:
        """What its maker calls it."""
        ...

    @property
    def sm(self) -> int:
        """Compute capability: 10 * major + minor."""
        ...

    @property
    def total_bytes(self) -> int:
        """Memory of the card."""
        ...

    def free_bytes(self) -> int:
        """Memory that can still be allocated, others on the card considered."""
        ...

    def activate(self) -> None:
        """Make the device the calling thread's. Cheap where it is already."""
        ...

    def allocate(self, size: int, what: str) -> int:
        """Address of `size` bytes, a multiple of 256; undefined content. `out_of_memory` when they are not there."""
        ...

    def free(self, address: int) -> None:
        """Give back what `allocate` gave; nothing that is queued may use it."""
        ...

    def allocate_pinned(self, size: int, what: str) -> Bytes:
        """Page-locked host memory [size], which copies read and write on their own. Given back with its last view."""
        ...

    def make_stream(self) -> Stream:
        """A queue beside all others."""
        ...

    def make_event(self) -> Event:
        """A mark for `record`; one that was never recorded is waited for by nobody."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """Mark what the stream holds now. An event may be recorded again."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What is queued on the stream from now on comes after the event, as recorded last."""
        ...

    def wait_on_host(self, event: Event, what: str) -> None:
        """Block the calling thread until the event. EngineError, naming `what`, when what was queued failed."""
        ...

    def copy_in(self, target: int, source: Bytes, stream: Stream) -> None:
        """Host to device. The source is read later: it must be pinned and stay as it is until then."""
        ...

    def copy_rows_in(self, target: int, pitch: int, source: Bytes, stream: Stream) -> None:
        """A matrix of bytes [rows, width], contiguous on the host, to rows that begin every `pitch` bytes."""
        ...

    def copy_out(self, target: Bytes, source: int, stream: Stream) -> None:
        """Device to pinned host memory."""
        ...

    def copy(self, target: int, source: int, size: int, stream: Stream) -> None:
        """Within the device."""
        ...

    def clear(self, address: int, size: int, stream: Stream) -> None:
        """Zeros."""
        ...

    def load_kernel(self, cubin: Bytes, kernel: Kernel, facts: CubinFacts) -> LoadedKernel:
        """A kernel from the compiled code of its own. EngineError when the card cannot take it."""
        ...

    def bind(self, kernel: LoadedKernel, grid: tuple[int, int, int], arguments: Sequence[Given], node: str) -> Queue:
        """A launch with its arguments for good. Calling it queues the kernel; a refusal names `node`."""
        ...

    def capture(self, stream: Stream, work: Queue) -> Graph:
        """Record what `work` queues on the stream, without running it."""
        ...

    def replay(self, graph: Graph, stream: Stream) -> None:
        """Queue everything that was recorded."""
        ...

    def synchronize(self, what: str) -> None:
        """Wait for all streams. EngineError, naming `what`, when something that was queued failed."""
        ...

    def close(self) -> None:
        """Wait, and give everything back but pinned memory that is still looked at. Idempotent; raises nothing."""
        ...


def out_of_memory(device: Device, size: int, what: str) -> EngineError:
    """The error for memory that the card does not have."""
    return EngineError(
        f"{what} takes {format_bytes(size)}, and {device.name} has {format_bytes(device.free_bytes())} of "
        f"{format_bytes(device.total_bytes)} free; ask for fewer KV blocks (kv_blocks or kv_bytes), a smaller "
        "max_batch_tokens, build with fewer gpu.decode_rows or less of a context, or end what else runs on the card"
    )
