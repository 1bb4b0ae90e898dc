"""Peaks of the GPU: copies between its memory and the host's, reads, matmuls of large 16-bit matrices, and the time of
launches that do nothing."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu.device import Bench
from benchmarks.gpu.figures import Spread
from benchmarks.gpu.parts import Record, Task
from benchmarks.gpu.times.torch_peer import torch_seconds
from ingot.runtime.cuda.driver.device import Device, Queue, Stream
from ingot.runtime.cuda.driver.stopwatch import Stopwatch

_MIB = 1 << 20
_LAUNCHES = 259  # as many as a decode step of Llama-3.1-8B has


def hardware(bench: Bench) -> list[Task]:
    """Copies by the driver, matmuls by torch, whose library the GPU's vendor tunes."""
    size = 64 if bench.machine.is_dry else 8192
    matmuls = (
        Task(f"matmul {dtype}", partial(_matmul, bench, size, dtype)) for dtype in (torch.float16, torch.bfloat16)
    )
    others = (Task("reads", partial(_reads, bench)), Task("empty launches", partial(_empty_launches, bench)))
    return [Task("copies", partial(_of_device, bench)), *others, *matmuls]


def _of_device(bench: Bench) -> Iterator[Record]:
    device = bench.machine.open()
    try:
        yield {"figure": "hardware", "device": device.name, "sm": device.sm, "memory_bytes": device.total_bytes}
        yield from _copies(bench, device)
    finally:
        device.close()


def _copies(bench: Bench, device: Device) -> Iterator[Record]:
    size = 64 * 1024 if bench.machine.is_dry else 512 * _MIB
    stream, stopwatch = device.make_stream(), bench.machine.stopwatch(device)
    one, other = (device.allocate(size, "a copy") for _ in range(2))
    pinned = device.allocate_pinned(size, "a copy")
    pinned[:] = 7
    ways: dict[str, tuple[int, Queue]] = {
        "to the device": (size, lambda stream: device.copy_in(one, pinned, stream)),
        "to the host": (size, lambda stream: device.copy_out(pinned, other, stream)),
        "within the device": (2 * size, lambda stream: device.copy(other, one, size, stream)),
    }
    for name, (moved, work) in ways.items():
        yield _rate(bench, stopwatch, stream, name, moved, work)


def _rate(bench: Bench, stopwatch: Stopwatch, stream: Stream, name: str, amount: float, work: Queue) -> Record:
    seconds = bench.timed(stopwatch, stream, work)
    return _record(name, amount, seconds)


def _record(name: str, amount: float, seconds: Spread) -> Record:
    return {
        "figure": "rate",
        "name": name,
        "amount": amount,
        "seconds": seconds.record(),
        "per_second": amount / seconds.median,
    }


def _matmul(bench: Bench, size: int, dtype: torch.dtype) -> Iterator[Record]:
    """size x size matrices of random numbers: zeros would draw less power and run faster."""
    with torch.device(bench.machine.torch_device):
        left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    seconds = torch_seconds(bench, lambda: torch.mm(left, right))
    yield _record(f"matmul {str(dtype).removeprefix('torch.')}", 2.0 * size**3, seconds)


def _reads(bench: Bench) -> Iterator[Record]:
    """Memory that is only read, as weights are: half of what a copy moves is written."""
    count = 16 * 1024 if bench.machine.is_dry else 256 * _MIB
    with torch.device(bench.machine.torch_device):
        numbers = torch.randn(count)
    yield _record("reads of the device's memory", 4.0 * count, torch_seconds(bench, lambda: torch.amax(numbers)))


def _empty_launches(bench: Bench) -> Iterator[Record]:
    """A graph of launches that end at once: what a step's launches take by themselves."""
    if bench.machine.torch_device == "cpu":
        yield _record("empty launches", _LAUNCHES, torch_seconds(bench, lambda: None))
        return
    launch: Callable[[int], None] = torch.cuda._sleep
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_LAUNCHES):
            launch(0)
    yield _record("empty launches", _LAUNCHES, torch_seconds(bench, graph.replay))
