"""A device that interprets kernels in place of a GPU, and faults that can be planted in it. Times are meaningless.

    hang               a launch in the part "kernels" never ends
    illegal-address    a launch in the part "kernels" loses the context: nothing works in its process any more
    wrong-kernel       a kernel in the part "shapes" writes wrong numbers unless it has one stage
    missing-wheel      a package that the part "demo" imports is missing
    full-gpu           the part "steps" finds most of the memory taken

A fault is in its own part alone, and in every process of it.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from typing import Any

import pytest
import torch
from tests.simulators.triton_interpreter import use_interpreter, use_ordered_dots

use_interpreter()

from tests.simulators.interpreted_device import FakeKernel, FakeStream, InterpretedDevice  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from ingot.artifact.programs.launch_program import CubinFacts, Kernel  # noqa: E402
from ingot.errors import EngineError  # noqa: E402
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES  # noqa: E402
from ingot.runtime.cuda.driver.device import Bytes, Device, Given  # noqa: E402
from ingot.runtime.cuda.driver.stopwatch import HostStopwatch, Stopwatch  # noqa: E402

FAULTS: Mapping[str, tuple[str, ...]] = {  # the parts that each is in
    "hang": ("kernels",),
    "illegal-address": ("kernels",),
    "wrong-kernel": ("shapes", "ladder"),
    "missing-wheel": ("demo",),
    "full-gpu": ("steps",),
}
HANGS, LOSES, IS_WRONG = "gather_rows", "rms_norm", "gather_rows"  # kernels
MISSING = "safetensors"
_MEMORY_BYTES, _LEFT_BYTES = 2**30, 330_000  # too little for any of the programs


class DryMachine:
    """A machine whose device interprets kernels, for one part, with faults. Implements `device.Machine`."""

    is_dry = True
    torch_device = "cpu"

    def __init__(self, part: str = "", plant: Sequence[str] = ()) -> None:
        self.faults = frozenset(name for name in plant if part in FAULTS[name])
        self._opened: list[DryDevice] = []
        if part == "invariance":
            use_ordered_dots(pytest.MonkeyPatch())
        if "missing-wheel" in self.faults:
            _remove(MISSING)

    def open(self) -> Device:
        """A new one, on which copies end at once."""
        if not self.is_alive():
            raise EngineError("opening the GPU: the context was lost before")
        self._opened.append(DryDevice(self.faults))
        return self._opened[-1]

    def stopwatch(self, device: Device) -> Stopwatch:
        """The computer's clock."""
        return HostStopwatch(device)

    def is_alive(self) -> bool:
        """Whether no device was lost."""
        return all(device.lost is None for device in self._opened)

    def alias(self, device: Device, address: int, size: int) -> torch.Tensor:
        """The device's memory is the host's."""
        return torch.from_numpy(device.view(address, size))  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Torch's work is done when its call returns."""

    def release(self) -> None:
        """Torch keeps no memory of a CPU's tensors."""


class DryDevice(InterpretedDevice):
    """Interprets kernels even where launches are caught (kernel_cases.py), with faults."""

    def __init__(self, faults: frozenset[str] = frozenset()) -> None:
        super().__init__(_LEFT_BYTES if "full-gpu" in faults else _MEMORY_BYTES, hasty=True)
        self.faults = faults
        self._usual = _INTERPRETED_RUN
        self.failing = LOSES if "illegal-address" in faults else None
        self._one_stage: list[FakeKernel] = []

    def load_kernel(self, cubin: Bytes, kernel: Kernel, facts: CubinFacts) -> FakeKernel:
        """Load a kernel, noting those of one stage."""
        loaded = super().load_kernel(cubin, kernel, facts)
        if kernel.num_stages == 1:
            self._one_stage.append(loaded)
        return loaded

    def bind(
        self, kernel: FakeKernel, grid: tuple[int, int, int], arguments: Sequence[Given], node: str
    ) -> Callable[[FakeStream], None]:
        """Bind a launch, or a fault in its place."""
        if kernel.name == HANGS and "hang" in self.faults:
            return lambda stream: self.queue(stream, lambda: time.sleep(3600))
        queue = super().bind(kernel, grid, arguments, kernel.name)
        is_right = kernel.name != IS_WRONG or any(kernel is one for one in self._one_stage)
        if is_right or "wrong-kernel" not in self.faults:
            return queue
        kind, address = arguments[SIGNATURES[kernel.name].index("out")]
        out = self._argument(kind, address)

        def wrong(stream: FakeStream) -> None:
            queue(stream)
            self.queue(stream, lambda: out.mul_(1.25))

        return wrong

    def synchronize(self, what: str) -> None:
        """Interpret what is queued."""
        catching, InterpretedFunction.run = InterpretedFunction.run, self._usual
        try:
            super().synchronize(what)
        finally:
            InterpretedFunction.run = catching


class _Missing(MetaPathFinder):
    """Refuses a package as if it were not installed."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == self._package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _remove(package: str) -> None:
    """Let this process import a package no more."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Missing(package))


_INTERPRETED_RUN = InterpretedFunction.run
