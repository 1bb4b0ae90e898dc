"""A device in host memory whose kernels run in Triton's interpreter. Implements `Device`.

A compiled kernel is its own description as JSON. Allocated memory is filled with NaN. Work runs as late as the protocol
allows: a stream runs when something waits for it, and only up to that point; with `hasty`, streams other than the first
run as early as allowed; with `rng`, any stream runs on at any call, as its numbers say. Copies on streams other than
the first are torn: a half and garbage, then the rest. Code that forgets to wait therefore reads data that is not
written yet, or already overwritten. Polling an event moves its stream on, unless that is the first one.
"""

import random
import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.simulators.triton_interpreter import use_interpreter

use_interpreter()  # skips tests where torch or Triton is missing

import torch  # noqa: E402

from ingot.artifact.programs.launch_program import CubinFacts, Kernel, LibraryMatmul  # noqa: E402
from ingot.errors import EngineError  # noqa: E402
from ingot.runtime.cuda.driver.device import Bytes, Device, Given, out_of_memory  # noqa: E402
from tests.runtime.cuda.artifacts import SM  # noqa: E402
from tests.simulators.interpreted_kernels import TORCH_TYPES, kernel_function, multiply  # noqa: E402

_GARBAGE = 0xFF  # a NaN in every float


@dataclass(eq=False)
class FakeStream:
    first: bool
    queue: deque[Callable[[], None]] = field(default_factory=deque)
    captured: list[Callable[[], None]] | None = None
    num_waits: int = 0

    def __int__(self) -> int:
        return id(self)


@dataclass(eq=False)
class FakeEvent:
    timed: bool = False
    stream: FakeStream | None = None
    recorded: int = 0
    done: int = 0
    ticks: int = 0  # when it was reached


@dataclass(frozen=True)
class FakeKernel:
    name: str
    function: Any
    constants: dict[str, Any]


