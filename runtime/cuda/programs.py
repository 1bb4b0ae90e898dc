"""Bucket programs with every argument bound to an address, and the CUDA graphs that replay them.

A step runs one part of its bucket's program:

    body      everything before the head: for a step that needs no logits
    logits    body and head
    greedy    body, head, and the kernels that choose the likeliest tokens; `draw` with those that sample randomly
    head      the head again, for more rows of logits than it computes at once; `head-greedy` and `head-draw` with the
              kernels that choose their tokens

Each part is captured into a CUDA graph when it first runs, or by `warm_up`: a step is then one call, however many
kernels it has. Copies to and from the host, and of weights, divide a part into several graphs; only the last is its
own. Programs whose segments cannot be captured are queued launch by launch in every step. With INGOT_CUDA_BLOCKING the
host waits after each kernel, and a failure names its node.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from ingot import settings
from ingot.artifact import Artifact
from ingot.artifact.programs.launch_program import (
    ELEMENT_BYTES,
    STORED_TYPES,
    Argument,
    HostCopy,
    Kernel,
    Launch,
    LaunchProgram,
    LibraryMatmul,
    SamplerKind,
    SegmentCall,
    Step,
    WeightCopy,
)
from ingot.errors import ArtifactError, EngineError
from ingot.runtime.cuda.driver.device import Device, Graph, LoadedKernel, Queue, Stream
from ingot.runtime.cuda.library_matmuls import library_matmul
from ingot.runtime.cuda.step_inputs import ExchangedValues, HostExchange, InputLayout
from ingot.runtime.cuda.weights import DeviceWeights, StreamedWeights
from ingot.runtime.forward_batch import ForwardBatch

_log = logging.getLogger(__name__)

Part = Literal["body", "head", "logits", "greedy", "draw", "head-greedy", "head-draw"]
_SAMPLERS: Mapping[Part, SamplerKind] = {
    "greedy": "greedy",
    "draw": "draw",
    "head-greedy": "greedy",
    "head-draw": "draw",
}
BoundStep = tuple[str, Queue]  # the node that it computes, and its work


@dataclass(frozen=True)
class BoundCopy:
    """A copy to or from the host's stages, or of weights: queued between graphs in every step."""

    queue: Queue


_COPIES = (HostCopy, WeightCopy)
_ForeignStep = TypeVar("_ForeignStep", SegmentCall, LibraryMatmul, contravariant=True)


class StepBinder(Protocol[_ForeignStep]):
    """Another engine or library that runs steps of a program on the runtime's stream."""

    @property
    def version(self) -> str:
        """Its name and version, on which the bits of its results depend."""
        ...

    def __call__(self, step: _ForeignStep, addresses: Mapping[str, int], /) -> Queue:
        """Bind a step to the addresses of its operands.

        A step that the program lets be captured must be fit for a CUDA graph once it has run.
        """
        ...

    def close(self) -> None:
        """Free device memory, before the device closes. Idempotent; bound steps must not run afterwards."""
        ...


SegmentBinder = StepBinder[SegmentCall]
MatmulBinder = StepBinder[LibraryMatmul]
OpenSegments = Callable[[Artifact, Device, Stream], SegmentBinder]  # bound steps run on that stream only
OpenMatmuls = Callable[[Device, Stream], MatmulBinder]


class NoBinder:
    """A `StepBinder` for programs of Ingot's kernels only: refuses every step."""

    version = ""

    def __call__(self, step: SegmentCall | LibraryMatmul, addresses: Mapping[str, int]) -> Queue:
        """Raise EngineError."""
        engine = step.engine if isinstance(step, SegmentCall) else step.library
        raise EngineError(f"{step.node}: runs in {engine}, which is not loaded")

    def close(self) -> None:
        """Do nothing."""


def no_segments(artifact: Artifact, device: Device, stream: Stream) -> NoBinder:
    """Open no engine, for programs without segments."""
    return NoBinder()


@dataclass(frozen=True)
class Binding:
    """What arguments are bound to: kernels by key, addresses of weights and of the runtime's buffers, the arena."""

    device: Device
    kernels: Mapping[str, Kernel]
    loaded: Mapping[str, LoadedKernel]
    weights: DeviceWeights
    externals: Mapping[str, int]
    arena: int
    segments: SegmentBinder = field(default_factory=NoBinder)
    matmuls: MatmulBinder = field(default_factory=NoBinder)
    exchange: HostExchange | None = None
    streamed: StreamedWeights | None = None
    library_first: bool = False  # the library computes matmuls of the program's own kernel, where it can

    def bind(self, program: LaunchProgram, step: Step) -> Queue:
        """Bind a step of the program, ready to be queued."""
        if isinstance(step, Launch):
            found = library_matmul(self.kernels[step.kernel], step) if self.library_first else None
            if found is not None:
                try:
                    return self.matmuls(found, self._addresses(program, found.operands))
                except EngineError as error:
                    _log.info("%s; Ingot's kernel computes it", error)
            types = self.kernels[step.kernel].types
            given = [(kind, self._value(program, one)) for kind, one in zip(types, step.arguments, strict=True)]
            return self.device.bind(self.loaded[step.kernel], step.grid, given, step.node)
        if isinstance(step, LibraryMatmul):
            return self.matmuls(step, self._addresses(program, step.operands))
        assert isinstance(step, SegmentCall)
        return self.segments(step, self._addresses(program, {**step.inputs, **step.outputs}))

    def bind_copy(self, program: LaunchProgram, copy: HostCopy | WeightCopy) -> BoundCopy:
        """Bind a copy to or from the host's stages, or of weights."""
        if isinstance(copy, WeightCopy):
            assert self.streamed is not None
            return BoundCopy(self.streamed.bind(copy, int(self._value(program, copy.weights))))
        assert self.exchange is not None
        exchange, addresses = self.exchange, tuple(int(self._value(program, value.rows)) for value in copy.values)
        exchanged = ExchangedValues(copy, addresses, program.rows)
        return BoundCopy(lambda stream: exchange.queue(exchanged))

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
                f"the program reads the weight {name!r} as {STORED_TYPES[type_]}, and the weights file "
                f"{f'stores it as {found}' if found else 'does not contain it'}; build the artifact again"
            )
        return self.weights.addresses[name]


