"""Memory for a product that is measured: random operands, and as many weights in turn as no cache holds.

What is written on the device is a pattern of random bytes, copied over and over: of zeros a card is faster than it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ingot.artifact.launch_program import ELEMENT_BYTES, Kernel
from ingot.builder.tune.candidates import Product
from ingot.pipeline.targets.cuda.kernel_signatures import CATALOG
from ingot.pipeline.targets.cuda.tiles import FEW_ROWS
from ingot.runtime.cuda.device import Bytes, Device, Given, Stream

_ROTATED_BYTES = 256 * 2**20  # of weights: several times what a card's cache holds
_MOST_COPIES = 64
_PATTERN_BYTES = 2**20
_WEIGHTS = ("weight", "codes")
_MOST_SPLITS = 16
_FLOATS: Mapping[str, Any] = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Operands:
    """Addresses of a product's arguments by name; of its weights one for each copy."""

    device: Device
    addresses: Mapping[str, int]
    weights: tuple[int, ...]

    @classmethod
    def of(cls, device: Device, stream: Stream, product: Product, rotated_bytes: int = _ROTATED_BYTES) -> "Operands":
        """Allocate and fill. EngineError when the device has no room."""
        sizes = _sizes(product)
        weight = next(name for name in _WEIGHTS if name in sizes)
        copies = min(_MOST_COPIES, max(1, -(-rotated_bytes // sizes[weight])))
        out = product.shape.rows * product.shape.n * 4 * _MOST_SPLITS if product.shape.rows <= FEW_ROWS else 0
        sizes["out"] = max(out, product.shape.rows * product.shape.n * 4)
        addresses = {name: device.allocate(size, f"{name} of {product.shape.key}") for name, size in sizes.items()}
        more = [device.allocate(sizes[weight], f"{weight} of {product.shape.key}") for _ in range(copies - 1)]
        weights = (addresses[weight], *more)
        types = dict(zip(CATALOG[product.shape.kernel].arguments, product.kernel.types, strict=True))
        patterns = _Patterns(device, stream)
        for name, size in sizes.items():
            for address in weights if name == weight else (addresses[name],):
                patterns.fill(address, size, name, types[name].removeprefix("*"))
        device.synchronize("filling operands")
        patterns.free()
        return cls(device, addresses, weights)

    def given(self, product: Product, kernel: Kernel, copy: int) -> list[Given]:
        """The arguments of a launch with one of the weights."""
        values: list[Given] = []
        for name, kind, argument in zip(
            CATALOG[kernel.name].arguments, kernel.types, product.launch.arguments, strict=True
        ):
            if argument.kind == "number":
                values.append((kind, argument.value))
            elif argument.kind == "null":
                values.append((kind, 0))
            else:
                values.append((kind, self.weights[copy] if name in _WEIGHTS else self.addresses[name]))
        return values

    def of_library(self, copy: int) -> dict[str, int]:
        """Addresses of a library's operands, with one of the weights."""
        wanted = {name: self.addresses[name] for name in ("x", "bias", "out") if name in self.addresses}
        return {**wanted, "weight": self.weights[copy]}

    def free(self) -> None:
        """Give everything back."""
        for address in {*self.addresses.values(), *self.weights}:
            self.device.free(address)


def _sizes(product: Product) -> dict[str, int]:
    """Bytes of every operand that the launch has, but for the result."""
    shape, constants = product.shape, product.kernel.constants
    groups = int(constants.get("GROUPS", 1))
    packed = int(constants.get("SPANS", 0)) * 8 * shape.bits
    elements = {
        "x": shape.rows * max(shape.columns, _stride(product)),
        "weight": shape.n * shape.columns,
        "codes": shape.n * packed,
        "scales": shape.n * groups,
        "zero_points": shape.n * groups,
        "x_scales": shape.rows,
        "weight_scales": shape.n,
        "bias": shape.n,
    }
    listed = zip(CATALOG[shape.kernel].arguments, product.kernel.types, product.launch.arguments, strict=True)
    return {
        name: elements[name] * ELEMENT_BYTES[kind.removeprefix("*")]
        for name, kind, argument in listed
        if name in elements and argument.kind in ("buffer", "weight")
    }


def _stride(product: Product) -> int:
    """Elements from one row of x to the next."""
    argument = product.launch.arguments[list(CATALOG[product.shape.kernel].arguments).index("x_stride")]
    return int(argument.value) if argument.kind == "number" else 0


class _Patterns:
    """Random numbers on the device, one pattern for each kind of operand."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device, self._stream = device, stream
        self._known: dict[tuple[str, str], int] = {}

    def fill(self, address: int, size: int, name: str, kind: str) -> None:
        """Queue copies of the pattern over an operand."""
        form = name if name in ("scales", "zero_points", "x_scales", "weight_scales") else ""
        if (form, kind) not in self._known:
            self._known[form, kind] = self._upload(_pattern(form, kind))
        for begin in range(0, size, _PATTERN_BYTES):
            part = min(_PATTERN_BYTES, size - begin)
            self._device.copy(address + begin, self._known[form, kind], part, self._stream)

    def free(self) -> None:
        """Give the patterns back."""
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
        return random.integers(0, 127, _PATTERN_BYTES, np.uint8) | signs  # no NaN of e4m3fn is among them
    normal = random.standard_normal(_PATTERN_BYTES // ELEMENT_BYTES[kind], np.float32)
    values = 1e-3 * (1 + 0.1 * np.clip(normal, -3, 3)) if form else 0.1 * normal
    raw: Bytes = values.astype(_FLOATS[kind]).view(np.uint8)
    return raw
