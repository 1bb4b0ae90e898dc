"""The programs of all buckets with their arguments bound to addresses, and the graphs that replay them.

A step runs one part of its bucket's program:

    body      what comes before the head: nobody wants logits
    logits    body and head
    greedy    body, head, and the kernels that choose the likeliest tokens; `draw` with those that draw
    head      the head again, for more rows of logits than it takes at once

Each is captured into a CUDA graph when it first runs, or by `warm_up`: a step is then one call, however many kernels.
Programs whose segments cannot be captured are queued launch by launch instead, each step anew.
With INGOT_CUDA_BLOCKING kernels run one by one, each is waited for, and a failure names the node.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ingot import settings
from ingot.artifact import Artifact
from ingot.artifact.launch_program import (
    ELEMENT_BYTES,
    STORED_TYPES,
    Argument,
    Kernel,
    Launch,
    LaunchProgram,
    LibraryProduct,
    SegmentCall,
    Step,
    Tail,
)
from ingot.errors import ArtifactError, EngineError
from ingot.runtime.batch import ForwardBatch
from ingot.runtime.cuda.device import Device, Graph, LoadedKernel, Queue, Stream
from ingot.runtime.cuda.step_inputs import InputLayout
from ingot.runtime.cuda.weights import DeviceWeights

Part = Literal["body", "head", "logits", "greedy", "draw"]


class SegmentBinder(Protocol):
    """Another engine's way to run segments: a call with addresses of inputs and outputs -> work for a stream."""

    def __call__(self, call: SegmentCall, addresses: Mapping[str, int]) -> Queue:
        """Bind a call for good. What it queues must be fit for capture into a graph, where the call says that it is."""
        ...

    def close(self) -> None:
        """Give back what lies on the device, before the device goes. Idempotent; nothing that was bound runs again."""
        ...


OpenSegments = Callable[[Artifact, Device, Stream], SegmentBinder]  # all that is bound runs on the one stream


class NoSegments:
    """The binder of programs that are kernels alone."""

    def __call__(self, call: SegmentCall, addresses: Mapping[str, int]) -> Queue:
        """Refuses."""
        raise EngineError(f"{call.node}: {call.file} is a segment of another engine, which is not loaded")

    def close(self) -> None:
        """Nothing to give back."""


def no_segments(artifact: Artifact, device: Device, stream: Stream) -> NoSegments:
    """For executors of kernels alone."""
    return NoSegments()


class ProductBinder(Protocol):
    """A library's way to multiply: a product with addresses of its operands -> work for a stream."""

    def __call__(self, product: LibraryProduct, addresses: Mapping[str, int]) -> Queue:
        """Bind a product for good. What it queues must be fit for capture into a graph once it has run."""
        ...

    def close(self) -> None:
        """Give back what lies on the device, before the device goes. Idempotent; nothing that was bound runs again."""
        ...


OpenProducts = Callable[[Device, Stream], ProductBinder]  # all that is bound runs on the one stream


class NoProducts:
    """The binder of programs whose products are all Ingot's own."""

    def __call__(self, product: LibraryProduct, addresses: Mapping[str, int]) -> Queue:
        """Refuses."""
        raise EngineError(f"{product.node}: is computed by {product.library}, which is not loaded")

    def close(self) -> None:
        """Nothing to give back."""


@dataclass(frozen=True)
class Binding:
    """What arguments are bound to: kernels by key, addresses of weights and of the runtime's buffers, the arena."""

    device: Device
    kernels: Mapping[str, Kernel]
    loaded: Mapping[str, LoadedKernel]
    weights: DeviceWeights
    externals: Mapping[str, int]
    arena: int
    segments: SegmentBinder = field(default_factory=NoSegments)
    products: ProductBinder = field(default_factory=NoProducts)

    def bind(self, program: LaunchProgram, step: Step) -> Queue:
        """A step of the program, ready to be queued."""
        if isinstance(step, Launch):
            types = self.kernels[step.kernel].types
            given = [(kind, self._value(program, one)) for kind, one in zip(types, step.arguments, strict=True)]
            return self.device.bind(self.loaded[step.kernel], step.grid, given, step.node)
        if isinstance(step, LibraryProduct):
            return self.products(step, self._addresses(program, step.operands))
        return self.segments(step, self._addresses(program, {**step.inputs, **step.outputs}))

    def _addresses(self, program: LaunchProgram, operands: Mapping[str, Argument]) -> dict[str, int]:
        return {name: int(self._value(program, one)) for name, one in operands.items()}

    def _value(self, program: LaunchProgram, argument: Argument) -> int | float:
        """An argument's number or address."""
        if argument.kind == "number":
            return argument.value
        if argument.kind == "null":
            return 0
        if argument.kind == "weight":
            return self._weight(argument.name, argument.type)
        offset = argument.offset * ELEMENT_BYTES[argument.type]
        if argument.name in program.places:
            return self.arena + program.places[argument.name].offset + offset
        return self.externals[argument.name] + offset

    def _weight(self, name: str, type_: str) -> int:
        found = self.weights.dtypes.get(name)
        if found != STORED_TYPES[type_]:
            raise ArtifactError(
                f"the program reads the weight {name!r} as {STORED_TYPES[type_]}, and the weights' file has "
                f"{found or 'none of that name'}; build the artifact again"
            )
        return self.weights.addresses[name]


