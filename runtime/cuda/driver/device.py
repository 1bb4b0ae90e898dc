"""The device that the CUDA runtime works on. `driver.py` implements it; tests have one that interprets kernels.

Streams are ordered queues: an operation that takes a stream is queued there and may run later. Addresses are plain
integers; streams, events, kernels and graphs are opaque, and valid only for the device that made them. A failure of
queued work may surface at any later call, as EngineError. To add a device, implement `Device` and run
tests/runtime/cuda on it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.programs.launch_program import CubinFacts, Kernel
from ingot.errors import EngineError
from ingot.sizes import format_bytes

Bytes = NDArray[np.uint8]
Stream = Any
Event = Any
LoadedKernel = Any
Graph = Any
Queue = Callable[[Stream], None]  # puts work on a stream
Given = tuple[str, int | float]  # an argument's type as Triton names it, and its value; an address for pointers


class Device(Protocol):
    """One GPU. A thread must call `activate` before anything else."""

    @property
    def name(self) -> str:
        """The vendor's name of the GPU."""
        ...

    @property
    def sm(self) -> int:
        """Compute capability: 10 * major + minor."""
        ...

    @property
    def total_bytes(self) -> int:
        """Memory of the GPU."""
        ...

    def free_bytes(self) -> int:
        """Memory that can still be allocated, less what other processes use."""
        ...

    def activate(self) -> None:
        """Make the device current for the calling thread. Cheap when it is current already."""
        ...

    def allocate(self, size: int, what: str) -> int:
        """Allocate `size` bytes of undefined content; return the address, a multiple of 256.

        Raises `out_of_memory` when they are not available.
        """
        ...

    def allocate_range(self, fast_bytes: int, slow_bytes: int, what: str) -> int:
        """Allocate device memory and host memory after it, in one range of addresses that kernels read and write.

        The part in device memory may be larger than asked for. EngineError where either has too little. Return the
        address; `close` frees it.
        """
        ...

    def free(self, address: int) -> None:
        """Free what `allocate` returned; no queued work may use it."""
        ...

    def allocate_pinned(self, size: int, what: str) -> Bytes:
        """Allocate page-locked host memory [size] for asynchronous copies. It is freed with its last view."""
        ...

    def make_stream(self) -> Stream:
        """Make a stream that runs concurrently with all others."""
        ...

    def make_event(self, *, timed: bool = False) -> Event:
        """Make an event for `record`; waiting for an event that was never recorded returns at once."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """Mark the work that the stream holds now. An event may be recorded again."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Make later work on the stream wait for the event, as recorded last."""
        ...

    def reached(self, event: Event) -> bool:
        """Whether all that the event marks has run. Never waits. EngineError when queued work failed."""
        ...

    def seconds_between(self, first: Event, last: Event) -> float:
        """Time on the device between two timed events, both reached."""
        ...

    def wait_on_host(self, event: Event, what: str) -> None:
        """Block the calling thread until the event. EngineError, naming `what`, when queued work failed."""
        ...

    def copy_in(self, target: int, source: Bytes, stream: Stream) -> None:
        """Queue a copy from host to device. The source must be pinned and stay unchanged until the copy is done."""
        ...

    def copy_rows_in(self, target: int, pitch: int, source: Bytes, stream: Stream) -> None:
        """Queue a copy of a byte matrix [rows, width], contiguous on the host, to rows `pitch` bytes apart."""
        ...

    def copy_out(self, target: Bytes, source: int, stream: Stream) -> None:
        """Queue a copy from the device to pinned host memory."""
        ...

    def copy(self, target: int, source: int, size: int, stream: Stream) -> None:
        """Queue a copy within the device."""
        ...

    def clear(self, address: int, size: int, stream: Stream) -> None:
        """Queue a fill with zeros."""
        ...

    def load_kernel(self, cubin: Bytes, kernel: Kernel, facts: CubinFacts) -> LoadedKernel:
        """Load a kernel from its cubin. EngineError when the GPU cannot run it."""
        ...

    def bind(self, kernel: LoadedKernel, grid: tuple[int, int, int], arguments: Sequence[Given], node: str) -> Queue:
        """Bind a launch to fixed arguments. Calling the result queues the kernel; an error names `node`."""
        ...

    def capture(self, stream: Stream, work: Queue) -> Graph:
        """Record what `work` queues on the stream, without running it."""
        ...

    def replay(self, graph: Graph, stream: Stream) -> None:
        """Queue all work of a graph."""
        ...

    def synchronize(self, what: str) -> None:
        """Wait for all streams. EngineError, naming `what`, when queued work failed."""
        ...

    def close(self) -> None:
        """Wait, and free everything except pinned memory that still has views. Idempotent; never raises."""
        ...


def out_of_memory(device: Device, size: int, what: str) -> EngineError:
    """The error for an allocation that the GPU has no memory for."""
    return EngineError(
        f"{what} takes {format_bytes(size)}, and {device.name} has {format_bytes(device.free_bytes())} of "
        f"{format_bytes(device.total_bytes)} free; ask for fewer KV blocks (kv_blocks or kv_bytes), a smaller "
        "max_batch_tokens, build with fewer gpu.decode_rows or a shorter context, or end other processes on the GPU"
    )
