"""The engines of a run of the comparison: their converted models, their processes, and a cell measured with them."""

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from benchmarks.adapters.base import PreparedModel, Setup, Timing
from benchmarks.cpu.cells import LONG_PROMPT, Cell
from benchmarks.cpu.machine import busy_neighbours, measure_read_bandwidth, read_memory
from benchmarks.cpu.rounds import Figure
from benchmarks.cpu.turns import Limits, measure_turns
from benchmarks.device import available_cores
from benchmarks.hybrids import ALL_SHAPES
from benchmarks.peers import ENGINES, PeerFailed, PeerProcess, Programs, Sequences, prepare
from benchmarks.synthetic import write_checkpoint

_CONTEXT_TOKENS = 2 * LONG_PROMPT
FIGURE_SECONDS = 4.0  # after which a figure begins no step: with busy neighbours a step can take seconds
_WARM_UP = Sequences(1, 512, 544)


@dataclass(frozen=True)
class Plan:
    """Options of the command line.

    scale      multiplies the seconds of every cell
    deadline   time.monotonic(); a cell whose seconds would end later does not begin
    """

    engines: tuple[str, ...]
    rounds: int
    scale: float
    patience_seconds: float
    work_folder: Path
    programs: Programs
    output: Path
    resume: bool
    quick: bool
    deadline: float

    @property
    def seconds_left(self) -> float:
        """Until the deadline."""
        return self.deadline - time.monotonic()

    def chosen(self, table: Iterable[str]) -> list[str]:
        """Engines of a table that the command line names."""
        return [name for name in table if name in self.engines]

    def setup(self, shape: str, threads: int, batch: int, max_tokens: int, all_tokens: int) -> Setup:
        """The setup of every engine."""
        return Setup(shape, _CONTEXT_TOKENS, self.work_folder, threads, batch, max_tokens, all_tokens)

    def limits(self, cell: Cell) -> Limits:
        """Bounds of a cell's rounds. Neighbours disturb on purpose."""
        patience = 0.0 if cell.work.neighbours else self.patience_seconds
        return Limits(self.rounds, cell.work.budget * self.scale, patience)


@dataclass(frozen=True)
class Models:
    """Engine -> its converted model of one shape, or the reason why it has none."""

    prepared: Mapping[str, PreparedModel]
    missing: Mapping[str, str]

    def of_part(self, part: str) -> "Models":
        """Those of the engines that take part in a part."""
        prepared = {name: model for name, model in self.prepared.items() if ENGINES[name].runs(part)}
        return Models(prepared, {name: why for name, why in self.missing.items() if ENGINES[name].runs(part)})

    @classmethod
    def prepare(cls, plan: Plan, shape: str, engines: Iterable[str]) -> "Models":
        """Write the checkpoint and convert it for every engine, unless that was done; prints a line for each."""
        setup = plan.setup(shape, available_cores(), 1, 1, 1)
        write_checkpoint(ALL_SHAPES[shape], setup.checkpoint, context_tokens=_CONTEXT_TOKENS)
        prepared, missing = {}, {}
        for name in engines:
            try:
                prepared[name] = prepare(ENGINES[name], setup, plan.programs)
            except PeerFailed as error:
                missing[name] = str(error)
        for name, model in prepared.items():
            click.echo(f"{shape}: {name}: {model.weight_bytes / 1e6:.0f} MB of weights a step; {model.notes}")
        for name, reason in missing.items():
            click.echo(f"{shape}: {name} is left out: {reason}")
        return cls(prepared, missing)