@dataclass
class BoundProgram:
    """One bucket's program, ready to run on the device."""

    program: LaunchProgram
    layout: InputLayout
    device: Device
    body: Sequence[tuple[str, Queue]]
    head: Sequence[tuple[str, Queue]]
    tails: Mapping[Tail, Sequence[tuple[str, Queue]]]
    captured: bool = True
    graphs: dict[Part, Graph] = field(default_factory=dict)

    @classmethod
    def of(cls, program: LaunchProgram, binding: Binding, layout: InputLayout) -> "BoundProgram":
        """Bind all launches of a program."""

        def bound(steps: Sequence[Step]) -> list[tuple[str, Queue]]:
            return [(step.node, binding.bind(program, step)) for step in steps]

        tails = {tail: bound(launches) for tail, launches in program.tails.items()}
        body, head = program.launches[: program.head_start], program.launches[program.head_start :]
        return cls(program, layout, binding.device, bound(body), bound(head), tails, program.is_capturable)

    def __str__(self) -> str:
        return f"{self.program.attention} bucket of {self.program.rows} rows"

    def holds(self, batch: ForwardBatch) -> bool:
        """Whether the batch fits."""
        sequences, program = len(batch.context_lens), self.program
        if program.attention == "decode":
            return batch.num_tokens == sequences <= program.sequences
        return batch.num_tokens <= program.rows and sequences <= program.sequences

    def run(self, part: Part, stream: Stream) -> None:
        """Queue a part of the program on the stream."""
        if settings.cuda_blocking():
            for node, queue in self._steps(part):
                queue(stream)
                self.device.synchronize(f"{node!r} of the {self}")
            return
        if not self.captured:
            self._queue(part)(stream)
            return
        if part not in self.graphs:
            self.graphs[part] = self.device.capture(stream, self._queue(part))
        self.device.replay(self.graphs[part], stream)

    def warm_up(self, stream: Stream) -> None:
        """Capture now what engines run, where it is captured at all; the head alone is for logits of whole prompts."""
        tails: tuple[Part, ...] = tuple(self.tails)
        parts: tuple[Part, ...] = (
            ("logits", *tails) if self.program.attention == "decode" else ("body", "logits", *tails)
        )
        for part in parts if self.captured and not settings.cuda_blocking() else ():
            if part not in self.graphs:
                self.graphs[part] = self.device.capture(stream, self._queue(part))

    def _queue(self, part: Part) -> Queue:
        def work(stream: Stream) -> None:
            for _, queue in self._steps(part):
                queue(stream)

        return work

    def _steps(self, part: Part) -> list[tuple[str, Queue]]:
        body = [] if part == "head" else self.body
        head = [] if part == "body" else self.head
        tail: Sequence[tuple[str, Queue]] = ()
        if part == "greedy" or part == "draw":
            if part not in self.tails:
                raise EngineError(f"the {self} chooses no tokens on the device; build the artifact again")
            tail = self.tails[part]
        return [*body, *head, *tail]


def choose(programs: Sequence[BoundProgram], batch: ForwardBatch) -> BoundProgram:
    """The smallest program that holds the batch: one for decoding where every sequence has one token."""
    fitting = [one for one in programs if one.holds(batch)]
    if not fitting:
        raise EngineError(
            f"no program takes a step of {batch.num_tokens} tokens of {len(batch.context_lens)} sequences; there are: "
            f"{', '.join(f'{one} and {one.program.sequences} sequences' for one in programs)}"
        )
    return min(fitting, key=lambda one: (one.program.attention != "decode", one.program.rows))
