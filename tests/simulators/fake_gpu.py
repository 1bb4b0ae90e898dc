"""A GPU without memory: a function gives the time of every launch, and a clock adds the times."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ingot.artifact.programs.launch_program import CubinFacts, Kernel, LibraryMatmul
from ingot.errors import EngineError
from ingot.pipeline.targets.cuda.cubins import Cubin
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.runtime.cuda.driver.device import Bytes
from ingot.sizes import round_up

Cost = Callable[[Kernel, tuple[int, int, int]], float]
SHARED_BYTES = 1000


class FakeGpu:
    """Implements the part of `Device` that the tuner uses. `launches` counts kernels that ran outside of graphs."""

    name, sm, total_bytes = "a GPU", 90, 2**40

    def __init__(self, cost: Cost, wrong: Callable[[Kernel], bool] = lambda kernel: False) -> None:
        self.cost, self.wrong = cost, wrong
        self.clock = 0.0
        self.held: set[int] = set()
        self.launches = 0
        self.last: Kernel | None = None
        self._next = 256

    def activate(self) -> None: ...

    def make_stream(self) -> None: ...

    def synchronize(self, what: str) -> None: ...

    def close(self) -> None: ...

    def allocate(self, size: int, what: str) -> int:
        self._next += round_up(size, 256)
        self.held.add(self._next)
        return self._next

    def free(self, address: int) -> None:
        self.held.remove(address)

    def allocate_pinned(self, size: int, what: str) -> Bytes:
        return np.zeros(size, np.uint8)

    def copy(self, target: int, source: int, size: int, stream: Any) -> None:
        self.clock += size / 1e12

    def copy_in(self, target: int, source: Bytes, stream: Any) -> None: ...

    def copy_out(self, target: Bytes, source: int, stream: Any) -> None:
        """Every element of the result is one, divided evenly among the split-K partials."""
        assert self.last is not None
        out = self.last.types[SIGNATURES[self.last.name].index("out")]
        value = (7.0 if self.wrong(self.last) else 1.0) / float(self.last.constants["SPLITS"])
        target.view(np.float32 if out == "*fp32" else np.float16)[:] = value

    def load_kernel(self, cubin: Bytes, kernel: Kernel, facts: CubinFacts) -> Kernel:
        if facts.shared_bytes > SHARED_BYTES:
            raise EngineError("too much shared memory")
        return kernel

    def bind(self, kernel: Kernel, grid: tuple[int, int, int], arguments: Sequence[Any], node: str) -> Any:
        assert len(arguments) == len(kernel.types)

        def queue(stream: Any) -> None:
            self.launches += 1
            self.last = kernel
            self.clock += self.cost(kernel, grid)

        return queue

    def capture(self, stream: Any, work: Callable[[Any], None]) -> float:
        before = self.clock
        work(stream)
        taken, self.clock = self.clock - before, before
        return taken

    def replay(self, graph: float, stream: Any) -> None:
        self.clock += graph


class FakeStopwatch:
    """The GPU's clock."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def mark(self, stream: Any) -> float:
        return self._gpu.clock

    def reached(self, mark: float) -> bool:
        return True

    def seconds(self, first: float, last: float) -> float:
        return last - first


def compile_nothing(kernels: Mapping[str, Kernel], sm: int, workers: int | None = None) -> dict[str, Cubin]:
    """Compile nothing; deep pipelines claim more shared memory than the GPU has."""
    return {
        key: Cubin(b"code", CubinFacts(symbol=kernel.name, shared_bytes=SHARED_BYTES + (kernel.num_stages > 4)))
        for key, kernel in kernels.items()
    }


class FakeLibrary:
    """A library whose kernel takes `seconds`, without a kernel for `lacks` columns. Implements `MatmulBinder`."""

    version = "a library 1"

    def __init__(self, gpu: FakeGpu, seconds: float, lacks: int = 0) -> None:
        self._gpu, self._seconds, self._lacks = gpu, seconds, lacks
        self.matmuls: list[LibraryMatmul] = []
        self.closed = False

    def __call__(self, matmul: LibraryMatmul, addresses: Mapping[str, int]) -> Any:
        assert addresses.keys() == matmul.operands.keys()
        if matmul.n == self._lacks:
            raise EngineError("no algorithm")
        self.matmuls.append(matmul)

        def queue(stream: Any) -> None:
            self._gpu.clock += self._seconds

        return queue

    def close(self) -> None:
        self.closed = True


def no_library(device: Any, stream: Any) -> FakeLibrary:
    """Fail as if the library were not installed."""
    raise EngineError("not installed")
