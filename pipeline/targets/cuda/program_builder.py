"""Collects the launches of one program, the buffers they use, the weights they read and the kernels they need.

Arguments are given by name and put into the catalogue's order; what is missing or superfluous is a fault of the
lowering and fails at once.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact import KVGeometry
from ingot.artifact.kv_geometry import KVType
from ingot.artifact.launch_program import (
    ELEMENT_BYTES,
    EXTERNAL,
    KV_ELEMENTS,
    ActivationType,
    Argument,
    BufferArgument,
    Constant,
    Kernel,
    Launch,
    LaunchProgram,
    LibraryMatmul,
    NullArgument,
    NumberArgument,
    Place,
    Sampler,
    SegmentCall,
    WeightArgument,
)
from ingot.pipeline.targets.cuda.arena import arena_bytes, lifetimes, plan_arena
from ingot.pipeline.targets.cuda.kernel_signatures import CATALOG
from ingot.pipeline.targets.cuda.tiles import TileTable

TILE_QUERIES = 32  # queries of one sequence that a program of ragged attention takes
SAMPLER_WARPS = 16  # one program has a row of logits to itself: as much of a multiprocessor as it can use
Given = Argument | int | float | None


_FLOAT_KV: Mapping[ActivationType, KVType] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Bucket:
    """What a program is made for, in the words of LaunchProgram; and the longest sequence in tokens."""

    rows: int
    attention: Literal["decode", "ragged"]
    context_tokens: int
    sequences: int
    logits_rows: int

    @classmethod
    def decode(cls, rows: int, context_tokens: int) -> "Bucket":
        """One token of each of so many sequences."""
        return cls(rows, "decode", context_tokens, rows, rows)

    @classmethod
    def ragged(cls, rows: int, context_tokens: int, sequences: int) -> "Bucket":
        """So many tokens of at most so many sequences, each of which may want its next token."""
        return cls(rows, "ragged", context_tokens, min(rows, sequences), min(rows, sequences))

    @property
    def tiles(self) -> int:
        """Most tiles of queries that so many rows of so many sequences can take."""
        return 0 if self.attention == "decode" else self.rows // TILE_QUERIES + self.sequences


@dataclass(frozen=True)
class Weight:
    """A tensor of the program's weights: its type in Triton's words, and how it is made when it is written."""

    type: str
    make: Callable[[], NDArray[Any]] = field(repr=False)


@dataclass
class Shared:
    """What the programs of all buckets have in common."""

    activation_type: ActivationType
    kv: KVGeometry
    tiles: TileTable = field(default_factory=TileTable)
    weights: dict[str, Weight] = field(default_factory=dict)
    kernels: dict[str, Kernel] = field(default_factory=dict)

    @classmethod
    def of(cls, activation_type: ActivationType, geometry: KVGeometry, tiles: TileTable) -> "Shared":
        """For a model of that geometry: its pool is in the activations' type where it is not quantized."""
        if not geometry.is_quantized:
            geometry = geometry.model_copy(update={"dtype": _FLOAT_KV[activation_type]})
        return cls(activation_type, geometry, tiles)

    def kernel(self, kernel: Kernel) -> str:
        """The kernel's key: its name, and a digest of what it is compiled for."""
        text = json.dumps(kernel.model_dump(), sort_keys=True)
        key = f"{kernel.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        self.kernels[key] = kernel
        return key


