"""One product in one tile: how long it takes on the card, and what it computes."""

from collections.abc import Mapping
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ingot.artifact.launch_program import ELEMENT_BYTES, BufferArgument, Kernel, LibraryMatmul, WeightArgument
from ingot.builder.tune.candidates import Product, cut_of, with_tile
from ingot.builder.tune.operands import Operands
from ingot.errors import EngineError
from ingot.pipeline.targets.cuda.cubins import Cubin
from ingot.pipeline.targets.cuda.kernel_signatures import CATALOG
from ingot.pipeline.targets.cuda.tiles import Tile
from ingot.progress import note
from ingot.runtime.cuda.device import Device, LoadedKernel, Queue, Stream
from ingot.runtime.cuda.programs import MatmulBinder
from ingot.runtime.cuda.stopwatch import Stopwatch, laps

ROUNDS = 7
_LARGEST_ERROR = 0.03  # of a result beside the safe tile's, in norm: what 16 bits explain
_CHECKED_ROWS = 16
_FLOATS: Mapping[str, Any] = {"*fp32": np.float32, "*fp16": np.float16, "*bf16": ml_dtypes.bfloat16}


class ProductTimer:
    """Operands of a product on the device; `time` runs it over them. The first tile's result is what others must give.

    bytes_per_second    what the card reads: parts of a sum cost their reader time
    """

    def __init__(
        self, device: Device, stopwatch: Stopwatch, stream: Stream, product: Product, bytes_per_second: float
    ) -> None:
        self._device, self._stopwatch, self._stream = device, stopwatch, stream
        self._product, self._bytes_per_second = product, bytes_per_second
        self._whole = with_tile(product, Tile(rows=16, columns=16))[0]
        self._operands = Operands.of(device, stream, product)
        self._expected: NDArray[np.float32] | None = None

    def time(self, tile: Tile, cubin: Cubin) -> float | None:
        """Seconds; None where the card has not the shared memory for the tile, or it computes something else."""
        kernel, grid = with_tile(self._product, tile)
        loaded = self._loaded(kernel, cubin)
        if loaded is None:
            return None
        key = self._product.shape.key
        queues = [
            self._device.bind(loaded, grid, self._operands.given(self._product, kernel, copy), key)
            for copy in range(len(self._operands.weights))
        ]
        seconds = self._time(queues, kernel, cut_of(self._product.shape, tile).splits)
        return None if seconds is None else seconds + self._parts_bytes(tile) / self._bytes_per_second

    def time_library(self, products: MatmulBinder) -> float | None:
        """Seconds of a library's kernel; None where it has none for the shape, or computes something else."""
        product = library_product(self._product, self._whole)
        copies = range(len(self._operands.weights))
        try:
            queues = [products(product, self._operands.of_library(copy)) for copy in copies]
        except EngineError as error:
            note(str(error))
            return None
        return self._time(queues, self._whole, 1)

    def _time(self, queues: list[Queue], kernel: Kernel, splits: int) -> float | None:
        """Of one of the queues, over all of them in turn; they run once before they are captured."""
        queues[0](self._stream)
        if not self._agrees(self._result(kernel, splits)):
            return None
        graph = self._device.capture(self._stream, _all(queues))
        times = laps(self._stopwatch, self._stream, lambda stream: self._device.replay(graph, stream), ROUNDS)
        return median(times) / len(queues)

    def close(self) -> None:
        """Give the operands back."""
        self._operands.free()

    def _loaded(self, kernel: Kernel, cubin: Cubin) -> LoadedKernel | None:
        """The kernel; None where the card cannot take it. The first has to fit."""
        try:
            return self._device.load_kernel(np.frombuffer(cubin.code, np.uint8).copy(), kernel, cubin.facts)
        except EngineError:
            if self._expected is None:
                raise
            return None

    def _parts_bytes(self, tile: Tile) -> int:
        """What its reader has to read more than one result."""
        shape, splits = self._product.shape, cut_of(self._product.shape, tile).splits
        return shape.rows * shape.n * 4 * splits if splits > 1 else 0

    def _result(self, kernel: Kernel, splits: int) -> NDArray[np.float32]:
        """The first rows, parts added up [rows, n]."""
        shape = self._product.shape
        kind = kernel.types[list(CATALOG[kernel.name].arguments).index("out")]
        rows, size = min(shape.rows, _CHECKED_ROWS), ELEMENT_BYTES[kind.removeprefix("*")]
        total = np.zeros((rows, shape.n), np.float32)
        pinned = self._device.allocate_pinned(rows * shape.n * size, "a result")
        for part in range(splits):
            address = self._operands.addresses["out"] + part * shape.rows * shape.n * size
            self._device.copy_out(pinned, address, self._stream)
            self._device.synchronize(f"{kernel.name} of {shape.key}")
            total += pinned.view(_FLOATS[kind]).astype(np.float32).reshape(rows, shape.n)
        return total

    def _agrees(self, found: NDArray[np.float32]) -> bool:
        if self._expected is None:
            self._expected = found
        wanted = self._expected
        return bool(np.linalg.norm(found - wanted) <= _LARGEST_ERROR * np.linalg.norm(wanted))


def library_product(product: Product, kernel: Kernel) -> LibraryMatmul:
    """The product for a library, its result as `kernel` stores it; operands are named as the catalogue does."""
    listed = list(CATALOG[kernel.name].arguments)
    types = {name: kind.removeprefix("*") for name, kind in zip(listed, kernel.types, strict=True)}
    given = dict(zip(listed, product.launch.arguments, strict=True))
    numbers = {name: one.value for name, one in given.items() if one.kind == "number"}
    has_bias = bool(kernel.constants["HAS_BIAS"])
    return LibraryMatmul(
        rows=product.shape.rows,
        n=product.shape.n,
        columns=product.shape.columns,
        x=BufferArgument(name="x", type=types["x"]),
        weight=WeightArgument(name="weight", type=types["weight"]),
        bias=WeightArgument(name="bias", type=types["bias"]) if has_bias else None,
        out=BufferArgument(name="out", type=types["out"]),
        x_stride=int(numbers["x_stride"]),
        out_stride=int(numbers["out_stride"]),
        alpha=float(numbers["alpha"]),
        node=product.shape.key,
    )


def _all(queues: list[Queue]) -> Queue:
    def run(stream: Stream) -> None:
        for queue in queues:
            queue(stream)

    return run
