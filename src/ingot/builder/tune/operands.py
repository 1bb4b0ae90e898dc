"""Operands of a measured matmul: random numbers, and copies of the weight that together exceed every cache.

The memory is filled with copies of a pattern of random bytes: on zeros a GPU is faster than on real numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ingot.artifact.launch_program import ELEMENT_BYTES, Kernel
from ingot.builder.tune.candidates import Matmul
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.pipeline.targets.cuda.tiles import FEW_ROWS, SPAN_BYTES
from ingot.runtime.cuda.device import Bytes, Device, Given, Stream
from ingot.sizes import ceil_div

_ROTATED_BYTES = 256 * 2**20  # size of the rotated weights: several times a GPU's cache
_MOST_COPIES = 64
_PATTERN_BYTES = 2**20
_WEIGHTS = ("weight", "codes")
_MOST_SPLITS = 16
_FLOATS: Mapping[str, Any] = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


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