class Engines:
    """The running engines of one shape and thread count; one that failed is started again for the next cell."""

    def __init__(self, plan: Plan, setup: Setup, models: "Models") -> None:
        self._plan, self._setup, self._models = plan, setup, models
        self._stack = ExitStack()
        self.running: dict[str, PeerProcess] = {}
        self.failed: dict[str, str] = {}

    def __enter__(self) -> "Engines":
        for name in self._models.prepared:
            self._start(name)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, cell: Cell) -> dict[str, Any]:
        """The record of a cell. The bandwidth is the higher one of before and after: a virtual machine's changes."""
        bandwidth = measure_read_bandwidth(cell.threads)
        neighbours = busy_neighbours(cell.work.neighbours) if cell.work.neighbours else nullcontext()
        models = self._models.of_part(cell.work.part)
        failed = self.failed | self._warm_up(cell)
        ready = {name: peer for name, peer in self.running.items() if name not in failed and name in models.prepared}
        with neighbours:
            figures, newly_failed = measure_turns(
                ready, lambda peer, number: _measure(peer, cell, number), _step_tokens(cell), self._plan.limits(cell)
            )
        facts = {name: facts_of(self.running[name].facts) | pages_of(self.running[name].pid) for name in figures}
        for name in newly_failed:
            self._start(name)
        return cell.key | {
            "measured_at": now(),
            "bandwidth": max(bandwidth, measure_read_bandwidth(cell.threads)),
            "engines": {name: engine_record(figures[name]) | {"facts": facts[name]} for name in figures},
            "failed": failed | newly_failed,
            "missing": dict(models.missing),
        }

    def _warm_up(self, cell: Cell) -> dict[str, str]:
        """Compute the prompts of a decode, or one that is as long as the steps of a prefill; why engines cannot."""
        failed = {}
        for name, peer in list(self.running.items()):
            if not ENGINES[name].runs(cell.work.part):
                continue
            try:
                if cell.work.steps:
                    peer.decode(cell.work.sequences, 0, 1, FIGURE_SECONDS)
                elif not (peer.sequences and peer.sequences.prompt_tokens >= _WARM_UP.prompt_tokens):
                    peer.start(_WARM_UP, seed=0)
            except PeerFailed as error:
                failed[name] = str(error)
                self._start(name)
        return failed

    def _start(self, name: str) -> None:
        self.running.pop(name, None)
        try:
            process = PeerProcess(ENGINES[name], self._setup, self._models.prepared[name], self._plan.programs)
            self._stack.enter_context(process)
            process.improve_pages()
        except PeerFailed as error:
            self.failed[name] = str(error)
            click.echo(f"{ENGINES[name].label} is left out: {error}", err=True)
        else:
            self.running[name] = process


def _measure(peer: PeerProcess, cell: Cell, number: int) -> Timing:
    work = cell.work
    if work.steps:
        return peer.decode(work.sequences, 0, work.steps, FIGURE_SECONDS)
    return peer.start(work.sequences, seed=1 + number)


def _step_tokens(cell: Cell) -> int:
    return cell.work.batch if cell.work.steps else cell.work.round_tokens


def facts_of(model: PreparedModel) -> dict[str, Any]:
    """Facts about a converted model for the results, with its file's name instead of a path of this machine."""
    return asdict(model) | {"model": model.model.name}


def pages_of(pid: int) -> dict[str, int]:
    """Bytes that a process has in huge pages, where the system says so."""
    memory = read_memory(pid)
    return {"huge_bytes": memory.huge_bytes} if memory else {}


def engine_record(figures: Sequence[Figure]) -> dict[str, Any]:
    """Tokens per second, their median and best; processor seconds per 1000 tokens; all rounds."""
    rates = [figure.tokens_per_second for figure in figures]
    cpu_seconds = [figure.cpu_seconds for figure in figures if figure.cpu_seconds is not None]
    return {
        "median": statistics.median(rates),
        "best": max(rates),
        "cpu_seconds_per_1000_tokens": 1000 * statistics.median(cpu_seconds) if cpu_seconds else None,
        "disturbed_rounds": sum(not figure.is_quiet for figure in figures),
        "rounds": [asdict(figure) for figure in figures],
    }


def now() -> str:
    """The time for a record."""
    return datetime.now(UTC).isoformat(timespec="seconds")
