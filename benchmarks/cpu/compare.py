"""Ingot's CPU engines next to llama.cpp, onnxruntime-genai and OpenVINO GenAI, all at 4 bits, in one run.

    python -m benchmarks.cpu.setup_peers         # once: a virtual environment with the peers
    python -m benchmarks.cpu.compare --prepare   # once: checkpoints and converted models; needs no quiet machine
    python -m benchmarks.cpu.compare             # on a quiet machine; --resume continues an interrupted run

The part "recipes" compares W8A8 and float16 weights on Ingot's two engines, without the peers. Weights are random, so
nothing is downloaded and quality is not measured. Every cell is written to --output as soon as it is measured, and the
tables of docs/benchmarks.md are made from these files. An engine that cannot run is named there with the reason.
"""

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import click

from benchmarks.adapters.base import PreparedModel, Setup, Timing
from benchmarks.cpu.cells import LOAD_SHAPE, LONG_PROMPT, PARTS, Cell, Part, cells_of, pool_tokens
from benchmarks.cpu.comparison_results import DEFAULT_OUTPUT, PartResults
from benchmarks.cpu.comparison_tables import DOCUMENT, write_tables
from benchmarks.cpu.machine import busy_neighbours, measure_read_bandwidth, read_memory
from benchmarks.cpu.rounds import Figure
from benchmarks.cpu.turns import Limits, measure_turns
from benchmarks.device import available_cores
from benchmarks.hybrids import ALL_SHAPES
from benchmarks.peers import (
    DEFAULT_WORK,
    ENGINES,
    PEERS,
    PEERS_VENV,
    RECIPE_ENGINES,
    PeerFailed,
    PeerProcess,
    Sequences,
    prepare,
)
from benchmarks.shapes import SHAPES
from benchmarks.synthetic import write_checkpoint

DENSE = tuple(name for name, shape in SHAPES.items() if not shape.num_experts)
_CONTEXT_TOKENS = 2 * LONG_PROMPT  # of the checkpoints
_FIGURE_SECONDS = 4.0  # after which a figure begins no step: with busy neighbours a step can take seconds
_WARM_UP = Sequences(1, 512, 544)
_LOAD_ROUNDS = 3
_FIRST_TOKEN = Sequences(1, 16, 32)
_MEMORY_PROMPT = Sequences(1, 512, 544)


@dataclass(frozen=True)
class Plan:
    """Options of the command line. `scale` multiplies the seconds of every cell."""

    engines: tuple[str, ...]
    rounds: int
    scale: float
    patience_seconds: float
    work_folder: Path
    peers_python: Path
    output: Path
    resume: bool

    def chosen(self, table: Iterable[str]) -> list[str]:
        """Engines of a table that the command line names."""
        return [name for name in table if name in self.engines]

    def setup(self, shape: str, threads: int, batch: int, max_tokens: int, all_tokens: int) -> Setup:
        """The setup of every engine."""
        return Setup(shape, _CONTEXT_TOKENS, self.work_folder, threads, batch, max_tokens, all_tokens)

    def limits(self, cell: Cell) -> Limits:
        """Of a cell's rounds. Neighbours disturb on purpose."""
        patience = 0.0 if cell.work.neighbours else self.patience_seconds
        return Limits(self.rounds, cell.work.budget * self.scale, patience)


@dataclass(frozen=True)
class Models:
    """Engine -> its converted model of one shape, or the reason why it has none."""

    prepared: Mapping[str, PreparedModel]
    failed: Mapping[str, str]

    @classmethod
    def prepare(cls, plan: Plan, shape: str, engines: Iterable[str]) -> "Models":
        """Write the checkpoint and convert it for every engine, unless that was done; prints a line for each."""
        setup = plan.setup(shape, available_cores(), 1, 1, 1)
        write_checkpoint(ALL_SHAPES[shape], setup.checkpoint, context_tokens=_CONTEXT_TOKENS)
        prepared, failed = {}, {}
        for name in engines:
            try:
                prepared[name] = prepare(ENGINES[name], setup, plan.peers_python)
            except PeerFailed as error:
                failed[name] = str(error)
        for name, model in prepared.items():
            click.echo(f"{shape}: {name}: {model.weight_bytes / 1e6:.0f} MB of weights a step; {model.notes}")
        for name, reason in failed.items():
            click.echo(f"{shape}: {name} is left out: {reason}")
        return cls(prepared, failed)