class InterpretedDevice:
    """Has `memory_bytes` of memory; counts launches, captures, replays, copies, waits, and calls that move blocks."""

    name = "an interpreter"
    sm = SM

    def __init__(
        self, memory_bytes: int = 2**30, *, hasty: bool = False, rng: random.Random | None = None, pinned: int = 2**30
    ) -> None:
        self.total_bytes = memory_bytes
        self.hasty, self.rng = hasty, rng
        self.pinned_bytes = pinned  # the most at a time
        self.calls: Counter[str] = Counter()
        self.ticks = 0
        self._lock = threading.RLock()
        self.memory: dict[int, Bytes] = {}
        self.streams: list[FakeStream] = []
        self.failing: str | None = None  # the node whose kernel fails and loses the device
        self.lost: str | None = None
        self.closed = False
        self.matmuls: list[InterpretedMatmuls] = []
        self.num_launches = self.num_captures = self.num_replays = 0
        self.num_copies = self.num_host_waits = self.copied_bytes = 0

    def free_bytes(self) -> int:
        return self.total_bytes - sum(map(len, self.memory.values()))

    def activate(self) -> None:
        assert not self.closed

    def allocate(self, size: int, what: str) -> int:
        assert size > 0
        if size > self.free_bytes():
            raise out_of_memory(self, size, what)
        array = _aligned(size)
        array.fill(_GARBAGE)
        self.memory[array.ctypes.data] = array
        return array.ctypes.data

    def allocate_range(self, fast_bytes: int, slow_bytes: int, what: str) -> int:
        if fast_bytes > self.free_bytes():
            raise out_of_memory(self, fast_bytes, what)
        array = _aligned(fast_bytes + slow_bytes)
        array.fill(_GARBAGE)
        self.memory[array.ctypes.data] = array
        self.total_bytes += slow_bytes  # they are the host's
        return array.ctypes.data

    def free(self, address: int) -> None:
        del self.memory[address]

    def allocate_pinned(self, size: int, what: str) -> Bytes:
        if size > self.pinned_bytes:
            raise EngineError(f"{what} takes {size} bytes of page-locked host memory, which the system refuses")
        array = _aligned(size)
        array.fill(_GARBAGE)
        return array

    def make_stream(self) -> FakeStream:
        self.streams.append(FakeStream(first=not self.streams))
        return self.streams[-1]

    def make_event(self, *, timed: bool = False) -> FakeEvent:
        self.calls["make_event"] += 1
        return FakeEvent(timed)

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        self.calls["record"] += 1
        event.recorded += 1
        event.stream = stream
        version = event.recorded

        def mark() -> None:
            event.done, event.ticks = version, self.ticks

        self._put(stream, mark)

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        version = event.recorded
        self.calls["wait"] += 1
        stream.num_waits += 1
        self._put(stream, lambda: self._reach(event, version))

    def reached(self, event: FakeEvent) -> bool:
        self.calls["reached"] += 1
        with self._lock:
            if event.done < event.recorded:
                assert event.stream is not None
                if self.rng is None and not event.stream.first:
                    self._step(event.stream)
                self._run_on()
            self._raise_if_lost("queued work")
            return event.done >= event.recorded

    def seconds_between(self, first: FakeEvent, last: FakeEvent) -> float:
        self.calls["seconds_between"] += 1
        assert first.timed
        assert last.timed
        assert first.done == first.recorded
        assert last.done == last.recorded
        return (last.ticks - first.ticks) * 1e-6

    def wait_on_host(self, event: FakeEvent, what: str) -> None:
        self.num_host_waits += 1
        self._reach(event, event.recorded)
        self._raise_if_lost(what)

    def copy_in(self, target: int, source: Bytes, stream: FakeStream) -> None:
        assert source.flags.c_contiguous
        self.calls["copy_in"] += 1
        self.copied_bytes += source.size
        self._copy(self.view(target, source.size), source.reshape(-1), stream)

    def copy_rows_in(self, target: int, pitch: int, source: Bytes, stream: FakeStream) -> None:
        rows, width = source.shape
        self.copied_bytes += source.size
        view = self.view(target, (rows - 1) * pitch + width)
        cells = np.lib.stride_tricks.as_strided(view, (rows, width), (pitch, 1))
        self._put(stream, lambda: np.copyto(cells, source))

    def copy_out(self, target: Bytes, source: int, stream: FakeStream) -> None:
        assert target.flags.c_contiguous
        self.calls["copy_out"] += 1
        self._copy(target.reshape(-1), self.view(source, target.size), stream)

    def copy(self, target: int, source: int, size: int, stream: FakeStream) -> None:
        self.num_copies += 1
        to, of = self.view(target, size), self.view(source, size)
        self._put(stream, lambda: np.copyto(to, of))

    def clear(self, address: int, size: int, stream: FakeStream) -> None:
        view = self.view(address, size)
        self._put(stream, lambda: view.fill(0))

    def load_kernel(self, cubin: Bytes, kernel: Kernel, facts: CubinFacts) -> FakeKernel:
        read = Kernel.model_validate_json(cubin.tobytes())
        assert read == kernel
        assert facts.symbol == kernel.name
        return FakeKernel(kernel.name, *kernel_function(kernel))

    def bind(
        self, kernel: FakeKernel, grid: tuple[int, int, int], arguments: Sequence[Given], node: str
    ) -> Callable[[FakeStream], None]:
        tensors = [self._argument(kind, value) for kind, value in arguments]

        def run() -> None:
            if node == self.failing:
                self.lost = f"{node} broke"
                return
            self.num_launches += 1
            with np.errstate(all="ignore"):  # rows of padding hold anything
                kernel.function[grid](*tensors, **kernel.constants)

        return lambda stream: self._put(stream, run)

    def open_matmuls(self, device: Device, stream: FakeStream) -> "InterpretedMatmuls":
        """Open matmuls for `CudaExecutor`, in place of a library."""
        assert device is self
        self.matmuls.append(InterpretedMatmuls(self))
        return self.matmuls[-1]

    def multiply(self, matmul: LibraryMatmul, addresses: Mapping[str, int], stream: FakeStream) -> None:
        """Queue a library's matmul."""
        operands = matmul.operands.items()
        tensors = {name: self._argument(f"*{operand.type}", addresses[name]) for name, operand in operands}
        self.queue(stream, lambda: multiply(matmul, tensors))

    def queue(self, stream: FakeStream, work: Callable[[], None]) -> None:
        """Queue work of another library on a stream."""
        self._put(stream, work)

    def stream(self, number: int) -> FakeStream:
        """The stream with a number, which is how libraries refer to it."""
        return next(one for one in self.streams if int(one) == number)

    def capture(self, stream: FakeStream, work: Callable[[FakeStream], None]) -> list[Callable[[], None]]:
        self.num_captures += 1
        stream.captured = []
        work(stream)
        graph, stream.captured = stream.captured, None
        return graph

    def replay(self, graph: list[Callable[[], None]], stream: FakeStream) -> None:
        self.num_replays += 1
        for operation in graph:
            self._put(stream, operation)

    def synchronize(self, what: str) -> None:
        self.num_host_waits += 1
        with self._lock:
            for stream in self.streams:
                assert stream.captured is None
                while stream.queue:
                    self._step(stream)
        self._raise_if_lost(what)

    def close(self) -> None:
        if not self.closed:
            for stream in self.streams:
                while stream.queue:
                    self._step(stream)
        self.closed = True
        self.memory.clear()

    def view(self, address: int, size: int | None = None) -> Bytes:
        """Bytes from an address on: `size` of them, or to the end of the allocation."""
        array = self.allocation(address)
        array = array[address - array.ctypes.data :]
        assert size is None or size <= len(array), "beyond the allocation"
        return array[:size]

    def allocation(self, address: int) -> Bytes:
        """The whole allocation that contains an address."""
        bases = sorted(self.memory)
        base = bases[bisect_right(bases, address) - 1]
        assert base <= address < base + len(self.memory[base]), "not an address of the device"
        return self.memory[base]

    def _argument(self, kind: str, value: int | float) -> Any:
        if not kind.startswith("*"):
            return value
        dtype = TORCH_TYPES[kind[1:]]
        if value == 0:
            return torch.zeros(1, dtype=dtype)
        view = self.view(int(value))
        return torch.from_numpy(view[: len(view) // dtype.itemsize * dtype.itemsize]).view(dtype)

    def _copy(self, target: Bytes, source: Bytes, stream: FakeStream) -> None:
        if stream.first:
            self._put(stream, lambda: np.copyto(target, source))
            return
        half = len(source) // 2

        def begin() -> None:
            target.fill(_GARBAGE)
            target[:half] = source[:half]

        self._put(stream, begin)
        self._put(stream, lambda: np.copyto(target[half:], source[half:]))

    def _put(self, stream: FakeStream, operation: Callable[[], None]) -> None:
        assert not self.closed
        self._raise_if_lost("earlier work")
        if stream.captured is not None:
            stream.captured.append(operation)
            return
        with self._lock:
            stream.queue.append(operation)
            if self.hasty and not stream.first:
                while stream.queue:  # runs what it waits for, too
                    self._step(stream)
            self._run_on()

    def _run_on(self) -> None:
        """Run some of what is queued, on any streams."""
        while self.rng and self.rng.random() < 0.6:
            busy = [stream for stream in self.streams if stream.queue and stream.captured is None]
            if not busy:
                return
            self._step(self.rng.choice(busy))

    def _reach(self, event: FakeEvent, version: int) -> None:
        with self._lock:
            while event.done < version:
                assert event.stream is not None
                self._step(event.stream)

    def _step(self, stream: FakeStream) -> None:
        operation = stream.queue.popleft()
        self.ticks += 1
        if self.lost is None or operation.__name__ == "mark":
            operation()

    def _raise_if_lost(self, what: str) -> None:
        if self.lost is not None:
            raise EngineError(f"{what}: {self.lost}")


@dataclass
class InterpretedMatmuls:
    """Matmuls in place of a library. Implements `programs.MatmulBinder`; counts what is queued."""

    device: InterpretedDevice
    version = "matmuls 1"
    num_queued: int = 0
    closed: bool = False

    def __call__(self, matmul: LibraryMatmul, addresses: Mapping[str, int]) -> Callable[[FakeStream], None]:
        given = dict(addresses)

        def queue(stream: FakeStream) -> None:
            assert not self.closed
            self.num_queued += 1
            self.device.multiply(matmul, given, stream)

        return queue

    def close(self) -> None:
        assert not self.device.closed
        self.closed = True


def _aligned(size: int) -> Bytes:
    memory = np.empty(size + 255, np.uint8)
    start = -memory.ctypes.data % 256
    return memory[start : start + size]
