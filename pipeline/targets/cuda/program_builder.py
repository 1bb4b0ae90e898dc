"""Collects the launches of one program with their buffers, weights and kernels.

Arguments are given by name and put into the signature's order; a missing or superfluous one fails an assertion.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact import KVGeometry
from ingot.artifact.kv_geometry import KVType
from ingot.artifact.programs.launch_program import (
    ELEMENT_BYTES,
    EXTERNAL,
    KV_ELEMENTS,
    ActivationType,
    AdaptedLayer,
    AdapterUnits,
    ArenaRange,
    Argument,
    BufferArgument,
    Constant,
    HostCopy,
    Kernel,
    Launch,
    LaunchProgram,
    LibraryMatmul,
    NullArgument,
    NumberArgument,
    SamplerKind,
    SegmentCall,
    Step,
    WeightArgument,
    WeightCopy,
)
from ingot.pipeline.checkpoint.safetensors_writer import as_stored
from ingot.pipeline.targets.arena import ALIGNMENT, arena_bytes, lifetimes, plan_arena
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.pipeline.targets.cuda.tiles import TileTable
from ingot.sizes import round_up

TILE_QUERIES = 32  # queries of one sequence in a tile of ragged attention
SAMPLER_WARPS = 16  # a program has a whole row of logits: as many warps as a multiprocessor can use
STREAMED_LAYERS = 2  # layers whose weights are in the arena at a time: one is computed while the next is copied
ArgumentValue = Argument | int | float | None
_OF_ROWS = ("rows", "num_pairs", "num_tiles")  # arguments by which buckets would have kernels of their own

FLOAT_KV: Mapping[ActivationType, KVType] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Bucket:
    """Sizes of a program, as in LaunchProgram, and the longest sequence in tokens."""

    rows: int
    attention: Literal["decode", "ragged"]
    context_tokens: int
    sequences: int
    logits_rows: int

    @classmethod
    def decode(cls, rows: int, context_tokens: int) -> "Bucket":
        """Return the bucket of one token for each of `rows` sequences."""
        return cls(rows, "decode", context_tokens, rows, rows)

    @classmethod
    def ragged(cls, rows: int, context_tokens: int, sequences: int) -> "Bucket":
        """Return the bucket of `rows` tokens of at most `sequences` sequences, each of which may need logits."""
        return cls(rows, "ragged", context_tokens, min(rows, sequences), min(rows, sequences))

    @property
    def tiles(self) -> int:
        """Upper bound of the query tiles of `rows` tokens in `sequences` sequences."""
        return 0 if self.attention == "decode" else self.rows // TILE_QUERIES + self.sequences


@dataclass(frozen=True)
class Weight:
    """A tensor of the program's weights: its type by Triton's name, and the function that makes it when written."""

    type: str
    make: Callable[[], NDArray[Any]] = field(repr=False)


@dataclass
class StreamedLayer:
    """Weights of a layer of the host's that are copied to the arena as a whole, each with its first byte.

    stage   of the host, in program/stages.json
    """

    name: str
    stage: int
    weights: dict[str, tuple[int, Weight]] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, name: str, weight: Weight, elements: int) -> BufferArgument:
        """Return a weight as part of the arena's buffer; the first call with a name decides."""
        if name not in self.weights:
            self.weights[name] = self.num_bytes, weight
            self.num_bytes += round_up(elements * ELEMENT_BYTES[weight.type], ALIGNMENT)
        begin, known = self.weights[name]
        return BufferArgument(name=self.name, type=known.type, offset=begin // ELEMENT_BYTES[known.type])

    def content(self) -> NDArray[np.uint8]:
        """Return the bytes of all [num_bytes], as they are copied."""
        made = np.zeros(self.num_bytes, np.uint8)
        for begin, weight in self.weights.values():
            values = as_stored(weight.make(), weight.type).reshape(-1).view(np.uint8)
            made[begin : begin + len(values)] = values
        return made


@dataclass
class Shared:
    """State that the programs of all buckets share.

    batch_invariant    every node has the same compiled kernel in all buckets, with one order of sums
    dependent          every kernel waits for the launch before it
    specialized        attention of prompts may have warps that only copy, where there is such a kernel
    counters           the most counters that a launch needs
    streamed           layers of the host's whose weights are copied to the arena, in order
    adapted            layers that adapters can change, in the order of the kernels' tables
    """

    activation_type: ActivationType
    kv: KVGeometry
    tiles: TileTable = field(default_factory=TileTable)
    batch_invariant: bool = False
    dependent: bool = False
    specialized: bool = True
    counters: int = 0
    weights: dict[str, Weight] = field(default_factory=dict)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    streamed: dict[str, StreamedLayer] = field(default_factory=dict)
    adapted: dict[str, AdaptedLayer] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        activation_type: ActivationType,
        geometry: KVGeometry,
        tiles: TileTable,
        *,
        batch_invariant: bool = False,
        dependent: bool = False,
        specialized: bool = True,
    ) -> "Shared":
        """Start with a model's geometry; an unquantized pool gets the activations' type."""
        if not geometry.is_quantized:
            geometry = geometry.model_copy(update={"dtype": FLOAT_KV[activation_type]})
        return cls(activation_type, geometry, tiles, batch_invariant, dependent, specialized)

    def kernel(self, kernel: Kernel) -> str:
        """Add a kernel and return its key: the name and a digest of everything that it is compiled for."""
        text = json.dumps(kernel.model_dump(), sort_keys=True)
        key = f"{kernel.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        self.kernels[key] = kernel
        return key


