"""The process of a stage: compute the steps that arrive, one byte each, and pass them on.

A byte in a pipe is the slot of a step (step_memory.py), with FAILED where a stage before could not compute it. A stage
copies what crosses to it, runs its operations, leaves what crosses to later stages, and writes the byte to the next
stage, the last one to the engine. Where several ranks compute a stage together (native/tensor_parallel.py), the first
one does this, and hands the byte to the others before it computes. Adapters come over a connection, while no step is in
flight. When the engine's process or a neighbour ends, the process ends too, whatever it computes.
"""

import os
import select
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NoReturn

from ingot.artifact import Artifact
from ingot.artifact.programs.cpu_program import WEIGHTS_FILE
from ingot.artifact.programs.stages import LOGITS, CutProgram, DeviceProgram
from ingot.artifact.safetensors import MappedTensors, read_header
from ingot.artifact.serving import WeightPlacement
from ingot.errors import ArtifactError, EngineError
from ingot.runtime.adapters import Adapter
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.native.program import GroupMemory, NativeProgram, program_library
from ingot.runtime.cpu.native.tensor_parallel import Rank, own_ranges
from ingot.runtime.cpu.pinned_threads import hold_cores
from ingot.runtime.cpu.stages.step_memory import SharedMemory, SlotSizes, StepMemory
from ingot.runtime.cpu.state_pool import StatePool
from ingot.runtime.cpu.weight_pages import place_ranges

FAILED = 0x80
LEFT_ALONE = 75
"""Exit status of a stage that ended because another process did."""


@dataclass(frozen=True)
class StageStart:
    """The first message to a stage.

    device      its number
    rank        its number among the device's processes, whose memory is `group`; None for one process
    inputs      descriptor of the pipe that each run of the device reads, by the run's number
    outputs     of the pipe that it writes; of the first rank alone
    wakes       of the pipes to the other ranks
    steps       memory of the steps
    pool, states  memory of its part of the KV pool, and of side state; None without
    cores       of its threads; None: the system chooses
    """

    artifact: Artifact
    cut: CutProgram
    device: int
    rank: Rank
    group: SharedMemory | None
    inputs: Mapping[int, int]
    outputs: Mapping[int, int]
    wakes: Mapping[int, Sequence[int]]
    shape: SlotSizes
    steps: SharedMemory
    pool: SharedMemory | None
    states: SharedMemory | None
    num_blocks: int
    num_states: int
    num_threads: int
    cores: tuple[int, ...] | None
    isa: str | None
    weights: WeightPlacement

    @property
    def own(self) -> DeviceProgram:
        """The device's program."""
        return self.cut.devices[self.device]

    @property
    def process(self) -> int:
        """The number of the process among those of all stages."""
        return self.device * self.rank.count + self.rank.number

    @property
    def descriptors(self) -> list[int]:
        """All that the process inherits."""
        shared = (self.steps, self.group, self.pool, self.states)
        pipes = (*self.inputs.values(), *self.outputs.values(), *(one for each in self.wakes.values() for one in each))
        return [*pipes, *(memory.descriptor for memory in shared if memory)]


@dataclass(frozen=True)
class PutAdapter:
    """Put an adapter into a slot, of `slots`; see `NativeProgram.load_adapter`. Answered by None or an error."""

    slot: int
    adapter: Adapter
    slots: int


@dataclass(frozen=True)
class DropAdapter:
    """Free a slot. Answered by None or an error."""

    slot: int


@dataclass(frozen=True)
class Ready:
    """A stage is loaded."""

    isa: str