class Engines:
    """The running engines of one shape and thread count; one that failed is started again for the next cell."""

    def __init__(self, plan: Plan, setup: Setup, models: "Models") -> None:
        self._plan, self._setup, self._models = plan, setup, models
        self._stack = ExitStack()
        self.running: dict[str, PeerProcess] = {}
        self.failed = dict(models.failed)

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
        failed = self.failed | self._warm_up(cell)
        ready = {name: peer for name, peer in self.running.items() if name not in failed}
        with neighbours:
            figures, newly_failed = measure_turns(
                ready, lambda peer, number: _measure(peer, cell, number), _step_tokens(cell), self._plan.limits(cell)
            )
        facts = {name: facts_of(self.running[name].facts) for name in figures}
        for name in newly_failed:
            self._start(name)
        return cell.key | {
            "measured_at": _now(),
            "bandwidth": max(bandwidth, measure_read_bandwidth(cell.threads)),
            "engines": {name: engine_record(figures[name]) | {"facts": facts[name]} for name in figures},
            "failed": failed | newly_failed,
        }

    def _warm_up(self, cell: Cell) -> dict[str, str]:
        """Compute the prompts of a decode, or one that is as long as the steps of a prefill; why engines cannot."""
        failed = {}
        for name, peer in list(self.running.items()):
            try:
                if cell.work.steps:
                    peer.decode(cell.work.sequences, 0, 1, _FIGURE_SECONDS)
                elif not (peer.sequences and peer.sequences.prompt_tokens >= _WARM_UP.prompt_tokens):
                    peer.start(_WARM_UP, seed=0)
            except PeerFailed as error:
                failed[name] = str(error)
                self._start(name)
        return failed

    def _start(self, name: str) -> None:
        self.running.pop(name, None)
        try:
            process = PeerProcess(ENGINES[name], self._setup, self._models.prepared[name], self._plan.peers_python)
        except PeerFailed as error:
            self.failed[name] = str(error)
            click.echo(f"{ENGINES[name].label} is left out: {error}", err=True)
        else:
            self.running[name] = self._stack.enter_context(process)


def _measure(peer: PeerProcess, cell: Cell, number: int) -> Timing:
    work = cell.work
    if work.steps:
        return peer.decode(work.sequences, 0, work.steps, _FIGURE_SECONDS)
    return peer.start(work.sequences, seed=1 + number)


def _step_tokens(cell: Cell) -> int:
    return cell.work.batch if cell.work.steps else cell.work.round_tokens


def facts_of(model: PreparedModel) -> dict[str, Any]:
    """Facts about a converted model for the results, with its file's name instead of a path of this machine."""
    return asdict(model) | {"model": model.model.name}


def engine_record(figures: Sequence[Figure]) -> dict[str, Any]:
    """Tokens per second, their median and best; processor seconds per 1000 tokens; all rounds."""
    rates = [figure.tokens_per_second for figure in figures]
    return {
        "median": statistics.median(rates),
        "best": max(rates),
        "cpu_seconds_per_1000_tokens": 1000 * statistics.median(figure.cpu_seconds for figure in figures),
        "disturbed_rounds": sum(not figure.is_quiet for figure in figures),
        "rounds": [asdict(figure) for figure in figures],
    }


def run_group(plan: Plan, models: Models, shape: str, threads: int, parts: Sequence[Part]) -> None:
    """Measure all cells of a shape and thread count that are not in the output, and write each."""
    results = {part: PartResults.load(plan.output, part) for part in parts}
    cells = [
        cell
        for cell in cells_of(shape, threads, parts)
        if not (plan.resume and results[cell.work.part].has(cell.key, models.prepared))
    ]
    if not cells:
        return
    batch = max(cell.work.batch for cell in cells)
    longest = max(cell.work.sequences.max_tokens for cell in cells)
    setup = plan.setup(shape, threads, batch, longest, pool_tokens(cells))
    with Engines(plan, setup, models) as engines:
        for cell in cells:
            begin = time.perf_counter()
            record = engines.measure(cell)
            results[cell.work.part].put(cell.key, record)
            rates = ", ".join(f"{name} {one['median']:.1f}" for name, one in record["engines"].items())
            click.echo(f"{cell}: {rates} tokens/s; {time.perf_counter() - begin:.0f} s")


def measure_load(plan: Plan, models: Models, shape: str, threads: int) -> dict[str, Any]:
    """Load time, first token and memory of every engine, each round in processes of their own."""
    setup = plan.setup(shape, threads, 1, _MEMORY_PROMPT.max_tokens, _MEMORY_PROMPT.max_tokens)
    rounds: dict[str, list[dict[str, Any]]] = {}
    failed = dict(models.failed)
    for number in range(_LOAD_ROUNDS):
        for name, model in models.prepared.items():
            if name in failed:
                continue
            try:
                with PeerProcess(PEERS[name], setup, model, plan.peers_python) as peer:
                    rounds.setdefault(name, []).append(_load_round(peer, computes_prompt=number == 0))
            except PeerFailed as error:
                failed[name] = str(error)
                rounds.pop(name, None)
    engines = {name: _load_record(each) | {"facts": facts_of(models.prepared[name])} for name, each in rounds.items()}
    return {"measured_at": _now(), "engines": engines, "failed": failed}


def _load_round(peer: PeerProcess, computes_prompt: bool) -> dict[str, Any]:
    loaded = read_memory(peer.pid)
    first = peer.start(_FIRST_TOKEN, seed=0)
    if computes_prompt:
        peer.decode(_MEMORY_PROMPT, 0, 16, _FIGURE_SECONDS)
    used = read_memory(peer.pid)
    return {
        "load_seconds": peer.load.seconds,
        "load_cpu_seconds": peer.load.cpu_seconds,
        "ready_seconds": peer.ready_seconds,
        "first_token_seconds": first.seconds,
        "memory_loaded": asdict(loaded) if loaded else None,
        "memory_used": asdict(used) if used else None,
    }