@dataclass
class ProgramBuilder:
    """The program so far."""

    bucket: Bucket
    shared: Shared
    launches: list[Launch | SegmentCall | LibraryMatmul] = field(default_factory=list)
    samplers: dict[Sampler, tuple[Launch, ...]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    head_start: int | None = None

    @property
    def activation_type(self) -> ActivationType:
        """Triton's name of the activations' type."""
        return self.shared.activation_type

    @property
    def kv(self) -> KVGeometry:
        """The pool's geometry."""
        return self.shared.kv

    @property
    def rows(self) -> int:
        """Rows of what is computed next: tokens, and wanted logits in the head."""
        return self.bucket.rows if self.head_start is None else self.bucket.logits_rows

    def begin_head(self) -> None:
        """What follows has a row per wanted logit."""
        assert self.head_start is None
        self.head_start = len(self.launches)

    def buffer(self, name: str, elements: int, type_: str | None = None) -> BufferArgument:
        """A buffer of the arena, new or known; or one of the runtime's, by its name."""
        kind = type_ or self.activation_type
        if name not in EXTERNAL:
            self.sizes[name] = max(self.sizes.get(name, 0), elements * ELEMENT_BYTES[kind])
        return BufferArgument(name=name, type=kind)

    def external(self, name: str, offset: int = 0) -> BufferArgument:
        """One of the runtime's buffers."""
        return BufferArgument(name=name, type=EXTERNAL[name] or KV_ELEMENTS[self.kv.dtype], offset=offset)

    def weight(self, name: str, type_: str, make: Callable[[], NDArray[Any]]) -> WeightArgument:
        """A weight; the first to name one says how it is made."""
        self.shared.weights.setdefault(name, Weight(type_, make))
        return WeightArgument(name=name, type=self.shared.weights[name].type)

    def launch(
        self,
        kernel: str,
        node: ir.Node,
        grid: tuple[int, ...],
        constants: Mapping[str, Constant],
        *,
        num_warps: int = 4,
        num_stages: int = 3,
        **given: Given,
    ) -> None:
        """Add a launch. An argument that is None is a null pointer."""
        options = (num_warps, num_stages)
        self.launches.append(self._launch(kernel, node.name or "", grid, constants, options, given))

    def call(self, step: SegmentCall | LibraryMatmul) -> None:
        """Add what others run: a segment by another engine, a product by a library."""
        self.launches.append(step)

    def sampler(self, name: Sampler, constants: Mapping[str, Constant], **given: Given) -> None:
        """Choose tokens by the kernel of that name."""
        launch = self._launch(name, name, (self.bucket.logits_rows,), constants, (SAMPLER_WARPS, 1), given)
        self.samplers[name] = (launch,)

    def program(self) -> LaunchProgram:
        """The finished program, with its arena planned."""
        head_start = len(self.launches) if self.head_start is None else self.head_start
        uses = [launch.buffers for launch in self.launches]
        before, after = (set(chain.from_iterable(part)) for part in (uses[:head_start], uses[head_start:]))
        alive = lifetimes([*uses, sorted(before & after)], self.sizes)
        offsets = plan_arena(alive)
        return LaunchProgram(
            rows=self.bucket.rows,
            sequences=self.bucket.sequences,
            logits_rows=self.bucket.logits_rows,
            attention=self.bucket.attention,
            tiles=self.bucket.tiles,
            arena_bytes=arena_bytes(alive, offsets),
            places={name: Place(offset=offset, bytes=alive[name].bytes) for name, offset in offsets.items()},
            launches=tuple(self.launches),
            head_start=head_start,
            samplers=self.samplers,
        )

    def _launch(
        self,
        name: str,
        node: str,
        grid: tuple[int, ...],
        constants: Mapping[str, Constant],
        options: tuple[int, int],
        given: Mapping[str, Given],
    ) -> Launch:
        listed = CATALOG[name].arguments
        assert given.keys() == listed.keys(), f"{name}: {given.keys() ^ listed.keys()}"
        arguments = tuple(self._argument(given[argument], kind) for argument, kind in listed.items())
        kernel = Kernel(
            name=name,
            constants=dict(constants),
            types=tuple(map(_type, arguments, listed.values())),
            aligned=_aligned(arguments),
            num_warps=options[0],
            num_stages=options[1],
        )
        x, y, z = (*grid, 1, 1)[:3]
        return Launch(kernel=self.shared.kernel(kernel), grid=(x, y, z), arguments=arguments, node=node)

    def _argument(self, given: Given, kind: str) -> Argument:
        if given is None:
            letter = kind.removeprefix("*")
            kv = KV_ELEMENTS[self.kv.dtype]
            types = {"T": self.activation_type, "OUT": self.activation_type, "KV": kv, "C": "u8", "S": "fp32"}
            return NullArgument(type=types.get(letter, letter))
        return NumberArgument(value=given) if isinstance(given, int | float) else given


def _type(argument: Argument, listed: str) -> str:
    return listed if isinstance(argument, NumberArgument) else f"*{argument.type}"


def _aligned(arguments: Sequence[Argument]) -> tuple[int, ...]:
    """Places of the integers that are multiples of 16, which vector loads want to know."""
    return tuple(
        place
        for place, argument in enumerate(arguments)
        if isinstance(argument, NumberArgument) and isinstance(argument.value, int) and argument.value % 16 == 0
    )


def next_power_of_two(number: int, least: int = 1) -> int:
    """The smallest power of two that is not below either."""
    return max(least, 1 << (number - 1).bit_length())


def as_float(values: NDArray[Any]) -> NDArray[np.float32]:
    """In float32, contiguous."""
    return np.ascontiguousarray(values, np.float32)
