"""Stages: the model's operations cut into runs, each on one device.

    program/operations.json   CpuProgram of the whole model, as without stages
    program/stages.json       StagePlan: which device runs which operations, and the arena of each device

A GPU, cuda:0, runs a launch program in place of the operations of its stages, lowered from the same nodes:

    program/launches.json                  CudaProgram, with copies (HostCopy) where a stage of the host begins or ends
    program/device_weights.safetensors     its weights; those of the host are in program/weights.safetensors
    program/streamed_weights.safetensors   experts of the host's stages in the GPU's form, which steps of many rows copy
                                           to it (WeightCopy); a tensor for each layer

A device has a program of its own: its operations in the model's order, over an arena of its own, with its part of each
KV block and of side state. It follows from the two files (`cut_program`), so it cannot contradict the whole program. A
value that one device makes and another reads crosses before the reading stage begins; liveness says which values do so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pydantic import Field

from ingot.artifact.json_text import read_program
from ingot.artifact.kv_geometry import BlockRun, KVGeometry
from ingot.artifact.programs.cpu_program import (
    MAX_PROGRAM_BYTES,
    Attend,
    Buffer,
    CpuProgram,
    Operation,
    Recurrent,
)
from ingot.artifact.programs.operation_row import Frozen, Matrices, Span
from ingot.artifact.programs.recurrent import kind_of

STAGES_FILE = "program/stages.json"
DEVICE_WEIGHTS_FILE = "program/device_weights.safetensors"
STREAMED_WEIGHTS_FILE = "program/streamed_weights.safetensors"
GPU = "cuda:0"
LOGITS = "logits"
MOST_DEVICES = 16
MOST_RANKS = 64


class ProgramStage(Frozen):
    """A run of operations on one device.

    device   index of the device
    end      index of the model's operation after the stage's last
    """

    device: int = Field(ge=0, lt=MOST_DEVICES)
    end: int = Field(ge=1)


class StageDevice(Frozen):
    """A device and its arena.

    name           such as cpu:0
    arena_floats   floats of the arena for each token of a step
    offsets        of the buffers that the device's program uses, the logits left out; see Buffer
    """

    name: str = Field(min_length=1, max_length=64)
    arena_floats: int = Field(ge=0)
    offsets: dict[str, int]


class StagePlan(Frozen):
    """program/stages.json."""

    devices: tuple[StageDevice, ...] = Field(min_length=2, max_length=MOST_DEVICES)
    stages: tuple[ProgramStage, ...] = Field(min_length=2)


@dataclass(frozen=True)
class Crossing:
    """A value of another device that a stage reads: its buffer, and the device to copy it from."""

    buffer: str
    source: int


@dataclass(frozen=True)
class StageRun:
    """A stage as its device runs it: operations of the device's program, after the crossings."""

    device: int
    operations: range
    crossings: tuple[Crossing, ...]


@dataclass(frozen=True)
class DeviceProgram:
    """A device's program.

    layers        layers of the KV pool that it keeps; layer i of its own geometry is layers[i] of the model's
    last_mixing   its operation that is the model's last to read other tokens of a sequence, if only rows of logits are
                  computed after it; else -1
    """

    name: str
    program: CpuProgram
    layers: tuple[int, ...]
    last_mixing: int

    @property
    def is_gpu(self) -> bool:
        """Report if it is a GPU, which runs a launch program in place of these operations."""
        return self.name == GPU

    @property
    def weight_bytes(self) -> int:
        """Bytes of its matrices, in the CPU's form."""
        return sum(matrix.num_bytes for matrix in self.program.matrices.values())

    def block_runs(self, whole: KVGeometry) -> tuple[BlockRun, ...]:
        """Return where its part of a block is in a block of the model."""
        return whole.block_runs(self.program.kv, self.layers)


@dataclass(frozen=True)
class CutProgram:
    """A model's program, its parts as programs of devices, and the stages in order."""

    whole: CpuProgram
    devices: tuple[DeviceProgram, ...]
    runs: tuple[StageRun, ...]

    @property
    def on_gpu(self) -> DeviceProgram | None:
        """The GPU's part; None where all devices are the host's."""
        return next((device for device in self.devices if device.is_gpu), None)

    @property
    def on_host(self) -> DeviceProgram:
        """The first part that is not a GPU's."""
        return next(device for device in self.devices if not device.is_gpu)


def read_stage_plan(file: Path) -> StagePlan:
    """Read program/stages.json; ArtifactError with the file and its problem."""
    return read_program(file, StagePlan, MAX_PROGRAM_BYTES)


def spans_of_stages(stages: Sequence[ProgramStage]) -> list[range]:
    """Return the model's operations that each stage runs."""
    return [range(begin, end) for begin, end in pairwise([0, *(stage.end for stage in stages)])]