def main(descriptor: int, lifeline: int) -> NoReturn:
    """Compute steps until the engine's process ends.

    lifeline   a pipe that the engine's process never writes to
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a terminal sends them to the whole group; the engine ends its stages
    threading.Thread(target=_end_with, args=(lifeline,), name="ingot-lifeline", daemon=True).start()
    with Connection(descriptor) as connection:
        try:
            stage = _Stage(connection.recv())
            connection.send(Ready(stage.isa))
        except Exception as error:  # noqa: BLE001 (the engine's process raises it)
            connection.send(error)
            os._exit(1)
        with suppress(EOFError, OSError):
            stage.serve(connection)
    os._exit(LEFT_ALONE)


def _end_with(lifeline: int) -> None:
    with suppress(OSError):
        os.read(lifeline, 1)
    os._exit(LEFT_ALONE)


class _Stage:
    """The operations of one device, over the memory that it shares."""

    def __init__(self, start: StageStart) -> None:
        program_library()
        self._start, own, shape = start, start.own, start.shape
        self._steps = StepMemory(shape, start.steps.map())
        geometry = own.program.kv
        pool = None if start.pool is None else KVPool(geometry, start.num_blocks, shared=start.pool.map())
        states = None if start.states is None else StatePool(geometry, start.num_states, start.states.map())
        self._program = NativeProgram(
            own.program,
            _own_weights(start),
            pool,
            states,
            max_batch_tokens=shape.tokens,
            num_threads=start.num_threads,
            isa=start.isa,
            last_mixing=own.last_mixing,
            group=None if start.group is None else GroupMemory(start.rank, start.group.map()),
        )
        if start.cores:
            hold_cores(program_library(), start.cores, self)
        self._has_logits = LOGITS in own.program.buffers
        self._runs = {number: run for number, run in enumerate(start.cut.runs) if run.device == start.device}
        self._numbers = _crossing_numbers(start.cut)

    @property
    def isa(self) -> str:
        return self._program.isa

    def serve(self, connection: Connection) -> None:
        """Compute steps and load adapters. EOFError or OSError once another process has ended."""
        runs = {descriptor: number for number, descriptor in self._start.inputs.items()}
        poller = select.poll()
        for descriptor in (*runs, connection.fileno()):
            poller.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poller.poll():
                if descriptor in runs:
                    self._take(descriptor, runs[descriptor])
                else:
                    connection.send(self._change(connection.recv()))

    def _take(self, descriptor: int, run: int) -> None:
        received = os.read(descriptor, 1)
        if not received:
            raise EOFError
        signalled, start = received[0], self._start
        progress = self._steps.progress[start.process]
        progress[0] += 1
        if not signalled & FAILED:
            for descriptor in start.wakes.get(run, ()):
                os.write(descriptor, received)
            signalled |= self._computed(signalled, run)
        progress[1] += 1
        if run in start.outputs:
            os.write(start.outputs[run], bytes([signalled]))

    def _computed(self, slot: int, run: int) -> int:
        """Compute a run of the step in a slot; 0, or FAILED with the reason in the memory of steps."""
        try:
            self._compute(slot, run)
        # The step is out of range, which every rank finds before it waits for another.
        except EngineError as error:
            self._steps.put_error(self._start.process, error)
        except Exception as error:  # the engine's process raises it
            # The other ranks may wait for this one: only a new group can go on.
            if self._start.group is not None:
                raise
            self._steps.put_error(self._start.process, error)
        else:
            return 0
        return FAILED

    def _compute(self, slot: int, number: int) -> None:
        run, batch = self._runs[number], self._steps.batch(slot)
        tokens, rows = batch.num_tokens, len(batch.logits_indices)
        if not rows and run.operations.start >= self._start.own.program.head_start:
            return
        program, buffers = self._program, self._start.own.program.buffers
        program.load_batch(batch)
        if self._has_logits:
            program.write_logits_to(self._steps.logits(slot))
        for one in run.crossings:
            count = rows if buffers[one.buffer].rows == "logits" else tokens
            shared = self._steps.crossing(slot, self._numbers[number, one.buffer])
            program.rows_of(one.buffer)[:count] = shared[:count]
        program.run(run.operations)
        if self._start.rank.number > 0:
            return
        for later, buffer in _left_by(self._start.cut, number):
            count = rows if buffers[buffer].rows == "logits" else tokens
            self._steps.crossing(slot, self._numbers[later, buffer])[:count] = program.rows_of(buffer)[:count]

    def _change(self, message: object) -> Exception | None:
        try:
            match message:
                case PutAdapter(slot, adapter, slots):
                    self._program.load_adapter(slot, adapter, slots)
                case DropAdapter(slot):
                    self._program.unload_adapter(slot)
        except Exception as error:  # noqa: BLE001 (the engine's process raises it)
            return error
        return None


def _crossing_numbers(cut: CutProgram) -> dict[tuple[int, str], int]:
    """The place of each value that crosses among the arrays of a slot, by run and buffer."""
    crossings = [(number, one.buffer) for number, run in enumerate(cut.runs) for one in run.crossings]
    return {crossing: place for place, crossing in enumerate(crossings)}


def _left_by(cut: CutProgram, number: int) -> Sequence[tuple[int, str]]:
    """Run and buffer of the values that this run leaves: its device's last before they cross."""
    device, found = cut.runs[number].device, list[tuple[int, str]]()
    for later in range(number + 1, len(cut.runs)):
        found += [(later, one.buffer) for one in cut.runs[later].crossings if one.source == device]
        if cut.runs[later].device == device:
            break
    return found


def _own_weights(start: StageStart) -> MappedTensors:
    """The artifact's weights; those of the stage and rank alone are read, or copied into huge pages."""
    file, program = start.artifact.file(WEIGHTS_FILE), start.own.program
    stored = read_header(file, ArtifactError)
    ranges = [(stored[name].offset, stored[name].num_bytes) for name in program.tensors()]
    for name, own in own_ranges(program, start.rank).items():
        ranges += [(stored[name].offset + first, size) for first, size in own]
    try:
        return MappedTensors(file, lambda path: place_ranges(path, ranges, start.weights))
    except OSError as error:
        raise EngineError(f"{file}: cannot be mapped into memory: {error.strerror}; free some address space") from error
