"""A program whose stages are processes: start them, give them steps, and replace them when one dies or hangs.

    engine ──► stage 0 ──► stage 1 ──► engine      a byte in a pipe: the step in this slot is ready for you
       └──────────┴───────────┘                    shared memory: batches, what crosses, logits, KV blocks, side state

As many steps are in flight as there are stages, so that all work at once; their sequences differ. A stage is a process,
or several ranks that compute each of its steps together over one part of the pool. The engine makes all copies of
blocks, and lets the steps in flight end first. What a lost stage had not computed is an error of its steps, which the
engine computes again (`step_loop`): KV blocks outlive a stage, as only the rows of those steps were written.
"""

import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import TypeAlias

from ingot.artifact import Artifact
from ingot.artifact.programs.stages import CutProgram
from ingot.artifact.serving import WeightPlacement
from ingot.errors import EngineError, IngotError
from ingot.runtime.adapters import Adapter
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.native.staged_program import divided_adapter, divided_pools
from ingot.runtime.cpu.native.tensor_parallel import LINE_BYTES, Rank, memory_bytes
from ingot.runtime.cpu.stages.stage_process import (
    FAILED,
    LEFT_ALONE,
    DropAdapter,
    PutAdapter,
    Ready,
    StageStart,
)
from ingot.runtime.cpu.stages.step_memory import SharedMemory, SlotSizes, StepMemory
from ingot.runtime.cpu.state_pool import StatePool
from ingot.runtime.executors import StageFacts
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.thread_scheduling import all_cores

_log = logging.getLogger(__name__)
_MAIN = (
    "import sys; sys.path[:] = {path!r}; from ingot.runtime.cpu.stages.stage_process import main;"
    " main({descriptor}, {lifeline})"
)
_LOOK_MILLISECONDS = 200
_HUNG_SECONDS = 10.0
"""Time in which no stage uses the processor or advances, while a step is computed, before they count as hung."""
_LOAD_SECONDS = 120.0
"""The same while stages load, when they may wait for a disk."""
_EXIT_SECONDS = 5.0
_Ends: TypeAlias = tuple[int, int]
"""Of a pipe: the one to read, and the one to write."""


@dataclass(frozen=True)
class StageLimits:
    """Sizes of the stages; `num_threads` and `cores` are those of all together.

    ranks    processes of each stage
    owners   the rank of each expert, by node; of nodes that it lacks every rank has a part of each expert
    """

    num_blocks: int
    num_states: int
    max_batch_tokens: int
    max_sequences: int
    num_threads: int
    cores: tuple[int, ...] | None = None
    isa: str | None = None
    weights: WeightPlacement = "auto"
    ranks: int = 1
    owners: Mapping[str, Sequence[int]] = field(default_factory=dict)


class StageStep:
    """A step that stages compute. Implements `executors.BegunStep`."""

    def __init__(self, owner: "ProcessStages", number: int, slot: int, rows: int) -> None:
        self._owner, self._number, self._slot, self._rows = owner, number, slot, rows

    def logits(self) -> FloatArray:
        """Wait for the step; return its logits [R, vocabulary], valid until as many steps began as there are stages.

        EngineError where a stage could not compute it, died or hangs, with the stage and the reason.
        """
        return self._owner.wait_for(self._number, self._slot, self._rows)


class _Process:
    """A stage's process, or that of one of its ranks, and this side's ends of its pipes."""

    def __init__(self, start: StageStart) -> None:
        count, rank = len(start.cut.devices), start.rank
        of_ranks = f"rank {rank.number} of {rank.count}"
        self._name = f"stage {start.device} of {count}" if count > 1 else of_ranks
        if count > 1 and rank.count > 1:
            self._name += f", {of_ranks}"
        self.device = start.device
        self.connection, theirs = Pipe()
        reading, self._lifeline = os.pipe()
        descriptors = [theirs.fileno(), reading, *start.descriptors]
        try:
            with all_cores():
                self.process = subprocess.Popen(
                    [sys.executable, "-c", _MAIN.format(path=sys.path, descriptor=theirs.fileno(), lifeline=reading)],
                    stdin=subprocess.DEVNULL,
                    stdout=sys.__stderr__,
                    pass_fds=descriptors,
                )
        finally:
            theirs.close()
            os.close(reading)
        with suppress(OSError):  # it has ended, which the answer tells
            self.connection.send(start)

    def end(self) -> None:
        """Kill it, and free what it held on this side. Idempotent."""
        self.process.kill()
        self.process.wait()
        self.connection.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    @property
    def is_stopped(self) -> bool:
        """Report whether a signal stopped it."""
        return self._stat()[:1] == ["T"]

    @property
    def cpu_ticks(self) -> int:
        """Processor time that it used; 0 where the system has no /proc."""
        fields = self._stat()
        return int(fields[11]) + int(fields[12]) if fields else 0  # utime, stime of proc(5)

    def _stat(self) -> list[str]:
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return []

    def __str__(self) -> str:
        return f"{self._name} (process {self.process.pid})"


