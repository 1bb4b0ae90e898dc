"""A device that records the launches that the runtime binds, with the addresses of their arguments."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.artifact.programs.launch_program import CubinFacts, Kernel
from ingot.runtime.cuda.driver.device import Bytes, Device, Given, LoadedKernel, Queue


@dataclass(frozen=True)
class Bound:
    """A launch as the runtime bound it."""

    loaded: LoadedKernel
    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: Sequence[Given]
    node: str


@dataclass
class RecordingDevice:
    """A device that records what is bound and forwards everything else."""

    device: Device
    bound: list[Bound] = field(default_factory=list)
    by_queue: dict[Queue, Bound] = field(default_factory=dict)
    kernels: dict[int, Kernel] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def load_kernel(self, cubin: Bytes, kernel: Kernel, facts: CubinFacts) -> LoadedKernel:
        """A kernel of the device, with its description."""
        loaded = self.device.load_kernel(cubin, kernel, facts)
        self.kernels[id(loaded)] = kernel
        return loaded

    def bind(self, loaded: LoadedKernel, grid: tuple[int, int, int], arguments: Sequence[Given], node: str) -> Queue:
        """Bind the launch and record it."""
        queue = self.device.bind(loaded, grid, arguments, node)
        self.by_queue[queue] = made = Bound(loaded, self.kernels[id(loaded)], grid, arguments, node)
        self.bound.append(made)
        return queue
