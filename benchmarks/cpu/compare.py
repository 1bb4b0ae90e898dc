"""Ingot's CPU engines next to six peers, all at 4 bits, in one run.

The peers are llama.cpp, ik_llama.cpp, mistral.rs, onnxruntime-genai, OpenVINO GenAI and vLLM.

    python -m benchmarks.cpu.setup_peers         # once: virtual environments with the peers
    python -m benchmarks.cpu.compare --prepare   # once: checkpoints and converted models; needs no quiet machine
    python -m benchmarks.cpu.compare --quick     # on a quiet machine: the most important cells, 25 minutes at most
    python -m benchmarks.cpu.compare             # all cells; --resume continues an interrupted run

The part "recipes" compares W8A8 and float16 weights on Ingot's two engines, without the peers. Weights are random, so
nothing is downloaded and quality is not measured. Every cell is written to the processor's file in --output as soon as
it is measured, and the tables of docs/benchmarks.md and the range in README.md are made from these files. An engine
that cannot run is named there with the reason.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import click

from benchmarks.cpu.cells import LOAD_SHAPE, PARTS, Cell, Part, cells_of, pool_tokens
from benchmarks.cpu.comparison_engines import FIGURE_SECONDS, Engines, Models, Plan, facts_of, now
from benchmarks.cpu.comparison_results import DEFAULT_OUTPUT, ProcessorResults
from benchmarks.cpu.comparison_tables import DOCUMENT, README, write_summary, write_tables
from benchmarks.cpu.machine import read_memory
from benchmarks.device import available_cores
from benchmarks.hybrids import ALL_SHAPES
from benchmarks.peers import (
    DEFAULT_WORK,
    ENGINES,
    IK_LLAMA_BENCH,
    PEERS,
    PEERS_VENV,
    RECIPE_ENGINES,
    VLLM_VENV,
    PeerFailed,
    PeerProcess,
    Programs,
    Sequences,
)
from benchmarks.shapes import SHAPES

DENSE = tuple(name for name, shape in SHAPES.items() if not shape.num_experts)
_LOAD_ROUNDS = 3
_FIRST_TOKEN = Sequences(1, 16, 32)
_MEMORY_PROMPT = Sequences(1, 512, 544)
_QUICK_PARTS: tuple[Part, ...] = ("decode", "prefill")
_QUICK_MINUTES = 25.0
# One row of each peer.
_QUICK_ENGINES = frozenset(PEERS) - {"ingot-onnxruntime", "llama.cpp-q4_k_m", "ik_llama.cpp-q4_k_m", "openvino-float32"}


def run_group(plan: Plan, models: Models, shape: str, threads: int, parts: Sequence[Part]) -> list[Cell]:
    """Measure all cells of a shape and thread count that are not in the output, and write each.

    Returns the cells for which no time was left.
    """
    results = ProcessorResults.of_this_machine(plan.output)
    cells = [
        cell
        for cell in cells_of(shape, threads, parts, plan.quick)
        if not (plan.resume and results.has(cell.key, models.of_part(cell.work.part).prepared))
    ]
    if not cells or plan.seconds_left <= 0:
        return cells
    batch = max(cell.work.batch for cell in cells)
    longest = max(cell.work.sequences.max_tokens for cell in cells)
    setup = plan.setup(shape, threads, batch, longest, pool_tokens(cells))
    with Engines(plan, setup, models) as engines:
        for index, cell in enumerate(cells):
            if plan.seconds_left < cell.work.budget * plan.scale:
                return cells[index:]
            begin = time.perf_counter()
            record = engines.measure(cell)
            results.put(cell.key, record)
            rates = ", ".join(f"{name} {one['median']:.1f}" for name, one in record["engines"].items())
            click.echo(f"{cell}: {rates} tokens/s; {time.perf_counter() - begin:.0f} s")
            for name, reason in record["failed"].items():
                click.echo(f"{cell}: {name} failed: {reason}", err=True)
    return []


def measure_load(plan: Plan, models: Models, shape: str, threads: int) -> dict[str, Any]:
    """Load time, first token and memory of every engine, each round in processes of their own."""
    setup = plan.setup(shape, threads, 1, _MEMORY_PROMPT.max_tokens, _MEMORY_PROMPT.max_tokens)
    rounds: dict[str, list[dict[str, Any]]] = {}
    failed: dict[str, str] = {}
    for number in range(_LOAD_ROUNDS):
        for name, model in models.prepared.items():
            if name in failed:
                continue
            try:
                with PeerProcess(PEERS[name], setup, model, plan.programs) as peer:
                    rounds.setdefault(name, []).append(_load_round(peer, computes_prompt=number == 0))
            except PeerFailed as error:
                failed[name] = str(error)
                rounds.pop(name, None)
    engines = {name: _load_record(each) | {"facts": facts_of(models.prepared[name])} for name, each in rounds.items()}
    return {"measured_at": now(), "engines": engines, "failed": failed, "missing": dict(models.missing)}


def _load_round(peer: PeerProcess, computes_prompt: bool) -> dict[str, Any]:
    loaded = read_memory(peer.pid)
    first = peer.start(_FIRST_TOKEN, seed=0)
    if computes_prompt:
        peer.decode(_MEMORY_PROMPT, 0, 16, FIGURE_SECONDS)
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
    results = ProcessorResults.of_this_machine(plan.output)
    key = {"part": "load", "shape": shape, "threads": threads}
    taking_part = models.of_part("load")
    if plan.resume and results.has(key, taking_part.prepared):
        return
    record: dict[str, Any] = key | measure_load(plan, taking_part, shape, threads)
    results.put(key, record)
    times = ", ".join(f"{name} {one['load_seconds']:.2f} s" for name, one in record["engines"].items())
    click.echo(f"{shape}, {threads} threads, load: {times}")


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
@click.option("--quick", is_flag=True, help="Decode with 1, 8 and 64 sequences, prompts of 512; one row a peer.")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="No cell begins that would end later. Default: 25 if quick.",
)
@click.option("--rounds", type=click.IntRange(min=2), default=10, show_default=True, help="At most, of a cell.")
@click.option("--scale", type=float, default=1.0, show_default=True, help="Multiplies the seconds of every cell.")
@click.option(
    "--patience", type=float, default=5.0, show_default=True, help="Seconds to wait for other processes, per figure."
)
@click.option("--prepare", "only_prepare", is_flag=True, help="Only convert the models.")
@click.option("--resume", is_flag=True, help="Keep the cells in which --output has every engine that can be prepared.")
@click.option("--work", type=click.Path(path_type=Path), default=DEFAULT_WORK, help="Checkpoints, converted models.")
@click.option("--peers-python", type=click.Path(path_type=Path), default=PEERS_VENV / "bin" / "python")
@click.option("--vllm-python", type=click.Path(path_type=Path), default=VLLM_VENV / "bin" / "python")
@click.option(
    "--ik-llama-bench", type=click.Path(path_type=Path), default=IK_LLAMA_BENCH, help="llama-bench of ik_llama.cpp."
)
@click.option("--output", type=click.Path(path_type=Path), default=DEFAULT_OUTPUT, help="Folder of the JSON files.")
@click.option("--document", type=click.Path(path_type=Path), default=DOCUMENT, help="Gets the tables of --output.")
@click.option("--readme", type=click.Path(path_type=Path), default=README, help="Gets the range over processors.")
def main(
    parts: tuple[Part, ...],
    shapes: tuple[str, ...],
    threads: tuple[int, ...],
    engines: tuple[str, ...],
    quick: bool,
    minutes: float | None,
    rounds: int,
    scale: float,
    patience: float,
    only_prepare: bool,
    resume: bool,
    work: Path,
    peers_python: Path,
    vllm_python: Path,
    ik_llama_bench: Path,
    output: Path,
    document: Path,
    readme: Path,
) -> None:
    """Measure, write the JSON and the tables."""
    programs = Programs(peers_python, vllm_python, ik_llama_bench)
    seconds = 60 * (minutes or (_QUICK_MINUTES if quick else float("inf")))
    if quick:
        engines = tuple(name for name in engines if name in _QUICK_ENGINES)
    plan = Plan(
        engines,
        rounds,
        scale,
        patience,
        work.absolute(),
        programs,
        output,
        resume,
        quick,
        deadline=float("inf"),
    )
    parts = tuple(part for part in parts if part in _QUICK_PARTS) if quick else parts
    peers, own = plan.chosen(PEERS), plan.chosen(RECIPE_ENGINES)
    with_peers = [part for part in parts if part != "recipes"] if peers else []
    models = {shape: Models.prepare(plan, shape, peers) for shape in shapes if with_peers}
    recipes = {shape: Models.prepare(plan, shape, own) for shape in shapes if own and "recipes" in parts}
    if only_prepare:
        return
    # The time of converting models does not count: --prepare does that before.
    plan = replace(plan, deadline=time.monotonic() + seconds)
    left: list[Cell] = []
    for shape in models:
        for count in threads:
            left += run_group(plan, models[shape], shape, count, [part for part in with_peers if part != "load"])
    if "load" in with_peers and plan.seconds_left > 0:
        for shape in [LOAD_SHAPE] if LOAD_SHAPE in shapes else shapes:
            run_load(plan, models[shape], shape, max(threads))
    for shape in recipes:
        for count in threads:
            left += run_group(plan, recipes[shape], shape, count, ["recipes"])
    write_tables(document, output)
    write_summary(readme, output)
    click.echo(f"written to {output}, {document} and {readme}")
    for cell in left:
        click.echo(f"no time was left for {cell}; measure it with --resume", err=True)


if __name__ == "__main__":
    main()
