"""A card without memory or time of its own: every launch takes what a function says, and a clock adds it up."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ingot.artifact.launch_program import CubinFacts, Kernel, LibraryMatmul
from ingot.errors import EngineError
from ingot.pipeline.targets.cuda.cubins import Cubin
from ingot.pipeline.targets.cuda.kernel_signatures import CATALOG
from ingot.runtime.cuda.device import Bytes

Cost = Callable[[Kernel, tuple[int, int, int]], float]
SHARED_BYTES = 1000


class FakeGpu:
    """Implements what the tuner asks of a `Device`. `launches` counts kernels that ran outside of graphs."""

    name, sm, total_bytes = "a card", 90, 2**40

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
        self._next += -(-size // 256) * 256
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
        """Every element of a whole result is one; the parts of a sum share it."""
        assert self.last is not None
        out = self.last.types[list(CATALOG[self.last.name].arguments).index("out")]
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
    """The card's clock."""

    def __init__(self, card: FakeGpu) -> None:
        self._card = card

    def mark(self, stream: Any) -> float:
        return self._card.clock

    def reached(self, mark: float) -> bool:
        return True

    def seconds(self, first: float, last: float) -> float:
        return last - first


def compile_nothing(kernels: Mapping[str, Kernel], sm: int) -> dict[str, Cubin]:
    """Deep pipelines need more shared memory than the card has."""
    return {
        key: Cubin(b"code", CubinFacts(symbol=kernel.name, shared_bytes=SHARED_BYTES + (kernel.num_stages > 4)))
        for key, kernel in kernels.items()
    }


class FakeLibrary:
    """A library whose kernel takes so long, and which has none for `lacks` columns. Implements `MatmulBinder`."""

    def __init__(self, card: FakeGpu, seconds: float, lacks: int = 0) -> None:
        self._card, self._seconds, self._lacks = card, seconds, lacks
        self.products: list[LibraryMatmul] = []
        self.closed = False

    def __call__(self, product: LibraryMatmul, addresses: Mapping[str, int]) -> Any:
        assert addresses.keys() == product.operands.keys()
        if product.n == self._lacks:
            raise EngineError("no algorithm")
        self.products.append(product)

        def queue(stream: Any) -> None:
            self._card.clock += self._seconds

        return queue

    def close(self) -> None:
        self.closed = True


def no_library(device: Any, stream: Any) -> FakeLibrary:
    """As where it is not installed."""
    raise EngineError("there is none")