def _load_record(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of the times; memory after the prompt of 512 tokens, which the first round alone computes."""
    names = ("load_seconds", "load_cpu_seconds", "ready_seconds", "first_token_seconds")
    medians = {name: statistics.median(each[name] for each in rounds) for name in names}
    return medians | {"memory": rounds[0]["memory_used"], "rounds": list(rounds)}


def run_load(plan: Plan, models: Models, shape: str, threads: int) -> None:
    """Measure loading, unless the output has it, and write it."""
    results = PartResults.load(plan.output, "load")
    key = {"part": "load", "shape": shape, "threads": threads}
    if plan.resume and results.has(key, models.prepared):
        return
    record: dict[str, Any] = key | measure_load(plan, models, shape, threads)
    results.put(key, record)
    times = ", ".join(f"{name} {one['load_seconds']:.2f} s" for name, one in record["engines"].items())
    click.echo(f"{shape}, {threads} threads, load: {times}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _listed(allowed: Sequence[str], default: Sequence[str] = ()) -> Any:
    """A callback that splits a value at commas and refuses what is not allowed; by default all of it."""

    def split(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
        names = tuple(value.split(",")) if value else tuple(default or allowed)
        for name in names:
            if name not in allowed:
                raise click.BadParameter(f"{name!r} is not one of {', '.join(allowed)}")
        return names

    return split


def _thread_counts(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    if not value:
        return tuple(sorted({1, available_cores()}))
    if not all(word.isdecimal() and int(word) for word in value.split(",")):
        raise click.BadParameter(f"{value!r} is not a list of thread counts, such as 1,2")
    return tuple(int(word) for word in value.split(","))


@click.command(help=__doc__)
@click.option("--parts", callback=_listed(PARTS), help=f"Of {','.join(get_args(Part))}; default: all.")
@click.option(
    "--shapes", callback=_listed(tuple(ALL_SHAPES), DENSE), help=f"Of {','.join(ALL_SHAPES)}; default: DENSE."
)
@click.option("--threads", callback=_thread_counts, help="Such as 1,2. Default: 1, and all cores.")
@click.option("--engines", callback=_listed(tuple(ENGINES)), help=f"Of {','.join(ENGINES)}; default: all.")
@click.option("--rounds", type=click.IntRange(min=2), default=10, show_default=True, help="At most, of a cell.")
@click.option("--scale", type=float, default=1.0, show_default=True, help="Multiplies the seconds of every cell.")
@click.option(
    "--patience", type=float, default=5.0, show_default=True, help="Seconds to wait for other processes, per figure."
)
@click.option("--prepare", "only_prepare", is_flag=True, help="Only convert the models.")
@click.option("--resume", is_flag=True, help="Keep the cells in which --output has every engine that can be prepared.")
@click.option("--work", type=click.Path(path_type=Path), default=DEFAULT_WORK, help="Checkpoints, converted models.")
@click.option("--peers-python", type=click.Path(path_type=Path), default=PEERS_VENV / "bin" / "python")
@click.option("--output", type=click.Path(path_type=Path), default=DEFAULT_OUTPUT, help="Folder of the JSON files.")
@click.option("--document", type=click.Path(path_type=Path), default=DOCUMENT, help="Gets the tables of --output.")
def main(
    parts: tuple[Part, ...],
    shapes: tuple[str, ...],
    threads: tuple[int, ...],
    engines: tuple[str, ...],
    rounds: int,
    scale: float,
    patience: float,
    only_prepare: bool,
    resume: bool,
    work: Path,
    peers_python: Path,
    output: Path,
    document: Path,
) -> None:
    """Measure, write the JSON and the tables."""
    plan = Plan(engines, rounds, scale, patience, work.absolute(), peers_python.absolute(), output, resume)
    peers, own = plan.chosen(PEERS), plan.chosen(RECIPE_ENGINES)
    with_peers = [part for part in parts if part != "recipes"] if peers else []
    models = {shape: Models.prepare(plan, shape, peers) for shape in shapes if with_peers}
    recipes = {shape: Models.prepare(plan, shape, own) for shape in shapes if own and "recipes" in parts}
    if only_prepare:
        return
    for shape in models:
        for count in threads:
            run_group(plan, models[shape], shape, count, [part for part in with_peers if part != "load"])
    if "load" in with_peers:
        for shape in [LOAD_SHAPE] if LOAD_SHAPE in shapes else shapes:
            run_load(plan, models[shape], shape, max(threads))
    for shape in recipes:
        for count in threads:
            run_group(plan, recipes[shape], shape, count, ["recipes"])
    write_tables(document, output)
    click.echo(f"written to {output} and {document}")


if __name__ == "__main__":
    main()