class ProcessStages:
    """The stages of a program as processes, over a pool of KV blocks and one of side states that they share.

    pool, states   the divided pools, which this process copies; None without side state
    num_at_once    most steps in flight
    num_restarts   times that stages were replaced

    Its methods are those of NativeProgram that an executor calls, with the same errors; one thread may call them.
    """

    def __init__(self, artifact: Artifact, cut: CutProgram, limits: StageLimits) -> None:
        self._artifact, self._cut, self._limits = artifact, cut, limits
        kv, devices = artifact.manifest.kv, cut.devices
        is_chain = len(cut.runs) == len(devices)
        # A device of several runs keeps values in its arena from one to the next, so it computes one step at a time.
        self.num_at_once = len(devices) if is_chain else 1
        self.num_restarts, self._adapters = 0, dict[int, tuple[Adapter, int]]()
        sequences = min(limits.max_sequences, limits.max_batch_tokens)
        tokens, ranks = limits.max_batch_tokens, limits.ranks
        self._shape = SlotSizes.of(
            cut, slots=self.num_at_once, processes=len(devices) * ranks, tokens=tokens, sequences=sequences
        )
        self._memory = SharedMemory.make(self._shape.num_bytes, "the memory of steps between stages")
        self._steps = StepMemory(self._shape, self._memory.map())
        self._groups = [
            SharedMemory.make(memory_bytes(each.program, ranks, tokens), "the memory that ranks exchange values in")
            if ranks > 1
            else None
            for each in devices
        ]
        blocks, what = limits.num_blocks, f"a KV pool of {limits.num_blocks} blocks"
        self._pools = [
            SharedMemory.make(blocks * each.program.kv.block_bytes, what) if each.layers else None for each in devices
        ]
        slots, what = max(1, limits.num_states), f"a pool of {limits.num_states} side states"
        self._states = [
            SharedMemory.make(slots * each.program.kv.state_bytes, what) if each.program.kv.state_bytes else None
            for each in devices
        ]
        self.pool, self.states = divided_pools(
            cut,
            kv,
            [
                KVPool(device.program.kv, blocks, shared=memory.map()) if memory else None
                for device, memory in zip(devices, self._pools, strict=True)
            ],
            [
                StatePool(device.program.kv, slots, memory.map()) if memory else None
                for device, memory in zip(devices, self._states, strict=True)
            ],
        )
        self._processes: list[_Process] = []
        self._lost: str | None = None
        self._first = self._last = -1  # pipes to the first stage and from the last run
        self._num_begun = self._num_done = 0
        self._errors: dict[int, str] = {}  # number of a step -> its error
        self._is_closed = False
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def step(self, batch: ForwardBatch) -> FloatArray:
        """Run a step; return logits [R, vocabulary], valid until as many steps began as there are stages."""
        return self.begin(batch).logits()

    def begin(self, batch: ForwardBatch) -> StageStep:
        """Give a step to the first stage, after those that are in flight. EngineError if that is not possible.

        Stages that were lost are replaced first.
        """
        self._require_running()
        while self._num_begun - self._num_done >= self.num_at_once:
            self._take_done()
        number, slot = self._num_begun, self._num_begun % self.num_at_once
        self._steps.put(slot, batch)
        self._num_begun += 1
        try:
            os.write(self._first, bytes([slot]))
        except BaseException as error:  # Ctrl-C, too, leaves no half of a step
            lost = self._lose(self._cause() if isinstance(error, OSError) else "a step was interrupted")
            del self._errors[number]
            if not isinstance(error, OSError):
                raise
            raise EngineError(lost) from error
        return StageStep(self, number, slot, len(batch.logits_indices))

    def wait_for(self, number: int, slot: int, rows: int) -> FloatArray:
        """Wait for a step by its number; see `StageStep.logits`."""
        while self._num_done <= number:
            self._take_done()
        if number in self._errors:
            raise EngineError(self._errors.pop(number))
        return self._steps.logits(slot)[:rows]

    def settle(self) -> None:
        """Wait until no step is being computed. Those in flight can be read later, and so can their errors."""
        while self._num_done < self._num_begun:
            self._take_done()

    def load_adapter(self, slot: int, adapter: Adapter, slots: int) -> None:
        """Let sequences have an adapter, each stage its layers; see NativeProgram. The slot is free after an error."""
        self._require_running()
        self.settle()
        try:
            self._send_adapter(slot, adapter, slots)
        except BaseException:
            self.unload_adapter(slot)
            raise
        self._adapters[slot] = adapter, slots

    def unload_adapter(self, slot: int) -> None:
        """Free a slot's memory; no later step may name the slot. Nothing for a free one."""
        self._adapters.pop(slot, None)
        self.settle()
        with suppress(EngineError):  # stages that are lost have no adapters
            for process in self._processes:
                self._change(process, DropAdapter(slot))

    def _send_adapter(self, slot: int, adapter: Adapter, slots: int) -> None:
        of_stages = divided_adapter(self._cut, adapter)
        for process in self._processes:
            self._change(process, PutAdapter(slot, of_stages[process.device], slots))

    def _change(self, process: "_Process", message: PutAdapter | DropAdapter) -> None:
        with suppress(OSError):  # it has ended, which the answer tells
            process.connection.send(message)
        answer = self._answer(process, _HUNG_SECONDS)
        if isinstance(answer, Exception):
            raise answer

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the matrices of the adapters in slots."""
        return sum(adapter.num_bytes for adapter, _ in self._adapters.values())

    @property
    def facts(self) -> StageFacts:
        """Facts about the processes. For any thread."""
        num_running = sum(each.process.poll() is None for each in tuple(self._processes))
        return StageFacts(num_running, self.num_restarts, self._lost or "")

    @property
    def is_computing(self) -> bool:
        """Report whether a step is being computed. For any thread."""
        return self._num_done < self._num_begun

    def close(self) -> None:
        """End the processes and free the memory that they share. Idempotent; logits stay valid."""
        if not self._is_closed:
            self._is_closed = True
            self._end_all()
            for memory in (self._memory, *self._groups, *self._pools, *self._states):
                if memory:
                    os.close(memory.descriptor)

    # Steps in flight

    def _take_done(self) -> None:
        """Wait for the oldest step in flight; with the stages, all are over."""
        poller = select.poll()
        poller.register(self._last, select.POLLIN)
        watch = _Watch(self._signs)
        while not poller.poll(_LOOK_MILLISECONDS):
            if any(each.process.poll() is not None for each in self._processes):
                self._lose(self._cause())
                return
            if watch.silent_seconds > _HUNG_SECONDS:
                self._lose(self._hung())
                return
        signals = os.read(self._last, self.num_at_once)
        if not signals:
            self._lose(self._cause())
        for signalled in signals:
            if signalled & ~FAILED != self._num_done % self.num_at_once:
                self._lose("a stage answered another step than the oldest")
                return
            if signalled & FAILED:
                self._errors[self._num_done] = self._steps.take_error()
            self._num_done += 1

    def _signs(self) -> tuple[object, ...]:
        """Return what changes while a stage works."""
        return (self._steps.progress.tobytes(), *(each.cpu_ticks for each in self._processes))

    def _cause(self) -> str:
        """Which stage ended first, and how."""
        until = time.monotonic() + _EXIT_SECONDS
        while time.monotonic() < until:
            for each in self._processes:
                status = each.process.poll()
                if status not in (None, LEFT_ALONE):
                    return f"{each} {_ending(status)}"
            time.sleep(0.01)
        return "a stage closed its connection"

    def _hung(self) -> str:
        """Which stage does not advance, and how."""
        progress = self._steps.progress.tolist()
        found = next((each for each in self._processes if each.is_stopped), None)
        if found:
            return f"{found} is stopped by a signal (SIGSTOP)"
        found = next(
            (each for each, (begun, done) in zip(self._processes, progress, strict=True) if begun > done), None
        )
        return f"{found or 'a stage'} neither advanced nor used the processor for {_HUNG_SECONDS:.0f} s"

    def _lose(self, cause: str) -> str:
        """End all stages, and the steps in flight with an error; returns it."""
        self._lost = f"{cause}; the stages are started again at the next step"
        self._end_all()
        for number in range(self._num_done, self._num_begun):
            self._errors[number] = self._lost
        self._num_done = self._num_begun
        return self._lost

    # Processes

    def _require_running(self) -> None:
        """Replace stages that were lost. EngineError if that fails, to be tried again at the next step."""
        if self._is_closed:
            raise EngineError("the executor is closed; make another")
        # While steps are in flight, their end tells.
        is_idle = not self._lost and self._num_done == self._num_begun
        if is_idle and any(each.process.poll() is not None for each in self._processes):
            self._lose(self._cause())
        if self._lost:
            started = time.perf_counter()
            self._start()
            self.num_restarts += 1
            _log.warning("%s: they were, in %.2f s", self._lost, time.perf_counter() - started)
            self._lost = None

    def _start(self) -> None:
        self._end_all()
        self._steps.progress[:] = 0
        for memory in self._groups:
            if memory:
                memory.map()[: self._limits.ranks * LINE_BYTES] = bytes(self._limits.ranks * LINE_BYTES)
        runs, count = self._cut.runs, len(self._cut.devices)
        pipes = [os.pipe() for _ in range(len(runs) + 1)]
        wakes = [[os.pipe() for _ in range(1, self._limits.ranks)] for _ in runs]
        self._first, self._last = pipes[0][1], pipes[-1][0]
        try:
            for device in range(count):
                for rank in range(self._limits.ranks):
                    self._processes.append(_Process(self._stage(device, rank, pipes, wakes)))
        except OSError as error:
            raise EngineError(
                f"the processes of {count * self._limits.ranks} stages and ranks cannot be started: {error.strerror}"
            ) from error
        finally:
            for reading, writing in (*pipes, *(pipe for each in wakes for pipe in each)):
                for descriptor in {reading, writing} - {self._first, self._last}:
                    os.close(descriptor)
        for process in self._processes:
            answer = self._answer(process, _LOAD_SECONDS)
            if isinstance(answer, Exception):
                self._end_all()
                raise EngineError(f"{process} cannot be loaded: {_in_words(answer)}") from answer
            assert isinstance(answer, Ready)
            self.isa = answer.isa
        for slot, (adapter, slots) in self._adapters.items():
            self._send_adapter(slot, adapter, slots)

    def _stage(self, device: int, rank: int, pipes: Sequence[_Ends], wakes: Sequence[Sequence[_Ends]]) -> StageStart:
        limits, number = self._limits, device * self._limits.ranks + rank
        threads = max(1, limits.num_threads // (len(self._cut.devices) * limits.ranks))
        own = [at for at, run in enumerate(self._cut.runs) if run.device == device]
        return StageStart(
            artifact=self._artifact,
            cut=self._cut,
            device=device,
            rank=Rank(rank, limits.ranks, limits.owners),
            group=self._groups[device],
            inputs={at: wakes[at][rank - 1][0] if rank else pipes[at][0] for at in own},
            outputs={} if rank else {at: pipes[at + 1][1] for at in own},
            wakes={} if rank else {at: [writing for _, writing in wakes[at]] for at in own},
            shape=self._shape,
            steps=self._memory,
            pool=self._pools[device],
            states=self._states[device],
            num_blocks=limits.num_blocks,
            num_states=max(1, limits.num_states),
            num_threads=threads,
            cores=limits.cores[number * threads : (number + 1) * threads] if limits.cores else None,
            isa=limits.isa,
            weights=limits.weights,
        )

    def _answer(self, process: "_Process", seconds: float) -> object:
        """Return what a stage answers. EngineError where it ends or hangs before, and all stages with it."""
        watch = _Watch(self._signs)
        try:
            while not process.connection.poll(_LOOK_MILLISECONDS / 1000):
                if watch.silent_seconds > seconds:
                    raise EngineError(self._lose(f"{process} did not answer for {seconds:.0f} s"))
            return process.connection.recv()
        except (EOFError, OSError) as error:
            raise EngineError(self._lose(self._cause())) from error

    def _end_all(self) -> None:
        for process in self._processes:
            process.end()
        self._processes = []
        for descriptor in (self._first, self._last):
            if descriptor >= 0:
                os.close(descriptor)
        self._first = self._last = -1


class _Watch:
    """How long signs have not changed."""

    def __init__(self, signs: Callable[[], object]) -> None:
        self._signs, self._found, self._since = signs, list[object](), time.monotonic()

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last change, as far as this was read."""
        if (found := [self._signs()]) != self._found:
            self._found, self._since = found, time.monotonic()
        return time.monotonic() - self._since


def _ending(status: int) -> str:
    """How a process ended, by its exit status."""
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name if -status in signal.valid_signals() else f"signal {-status}"
    return f"was killed ({name})"


def _in_words(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "too little memory; set a smaller kv_bytes or max_batch_tokens, or free some memory"
    return str(error) if isinstance(error, IngotError) else f"{type(error).__name__}: {error}"
