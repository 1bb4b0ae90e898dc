"""Times one matmul in one tile on the GPU, and checks its result.

Operands are random numbers, because a GPU is faster on zeros, and so many copies of the weight that they exceed every
cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ingot.artifact.launch_program import ELEMENT_BYTES, BufferArgument, Kernel, LibraryMatmul, WeightArgument
from ingot.builder.tune.candidates import Matmul, cut_of, with_tile
from ingot.errors import EngineError
from ingot.pipeline.targets.cuda.cubins import Cubin
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.pipeline.targets.cuda.tiles import FEW_ROWS, SPAN_BYTES, Tile
from ingot.progress import note
from ingot.runtime.cuda.device import Bytes, Device, Given, LoadedKernel, Queue, Stream
from ingot.runtime.cuda.programs import MatmulBinder
from ingot.runtime.cuda.stopwatch import Stopwatch, laps
from ingot.sizes import ceil_div

ROUNDS = 7
_ROTATED_BYTES = 256 * 2**20  # size of the rotated weights: several times a GPU's cache
_MOST_COPIES = 64
_PATTERN_BYTES = 2**20
_WEIGHTS = ("weight", "codes")
_MOST_SPLITS = 16
_FLOATS: Mapping[str, Any] = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
_LARGEST_ERROR = 0.03  # relative norm of the difference to the safe tile's result: within 16-bit rounding
_CHECKED_ROWS = 16


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
            total += pinned.view(_FLOATS[kind.removeprefix("*")]).astype(np.float32).reshape(rows, shape.n)
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


@dataclass(frozen=True)
class Operands:
    """Addresses of a matmul's operands by name, and of all copies of its weight."""

    device: Device
    addresses: Mapping[str, int]
    weights: tuple[int, ...]

    @classmethod
    def of(cls, device: Device, stream: Stream, matmul: Matmul, rotated_bytes: int = _ROTATED_BYTES) -> "Operands":
        """Allocate and fill the operands. EngineError if the device is out of memory."""
        sizes = _sizes(matmul)
        weight = next(name for name in _WEIGHTS if name in sizes)
        copies = min(_MOST_COPIES, max(1, ceil_div(rotated_bytes, sizes[weight])))
        out = matmul.shape.rows * matmul.shape.n * 4 * _MOST_SPLITS if matmul.shape.rows <= FEW_ROWS else 0
        sizes["out"] = max(out, matmul.shape.rows * matmul.shape.n * 4)
        addresses = {name: device.allocate(size, f"{name} of {matmul.shape.key}") for name, size in sizes.items()}
        more = [device.allocate(sizes[weight], f"{weight} of {matmul.shape.key}") for _ in range(copies - 1)]
        weights = (addresses[weight], *more)
        types = dict(zip(SIGNATURES[matmul.shape.kernel].arguments, matmul.kernel.types, strict=True))
        patterns = _Patterns(device, stream)
        for name, size in sizes.items():
            for address in weights if name == weight else (addresses[name],):
                patterns.fill(address, size, name, types[name].removeprefix("*"))
        device.synchronize("filling operands")
        patterns.free()
        return cls(device, addresses, weights)

    def given(self, matmul: Matmul, kernel: Kernel, copy: int) -> list[Given]:
        """Return the arguments of a launch with one copy of the weight."""
        values: list[Given] = []
        for (name, argument), kind in zip(matmul.arguments.items(), kernel.types, strict=True):
            if argument.kind == "number":
                values.append((kind, argument.value))
            elif argument.kind == "null":
                values.append((kind, 0))
            else:
                values.append((kind, self.weights[copy] if name in _WEIGHTS else self.addresses[name]))
        return values

    def of_library(self, copy: int) -> dict[str, int]:
        """Return the addresses of a library's operands with one copy of the weight."""
        others = {name: self.addresses[name] for name in ("x", "bias", "out") if name in self.addresses}
        return {**others, "weight": self.weights[copy]}

    def free(self) -> None:
        """Free all operands."""
        for address in {*self.addresses.values(), *self.weights}:
            self.device.free(address)


def _sizes(matmul: Matmul) -> dict[str, int]:
    """Bytes of every operand of the launch except the result."""
    shape, constants = matmul.shape, matmul.kernel.constants
    groups = int(constants.get("GROUPS", 1))
    packed = int(constants.get("SPANS", 0)) * SPAN_BYTES
    elements = {
        "x": shape.rows * max(shape.columns, int(matmul.numbers["x_stride"])),
        "weight": shape.n * shape.columns,
        "codes": shape.n * packed,
        "scales": shape.n * groups,
        "zero_points": shape.n * groups,
        "x_scales": shape.rows,
        "weight_scales": shape.n,
        "bias": shape.n,
    }
    return {
        name: elements[name] * ELEMENT_BYTES[kind.removeprefix("*")]
        for (name, argument), kind in zip(matmul.arguments.items(), matmul.kernel.types, strict=True)
        if name in elements and argument.kind in ("buffer", "weight")
    }


class _Patterns:
    """Patterns of random numbers on the device, one for each kind of operand."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device, self._stream = device, stream
        self._known: dict[tuple[str, str], int] = {}

    def fill(self, address: int, size: int, name: str, kind: str) -> None:
        """Queue copies of the pattern into an operand."""
        form = name if name in ("scales", "zero_points", "x_scales", "weight_scales") else ""
        if (form, kind) not in self._known:
            self._known[form, kind] = self._upload(_pattern(form, kind))
        for begin in range(0, size, _PATTERN_BYTES):
            part = min(_PATTERN_BYTES, size - begin)
            self._device.copy(address + begin, self._known[form, kind], part, self._stream)

    def free(self) -> None:
        """Free the patterns."""
        for address in self._known.values():
            self._device.free(address)

    def _upload(self, pattern: Bytes) -> int:
        address = self._device.allocate(pattern.size, "random numbers")
        pinned = self._device.allocate_pinned(pattern.size, "random numbers")
        pinned[:] = pattern
        self._device.copy_in(address, pinned, self._stream)
        self._device.synchronize("copying random numbers")
        return address


def _pattern(form: str, kind: str) -> Bytes:
    random = np.random.default_rng(0)
    if form == "zero_points":
        return random.integers(7, 10, _PATTERN_BYTES, np.uint8)
    if kind not in _FLOATS:
        signs: NDArray[np.uint8] = random.integers(0, 2, _PATTERN_BYTES, np.uint8) << np.uint8(7)
        return random.integers(0, 127, _PATTERN_BYTES, np.uint8) | signs  # never a NaN of e4m3fn
    normal = random.standard_normal(_PATTERN_BYTES // ELEMENT_BYTES[kind], np.float32)
    values = 1e-3 * (1 + 0.1 * np.clip(normal, -3, 3)) if form else 0.1 * normal
    raw: Bytes = values.astype(_FLOATS[kind]).view(np.uint8)
    return raw
