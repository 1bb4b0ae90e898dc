"""Times one matmul in one tile on the GPU, and checks its result."""

from collections.abc import Mapping
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ingot.artifact.programs.launch_program import ELEMENT_BYTES, BufferArgument, Kernel, LibraryMatmul, WeightArgument
from ingot.builder.tune.candidates import Matmul, cut_of, with_tile
from ingot.builder.tune.operands import Operands
from ingot.errors import EngineError
from ingot.pipeline.targets.cuda.cubins import Cubin
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.pipeline.targets.cuda.tiles import Tile
from ingot.progress import note
from ingot.runtime.cuda.driver.device import Device, LoadedKernel, Queue, Stream
from ingot.runtime.cuda.driver.stopwatch import Stopwatch, laps
from ingot.runtime.cuda.programs import MatmulBinder

ROUNDS = 7
_LARGEST_ERROR = 0.03  # relative norm of the difference to the safe tile's result: within 16-bit rounding
_CHECKED_ROWS = 16
_FLOATS: Mapping[str, Any] = {"*fp32": np.float32, "*fp16": np.float16, "*bf16": ml_dtypes.bfloat16}


class MatmulTimer:
    """Runs a matmul over operands on the device. The first tile's result is the reference for all others.

    bytes_per_second    memory bandwidth, for the time that the reader of split-K partials needs
    """

    def __init__(
        self, device: Device, stopwatch: Stopwatch, stream: Stream, matmul: Matmul, bytes_per_second: float
    ) -> None:
        self._device, self._stopwatch, self._stream = device, stopwatch, stream
        self._matmul, self._bytes_per_second = matmul, bytes_per_second
        self._unsplit = with_tile(matmul, Tile(rows=16, columns=16))[0]
        self._operands = Operands.of(device, stream, matmul)
        self._expected: NDArray[np.float32] | None = None

    def time(self, tile: Tile, cubin: Cubin) -> float | None:
        """Return seconds; None if the tile exceeds the GPU's shared memory or gives another result."""
        kernel, grid = with_tile(self._matmul, tile)
        loaded = self._loaded(kernel, cubin)
        if loaded is None:
            return None
        key = self._matmul.shape.key
        queues = [
            self._device.bind(loaded, grid, self._operands.given(self._matmul, kernel, copy), key)
            for copy in range(len(self._operands.weights))
        ]
        seconds = self._time(queues, kernel, cut_of(self._matmul.shape, tile).splits)
        return None if seconds is None else seconds + self._partials_bytes(tile) / self._bytes_per_second

    def time_library(self, bind: MatmulBinder) -> float | None:
        """Return seconds of a library's kernel; None if it has none for the shape or gives another result."""
        matmul = library_matmul(self._matmul, self._unsplit)
        copies = range(len(self._operands.weights))
        try:
            queues = [bind(matmul, self._operands.of_library(copy)) for copy in copies]
        except EngineError as error:
            note(str(error))
            return None
        return self._time(queues, self._unsplit, 1)

    def _time(self, queues: list[Queue], kernel: Kernel, splits: int) -> float | None:
        """Return seconds of one queue, averaged over all in turn; None if the first run gives another result."""
        queues[0](self._stream)
        if not self._agrees(self._result(kernel, splits)):
            return None
        graph = self._device.capture(self._stream, _all(queues))
        times = laps(self._stopwatch, self._stream, lambda stream: self._device.replay(graph, stream), ROUNDS)
        return median(times) / len(queues)

    def close(self) -> None:
        """Free the operands."""
        self._operands.free()

    def _loaded(self, kernel: Kernel, cubin: Cubin) -> LoadedKernel | None:
        """Load the kernel; None if the GPU cannot. The first one must fit."""
        try:
            return self._device.load_kernel(np.frombuffer(cubin.code, np.uint8).copy(), kernel, cubin.facts)
        except EngineError:
            if self._expected is None:
                raise
            return None

    def _partials_bytes(self, tile: Tile) -> int:
        """Bytes of split-K partials, which the reader has to read."""
        shape, splits = self._matmul.shape, cut_of(self._matmul.shape, tile).splits
        return shape.rows * shape.n * 4 * splits if splits > 1 else 0

    def _result(self, kernel: Kernel, splits: int) -> NDArray[np.float32]:
        """Read the first rows of the result, partials added: [rows, n]."""
        shape = self._matmul.shape
        kind = kernel.types[SIGNATURES[kernel.name].index("out")]
        rows, size = min(shape.rows, _CHECKED_ROWS), ELEMENT_BYTES[kind.removeprefix("*")]
        total = np.zeros((rows, shape.n), np.float32)
        pinned = self._device.allocate_pinned(rows * shape.n * size, "a result")
        for partial in range(splits):
            address = self._operands.addresses["out"] + partial * shape.rows * shape.n * size
            self._device.copy_out(pinned, address, self._stream)
            self._device.synchronize(f"{kernel.name} of {shape.key}")
            total += pinned.view(_FLOATS[kind]).astype(np.float32).reshape(rows, shape.n)
        return total

    def _agrees(self, found: NDArray[np.float32]) -> bool:
        if self._expected is None:
            self._expected = found
        expected = self._expected
        return bool(np.linalg.norm(found - expected) <= _LARGEST_ERROR * np.linalg.norm(expected))


def library_matmul(matmul: Matmul, kernel: Kernel) -> LibraryMatmul:
    """Return the matmul for a library, with the result in the type that `kernel` stores; operands have their names."""
    named = zip(SIGNATURES[kernel.name].arguments, kernel.types, strict=True)
    types, numbers = {name: kind.removeprefix("*") for name, kind in named}, matmul.numbers
    has_bias = bool(kernel.constants["HAS_BIAS"])
    return LibraryMatmul(
        rows=matmul.shape.rows,
        n=matmul.shape.n,
        columns=matmul.shape.columns,
        x=BufferArgument(name="x", type=types["x"]),
        weight=WeightArgument(name="weight", type=types["weight"]),
        bias=WeightArgument(name="bias", type=types["bias"]) if has_bias else None,
        out=BufferArgument(name="out", type=types["out"]),
        x_stride=int(numbers["x_stride"]),
        out_stride=int(numbers["out_stride"]),
        alpha=float(numbers["alpha"]),
        node=matmul.shape.key,
    )


def _all(queues: list[Queue]) -> Queue:
    def run(stream: Stream) -> None:
        for queue in queues:
            queue(stream)

    return run