@dataclass
class BoundProgram:
    """One bucket's program, ready to run on the device."""

    program: LaunchProgram
    layout: InputLayout
    device: Device
    body: Sequence[BoundStep | BoundCopy]
    head: Sequence[BoundStep]
    samplers: Mapping[SamplerKind, Sequence[BoundStep]]
    captured: bool = True
    graphs: dict[Part | int, Graph] = field(default_factory=dict)

    @classmethod
    def of(cls, program: LaunchProgram, binding: Binding, layout: InputLayout) -> "BoundProgram":
        """Bind all launches of a program, and its copies."""

        def bound(step: Step) -> BoundStep:
            return step.node, binding.bind(program, step)

        body, head = program.launches[: program.head_start], program.launches[program.head_start :]
        return cls(
            program,
            layout,
            binding.device,
            [binding.bind_copy(program, step) if isinstance(step, _COPIES) else bound(step) for step in body],
            list(map(bound, head)),
            {name: list(map(bound, launches)) for name, launches in program.samplers.items()},
            program.is_capturable,
        )

    def __str__(self) -> str:
        adapters = " with adapters" if self.computes_adapters else ""
        return f"{self.program.attention} bucket of {self.program.rows} rows{adapters}"

    @property
    def calls(self) -> list[BoundStep]:
        """The launches of body and head, of a program that copies nothing to or from the host."""
        calls = [step for step in (*self.body, *self.head) if not isinstance(step, BoundCopy)]
        assert len(calls) == len(self.program.launches)
        return calls

    @property
    def computes_adapters(self) -> bool:
        """Report if it is for steps in which a sequence has a LoRA adapter."""
        return self.program.adapter_units is not None

    def holds(self, batch: ForwardBatch) -> bool:
        """Whether the batch fits."""
        sequences, program = len(batch.context_lens), self.program
        if self.computes_adapters != (batch.adapter_slots is not None):
            return False
        if program.attention == "decode":
            return batch.num_tokens == sequences <= program.sequences
        return batch.num_tokens <= program.rows and sequences <= program.sequences

    def run(self, part: Part, stream: Stream) -> None:
        """Queue a part of the program on the stream."""
        for key, steps in self._runs(part):
            if isinstance(steps, BoundCopy):
                steps.queue(stream)
            elif settings.cuda_blocking():
                for node, queue in steps:
                    queue(stream)
                    self.device.synchronize(f"{node!r} of the {self}")
            elif self.captured:
                self._capture(key, steps, stream)
                self.device.replay(self.graphs[key], stream)
            else:
                _queue_all(steps)(stream)

    def warm_up(self, stream: Stream) -> None:
        """Capture all parts that an engine runs in every case; the head alone serves whole prompts and drafts.

        Steps with adapters are captured when they first run: many engines have none.
        """
        if not self.captured or self.computes_adapters or settings.cuda_blocking():
            return
        parts: tuple[Part, ...] = ("logits", *self.samplers)
        for part in parts if self.program.attention == "decode" else ("body", *parts):
            for key, steps in self._runs(part):
                if not isinstance(steps, BoundCopy):
                    self._capture(key, steps, stream)

    def _capture(self, key: Part | int, steps: Sequence[BoundStep], stream: Stream) -> None:
        if key not in self.graphs:
            self.graphs[key] = self.device.capture(stream, _queue_all(steps))

    def _runs(self, part: Part) -> Iterator[tuple[Part | int, Sequence[BoundStep] | BoundCopy]]:
        """Yield the steps of a part up to each copy, and the copies; with the key of the graph."""
        steps = list[BoundStep]()
        for number, step in enumerate(self._steps(part)):
            if isinstance(step, BoundCopy):
                if steps:
                    yield number, steps
                yield number, step
                steps = []
            else:
                steps.append(step)
        if steps:
            yield part, steps

    def _steps(self, part: Part) -> list[BoundStep | BoundCopy]:
        body = [] if part.startswith("head") else self.body
        head = [] if part == "body" else self.head
        name = _SAMPLERS.get(part)
        if name and name not in self.samplers:
            raise EngineError(f"the {self} has no kernels that choose tokens; build the artifact again")
        return [*body, *head, *(self.samplers[name] if name else ())]


def _queue_all(steps: Sequence[BoundStep]) -> Queue:
    def work(stream: Stream) -> None:
        for _, queue in steps:
            queue(stream)

    return work


def choose(programs: Sequence[BoundProgram], batch: ForwardBatch) -> BoundProgram:
    """Choose the smallest program that holds the batch: a decode program where every sequence has one token."""
    fitting = [one for one in programs if one.holds(batch)]
    if not fitting:
        raise EngineError(
            f"no program takes a step of {batch.num_tokens} tokens of {len(batch.context_lens)} sequences; there are: "
            f"{', '.join(f'{one} and {one.program.sequences} sequences' for one in programs)}"
        )
    return min(fitting, key=lambda one: (one.program.attention != "decode", one.program.rows))
