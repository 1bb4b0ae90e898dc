"""Collects the launches of one program, the buffers they use and the weights they read.

Arguments are given by name and put into the catalogue's order; what is missing or superfluous is a fault of the
lowering and fails at once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.pipeline.cuda.arena import arena_bytes, lifetimes, plan_arena
from ingot.pipeline.cuda.catalog import CATALOG
from ingot.pipeline.cuda.kv_layout import KVLayout
from ingot.pipeline.cuda.launch_program import (
    ELEMENT_BYTES,
    EXTERNAL,
    Argument,
    BufferArgument,
    Launch,
    LaunchProgram,
    NullArgument,
    NumberArgument,
    Place,
    WeightArgument,
)

ActivationType = Literal["fp32", "fp16", "bf16"]
Given = Argument | int | float | None


@dataclass(frozen=True)
class Bucket:
    """What a program is made for: so many rows, decode or ragged, and the longest sequence in tokens."""

    rows: int
    attention: Literal["decode", "ragged"]
    context_tokens: int


@dataclass(frozen=True)
class Weight:
    """A tensor of the program's weights: its type in Triton's words, and how it is made when it is written."""

    type: str
    make: Callable[[], NDArray[Any]] = field(repr=False)


@dataclass
class ProgramBuilder:
    """The program so far."""

    bucket: Bucket
    activation_type: ActivationType
    kv: KVLayout
    weights: dict[str, Weight] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)

    def buffer(self, name: str, elements: int, type_: str | None = None) -> BufferArgument:
        """A buffer of the arena, new or known; or one of the runtime's, by its name."""
        kind = type_ or self.activation_type
        if name not in EXTERNAL:
            self.sizes[name] = max(self.sizes.get(name, 0), elements * ELEMENT_BYTES[kind])
        return BufferArgument(name=name, type=kind)

    def external(self, name: str, offset: int = 0) -> BufferArgument:
        """One of the runtime's buffers."""
        return BufferArgument(name=name, type=EXTERNAL[name] or self.kv.type, offset=offset)

    def weight(self, name: str, type_: str, make: Callable[[], NDArray[Any]]) -> WeightArgument:
        """A weight; the first to name one says how it is made."""
        self.weights.setdefault(name, Weight(type_, make))
        return WeightArgument(name=name, type=self.weights[name].type)

    def launch(
        self,
        kernel: str,
        node: ir.Node,
        grid: tuple[int, ...],
        constants: Mapping[str, int | float | bool | str],
        **given: Given,
    ) -> None:
        """Add a launch. An argument that is None is a null pointer."""
        listed = CATALOG[kernel].arguments
        assert given.keys() == listed.keys(), f"{kernel}: {given.keys() ^ listed.keys()}"
        arguments = tuple(self._argument(given[name], kind) for name, kind in listed.items())
        x, y, z = (*grid, 1, 1)[:3]
        self.launches.append(
            Launch(kernel=kernel, constants=dict(constants), grid=(x, y, z), arguments=arguments, node=node.name or "")
        )

    def program(self) -> LaunchProgram:
        """The finished program, with its arena planned."""
        alive = lifetimes([launch.buffers for launch in self.launches], self.sizes)
        offsets = plan_arena(alive)
        return LaunchProgram(
            rows=self.bucket.rows,
            attention=self.bucket.attention,
            activation_type=self.activation_type,
            kv_type=self.kv.type,
            arena_bytes=arena_bytes(alive, offsets),
            places={name: Place(offset=offset, bytes=alive[name].bytes) for name, offset in offsets.items()},
            launches=tuple(self.launches),
        )

    def _argument(self, given: Given, kind: str) -> Argument:
        if given is None:
            letter = kind.removeprefix("*")
            types = {"T": self.activation_type, "OUT": self.activation_type, "KV": self.kv.type, "C": "u8", "S": "fp32"}
            return NullArgument(type=types.get(letter, letter))
        return NumberArgument(value=given) if isinstance(given, int | float) else given


def next_power_of_two(number: int, least: int = 1) -> int:
    """The smallest power of two that is not below either."""
    return max(least, 1 << (number - 1).bit_length())


def as_float(values: NDArray[Any]) -> NDArray[np.float32]:
    """In float32, contiguous."""
    return np.ascontiguousarray(values, np.float32)