@dataclass
class ProgramBuilder:
    """The program so far. adapter_units: of one that computes LoRA adapters."""

    bucket: Bucket
    shared: Shared
    launches: list[Step] = field(default_factory=list)
    samplers: dict[SamplerKind, tuple[Launch, ...]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    head_start: int | None = None
    adapter_units: AdapterUnits | None = None
    _layer: StreamedLayer | None = None

    @property
    def activation_type(self) -> ActivationType:
        """Type of the activations, by Triton's name."""
        return self.shared.activation_type

    @property
    def kv(self) -> KVGeometry:
        """Geometry of the KV pool."""
        return self.shared.kv

    @property
    def rows(self) -> int:
        """Rows of the next launch: tokens, or in the head rows of logits."""
        return self.bucket.rows if self.head_start is None else self.bucket.logits_rows

    def begin_head(self) -> None:
        """Begin the head: from here on a row is a row of logits."""
        assert self.head_start is None
        self.head_start = len(self.launches)

    def buffer(self, name: str, elements: int, type_: str | None = None) -> BufferArgument:
        """Return a buffer of the arena, added or enlarged; or a buffer of the runtime with that name."""
        kind = type_ or self.activation_type
        if name not in EXTERNAL:
            self.sizes[name] = max(self.sizes.get(name, 0), elements * ELEMENT_BYTES[kind])
        return BufferArgument(name=name, type=kind)

    def external(self, name: str, offset: int = 0) -> BufferArgument:
        """Return a buffer of the runtime."""
        return BufferArgument(name=name, type=EXTERNAL[name] or KV_ELEMENTS[self.kv.dtype], offset=offset)

    def counters(self, count: int) -> BufferArgument:
        """Return counters of the runtime: zeros before and after every launch, which all launches share."""
        self.shared.counters = max(self.shared.counters, count)
        return self.external("counters")

    def weight(self, name: str, type_: str, make: Callable[[], NDArray[Any]]) -> WeightArgument:
        """Return a weight; the first call with a name decides type and `make`."""
        self.shared.weights.setdefault(name, Weight(type_, make))
        return WeightArgument(name=name, type=self.shared.weights[name].type)

    def layer_weight(
        self, name: str, type_: str, make: Callable[[], NDArray[Any]], elements: int
    ) -> WeightArgument | BufferArgument:
        """Return a weight of so many elements; a part of a buffer of the arena where its layer is `streamed`."""
        if self._layer is None:
            return self.weight(name, type_, make)
        return self._layer.add(name, Weight(type_, make), elements)

    def type_of_weight(self, name: str) -> str | None:
        """Return the type of a weight that was added before; None for another."""
        if self._layer is not None:
            return self._layer.weights[name][1].type if name in self._layer.weights else None
        return self.shared.weights[name].type if name in self.shared.weights else None

    @contextmanager
    def streamed(self, name: str, stage: int, node: ir.Node) -> Iterator[None]:
        """Copy weights of the launches that are added within the block to the arena, before these.

        The copy begins when the layer STREAMED_LAYERS before is computed, whose place it may take, and runs next to the
        launches between.
        """
        assert self.head_start is None
        first, layer = len(self.launches), self.shared.streamed.setdefault(name, StreamedLayer(name, stage))
        self._layer = layer
        yield
        self._layer = None
        place = self.buffer(name, layer.num_bytes, "u8")
        copy = WeightCopy(
            stage=stage, action="wait", tensor=name, weights=place, bytes=layer.num_bytes, node=node.name or ""
        )
        self.launches.insert(first, copy)
        self.launches.insert(self._place_to_begin(), copy.model_copy(update={"action": "begin"}))

    def _place_to_begin(self) -> int:
        """The first launch that the copy of the last streamed layer may run next to."""
        layers = [step.tensor for step in self.launches if isinstance(step, WeightCopy) and step.action == "wait"]
        if len(layers) > STREAMED_LAYERS:
            before = [layers[-1 - STREAMED_LAYERS] in step.buffers for step in self.launches]
        else:
            # A stage of the host that fails must leave no copy in flight.
            before = [isinstance(step, HostCopy) or _begins(step) for step in self.launches]
        return max((at + 1 for at, is_before in enumerate(before) if is_before), default=0)

    def launch(
        self,
        kernel: str,
        node: ir.Node,
        grid: tuple[int, ...],
        constants: Mapping[str, Constant],
        *,
        num_warps: int = 4,
        num_stages: int = 3,
        **given: ArgumentValue,
    ) -> None:
        """Add a launch. None is a null pointer."""
        options = (num_warps, num_stages)
        self.launches.append(self._launch(kernel, node.name or "", grid, constants, options, given))

    def call(self, step: SegmentCall | LibraryMatmul | HostCopy) -> None:
        """Add a step that is not a launch: a segment of another engine, a library's matmul, a copy to the host."""
        self.launches.append(step)

    def sampler_launch(
        self, name: str, constants: Mapping[str, Constant], parts: int, given: Mapping[str, ArgumentValue]
    ) -> Launch:
        """Return a launch of the sampling kernel of that name, of so many programs for each row of logits."""
        return self._launch(name, name, (self.bucket.logits_rows, parts), constants, (SAMPLER_WARPS, 1), given)

    def program(self) -> LaunchProgram:
        """Plan the arena and return the finished program."""
        head_start = len(self.launches) if self.head_start is None else self.head_start
        uses = [launch.buffers for launch in self.launches]
        before, after = (set(chain.from_iterable(part)) for part in (uses[:head_start], uses[head_start:]))
        uses += [launch.buffers for launches in self.samplers.values() for launch in launches]
        alive = lifetimes([*uses, sorted(before & after)], self.sizes)
        offsets = plan_arena(alive)
        return LaunchProgram(
            rows=self.bucket.rows,
            sequences=self.bucket.sequences,
            logits_rows=self.bucket.logits_rows,
            attention=self.bucket.attention,
            tiles=self.bucket.tiles,
            arena_bytes=arena_bytes(alive, offsets),
            places={name: ArenaRange(offset=offset, bytes=alive[name].bytes) for name, offset in offsets.items()},
            launches=tuple(self.launches),
            head_start=head_start,
            samplers=self.samplers,
            adapter_units=self.adapter_units,
        )

    def _launch(
        self,
        name: str,
        node: str,
        grid: tuple[int, ...],
        constants: Mapping[str, Constant],
        options: tuple[int, int],
        given: Mapping[str, ArgumentValue],
    ) -> Launch:
        listed = SIGNATURES[name].arguments
        assert given.keys() == listed.keys(), f"{name}: {given.keys() ^ listed.keys()}"
        arguments = tuple(self._argument(given[argument], kind) for argument, kind in listed.items())
        kernel = Kernel(
            name=name,
            constants={**constants, **({"DEPENDENT": True} if self.shared.dependent else {})},
            types=tuple(map(_type, arguments, listed.values())),
            aligned=_aligned(arguments, () if not self.shared.batch_invariant else _OF_ROWS, list(listed)),
            num_warps=options[0],
            num_stages=options[1],
        )
        x, y, z = (*grid, 1, 1)[:3]
        return Launch(kernel=self.shared.kernel(kernel), grid=(x, y, z), arguments=arguments, node=node)

    def _argument(self, given: ArgumentValue, kind: str) -> Argument:
        if given is None:
            letter = kind.removeprefix("*")
            kv = KV_ELEMENTS[self.kv.dtype]
            types = {"T": self.activation_type, "OUT": self.activation_type, "KV": kv, "C": "u8", "S": "fp32"}
            return NullArgument(type=types.get(letter, letter))
        return NumberArgument(value=given) if isinstance(given, int | float) else given


def _begins(step: Step) -> bool:
    return isinstance(step, WeightCopy) and step.action == "begin"


def _type(argument: Argument, listed: str) -> str:
    return listed if isinstance(argument, NumberArgument) else f"*{argument.type}"


def _aligned(arguments: Sequence[Argument], ignored: Sequence[str], names: Sequence[str]) -> tuple[int, ...]:
    """Positions of integers that are multiples of 16: kernels compiled for that use vector loads."""
    return tuple(
        place
        for place, (name, argument) in enumerate(zip(names, arguments, strict=True))
        if isinstance(argument, NumberArgument)
        and isinstance(argument.value, int)
        and argument.value % 16 == 0
        and name not in ignored
    )