def find_crossings(
    operations: Sequence[Operation], matrices: Matrices, stages: Sequence[ProgramStage]
) -> list[tuple[Crossing, ...]]:
    """Return what crosses to each stage: values that are alive when it begins, and that its device lacks.

    A stage that writes some columns of a buffer gets the others too where a later stage reads them.
    """
    spans = spans_of_stages(stages)
    alive = alive_before(operations, matrices, spans)
    holders: dict[str, list[int]] = {}  # buffer -> the devices that have its value, the one that made it first
    found = []
    for stage, span, live in zip(stages, spans, alive, strict=True):
        used = [operations[at] for at in span]
        names = dict.fromkeys(view.buffer for operation in used for view in operation.views)
        missing = [name for name in names if live.get(name) and stage.device not in holders.get(name, ())]
        found.append(tuple(Crossing(name, holders[name][0]) for name in missing if name in holders))
        for name in missing:
            holders.setdefault(name, []).append(stage.device)
        for operation in used:
            holders[operation.output.buffer] = [stage.device]
    return found


def alive_before(operations: Sequence[Operation], matrices: Matrices, spans: Sequence[range]) -> list[dict[str, int]]:
    """Return, for each run of operations, the columns of each buffer that are read from its first one on, as bits."""
    alive: dict[str, int] = {}
    found: list[dict[str, int]] = []
    for span in reversed(spans):
        for at in reversed(span):
            written = operations[at].span_written(matrices)
            alive[written.buffer] = alive.get(written.buffer, 0) & ~_bits(written)
            for read in operations[at].spans_read(matrices):
                alive[read.buffer] = alive.get(read.buffer, 0) | _bits(read)
        found.append(dict(alive))
    return found[::-1]


def _bits(span: Span) -> int:
    return ((1 << span.columns) - 1) << span.column


def cut_program(program: CpuProgram, plan: StagePlan) -> CutProgram:
    """Return the devices' programs, and the stages. The plan was checked, or is of the lowering's own making."""
    spans = spans_of_stages(plan.stages)
    crossings = find_crossings(program.operations, program.matrices, plan.stages)
    operations: list[list[int]] = [[] for _ in plan.devices]
    runs = []
    for stage, span, crossing in zip(plan.stages, spans, crossings, strict=True):
        own = operations[stage.device]
        runs.append(StageRun(stage.device, range(len(own), len(own) + len(span)), crossing))
        own += span
    devices = tuple(_device_program(program, device, own) for device, own in zip(plan.devices, operations, strict=True))
    return CutProgram(program, devices, tuple(runs))


def whole_program(program: CpuProgram) -> CutProgram:
    """Return a program in one piece: one device with one stage."""
    layers = tuple(range(program.kv.num_layers))
    device = DeviceProgram("cpu:0", program, layers, program.head_start - 1)
    return CutProgram(program, (device,), (StageRun(0, range(len(program.operations)), ()),))


def _device_program(program: CpuProgram, device: StageDevice, places: Sequence[int]) -> DeviceProgram:
    own = [program.operations[place] for place in places]
    layers = tuple(sorted({one.layer for one in own if isinstance(one, Attend)}))
    states = {(one.layer, kind_of(one)) for one in own if isinstance(one, Recurrent)}
    matrices = {name for one in own for name in one.matrix_names()}
    nodes = {one.node for one in own}
    made = CpuProgram(
        kv=program.kv.part(layers, states),
        vocab_size=program.vocab_size,
        context_tokens=program.context_tokens,
        arena_floats=device.arena_floats,
        buffers=_placed(program.buffers, device, own),
        matrices={name: matrix for name, matrix in program.matrices.items() if name in matrices},
        operations=tuple(_renumbered(one, layers) for one in own),
        head_start=sum(place < program.head_start for place in places),
        projections=tuple(one for one in program.projections if one.node in nodes),
    )
    is_last = program.head_start - 1 in places and all(
        one.computed_rows == "logits" for one in program.operations[program.head_start :]
    )
    return DeviceProgram(device.name, made, layers, made.head_start - 1 if is_last else -1)


def _placed(buffers: Mapping[str, Buffer], device: StageDevice, own: Sequence[Operation]) -> dict[str, Buffer]:
    used = dict.fromkeys(view.buffer for one in own for view in one.views)
    return {
        name: buffers[name] if name == LOGITS else buffers[name].model_copy(update={"offset": device.offsets[name]})
        for name in used
    }


def _renumbered(operation: Operation, layers: Sequence[int]) -> Operation:
    if not isinstance(operation, Attend):
        return operation
    return operation.model_copy(update={"layer": layers.index(operation.layer)})
