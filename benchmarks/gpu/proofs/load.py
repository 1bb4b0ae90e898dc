"""Load every packed kernel but candidates for tuning, one by one; then one launch, its capture, and its replays.

The launched kernel copies whole numbers by an index (kernels/carry_tokens.py), so that its result is exact.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.device import Bench
from benchmarks.gpu.parts import Record, Task
from benchmarks.gpu.programs.packing import TUNE_FILE, PackedKernels
from ingot.pipeline.targets.cuda.kernel_signatures import make_kernel
from ingot.runtime.cuda.driver.device import Device, Queue, Stream

_SMOKE = "carry_tokens"
SMOKE_KERNEL = make_kernel(_SMOKE, {}, {"BLOCK": 128})  # packed with the kernels of the tests' cases
_SECONDS = 20.0


def load(bench: Bench) -> list[Task]:
    """The device, every kernel of every file, and the launch."""
    loader = _Loader(bench)
    files = [PackedKernels(file) for file in sorted(bench.programs.glob("*.zip")) if file.name != TUNE_FILE]
    each = [
        Task(f"{packed.file.stem} {key}", partial(loader.load, packed, key), _SECONDS)
        for packed in files
        for key in packed.kernels
    ]
    ways = ("launch", "capture", "replay")
    smoke = [Task(f"{_SMOKE}: {way}", partial(loader.smoke, files, way), _SECONDS) for way in ways]
    return [Task("device", loader.describe, _SECONDS), *each, *smoke]


class _Loader:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._opened: Device | None = None

    @property
    def _device(self) -> Device:
        """The device, opened once."""
        if self._opened is None:
            self._opened = self._bench.machine.open()
            self._opened.activate()
        return self._opened

    def describe(self) -> Iterator[Record]:
        device = self._device
        yield {
            "figure": "device",
            "device": device.name,
            "sm": device.sm,
            "memory_bytes": device.total_bytes,
            "free_bytes": device.free_bytes(),
        }

    def load(self, packed: PackedKernels, key: str) -> list[Record]:
        """Load a kernel; the driver refuses what the GPU cannot run."""
        self._load(packed, key)
        return []

    def _load(self, packed: PackedKernels, key: str) -> Any:
        kernel, facts = packed.kernels[key]
        return self._device.load_kernel(packed.code(key), kernel, facts)

    def smoke(self, files: list[PackedKernels], way: str) -> Iterator[Record]:
        """Run the kernel directly, or from a graph: not at all while it is captured, or twice."""
        packed, key = next((one, key) for one in files for key, made in one.kernels.items() if made[0].name == _SMOKE)
        device, loaded = self._device, self._load(packed, key)
        rows = int(packed.kernels[key][0].constants["BLOCK"])
        stream, memory = device.make_stream(), _Memory(device, rows)
        queue = device.bind(loaded, (1, 1, 1), memory.arguments, _SMOKE)
        expected = memory.before if way == "capture" else memory.after
        _run(device, stream, queue, way)
        found = memory.read(stream)
        wrong = int((found != expected).sum())
        yield {"figure": "launch", "way": way, "elements": rows, "wrong": wrong, "within": wrong == 0}


class _Memory:
    """Operands of the kernel in device memory, and input_ids before and after it."""

    def __init__(self, device: Device, rows: int) -> None:
        self._device = device
        random = np.random.default_rng(0)
        self.before, tokens = random.integers(0, 2**40, (2, rows))
        carried = random.permutation(rows).astype(np.int32)
        carried[::3] = -1
        self.after = np.where(carried >= 0, tokens[carried], self.before)
        self._address, *others = [self._placed(array) for array in (self.before, carried, tokens)]
        pointers = zip(("*i64", "*i32", "*i64"), (self._address, *others), strict=True)
        self.arguments: list[tuple[str, int | float]] = [*pointers, ("i32", rows)]

    def _placed(self, array: Any) -> int:
        pinned = self._device.allocate_pinned(array.nbytes, "a launch's operand")
        pinned[:] = np.frombuffer(array.tobytes(), np.uint8)
        address = self._device.allocate(array.nbytes, "a launch's operand")
        self._device.copy_in(address, pinned, self._device.make_stream())
        self._device.synchronize("copying operands")
        return address

    def read(self, stream: Stream) -> Any:
        pinned = self._device.allocate_pinned(self.before.nbytes, "a launch's result")
        self._device.copy_out(pinned, self._address, stream)
        self._device.synchronize("reading the result")
        return pinned.view(np.int64).copy()


def _run(device: Device, stream: Stream, queue: Queue, way: str) -> None:
    if way == "launch":
        queue(stream)
    else:
        graph = device.capture(stream, queue)
        for _ in range(2 if way == "replay" else 0):
            device.replay(graph, stream)
    device.synchronize(f"the {way} of a kernel")
