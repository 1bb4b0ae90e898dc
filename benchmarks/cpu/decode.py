"""Tokens per second of Ingot, llama.cpp and onnxruntime-genai at 4 bits, side by side on this machine's CPU.

    python -m benchmarks.cpu.setup_peers     # once: a virtual environment with the peers
    python -m benchmarks.cpu.decode

Weights are random, so nothing is downloaded and quality is not measured. Every engine gets the same prompts, the same
number of new tokens, greedily, and the same threads; loading, tokenizing and detokenizing are left out; the first token
counts as prefill. An engine that cannot run is named with the reason and left out.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console

from benchmarks.adapters.base import Setup
from benchmarks.cpu.machine import measure_read_bandwidth, other_cores, read_times
from benchmarks.cpu.rounds import Result, Scenario, Spread, another_round, make_table, order_of_round, scenarios
from benchmarks.device import available_cores, device_facts
from benchmarks.paths import ROOT
from benchmarks.peers import DEFAULT_WORK, PEERS, PEERS_VENV, PeerFailed, PeerProcess, tokens_per_second
from benchmarks.shapes import SHAPES
from benchmarks.synthetic import write_checkpoint

# After a measurement an engine's threads spin for some milliseconds; the next one waits until they sleep.
_SETTLE_SECONDS = 0.1
# Cores that others may use before a measurement counts as disturbed: ticks are coarse, and a system is never idle.
_NOISE = 0.15


@dataclass(frozen=True)
class Figure:
    """One measurement: tokens per second, and how many cores other processes kept busy meanwhile.

    is_quiet  whether the engine had as many cores to itself as it has threads
    """

    tokens_per_second: float
    other_cores: float
    is_quiet: bool


@dataclass(frozen=True)
class Plan:
    """Options of the command line."""

    peers: tuple[str, ...]
    scenarios: tuple[Scenario, ...]
    max_rounds: int
    budget_seconds: float
    patience_seconds: float
    work_folder: Path
    peers_python: Path

    def setup(self, shape: str, threads: int) -> Setup:
        """The setup of every engine."""
        most = max(scenario.prompt_tokens + scenario.new_tokens for scenario in self.scenarios)
        return Setup(
            checkpoint=self.work_folder / shape / "checkpoint",
            work_folder=self.work_folder / shape,
            threads=threads,
            max_batch=max(scenario.batch for scenario in self.scenarios),
            max_tokens=most,
        )


def run_shape(plan: Plan, shape: str, threads: int, versions: dict[str, object]) -> Iterator[Result]:
    """Start the engines on one shape, measure every scenario, and yield the results; fills `versions`."""
    write_checkpoint(SHAPES[shape], plan.work_folder / shape / "checkpoint")
    bandwidth = measure_read_bandwidth(threads)
    click.echo(f"{shape}, {threads} threads: memory reads at {bandwidth / 1e9:.1f} GB/s")
    with ExitStack() as stack:
        running: dict[str, PeerProcess] = {}
        for name in plan.peers:
            try:
                running[name] = stack.enter_context(
                    PeerProcess(PEERS[name], plan.setup(shape, threads), plan.peers_python)
                )
            except PeerFailed as error:
                click.echo(f"{shape}: {PEERS[name].label} is left out: {error}", err=True)
        versions |= {name: asdict(peer.facts) for name, peer in running.items()}
        for scenario in plan.scenarios:
            for name, figures in measure_rounds(running, scenario, plan).items():
                facts = running[name].facts
                spread = Spread.of([figure.tokens_per_second for figure in figures])
                disturbed = sum(not figure.is_quiet for figure in figures)
                yield Result(shape, threads, scenario, name, spread, disturbed, facts.weight_bytes, bandwidth)


def measure_rounds(running: dict[str, PeerProcess], scenario: Scenario, plan: Plan) -> dict[str, list[Figure]]:
    """Tokens per second of every engine, round by round, in alternating order."""
    for peer in running.values():
        peer.measure(scenario.warm_up, seed=0)
    figures: dict[str, list[Figure]] = {name: [] for name in running}
    begin, done = time.perf_counter(), 0
    while running and another_round(done, time.perf_counter() - begin, plan.max_rounds, plan.budget_seconds):
        for name in order_of_round(list(running), done):
            figures[name].append(measure_quietly(running[name], scenario, 1 + done, plan.patience_seconds))
        done += 1
    click.echo(f"  {scenario}, {done} rounds, tokens/s: {_summary(figures)}")
    return figures


def measure_quietly(peer: PeerProcess, scenario: Scenario, seed: int, patience_seconds: float) -> Figure:
    """Measure, and repeat while other processes use the engine's cores, until the patience ends; keep the calmest."""
    tries: list[Figure] = []
    begin = time.perf_counter()
    while not tries or (not tries[-1].is_quiet and time.perf_counter() - begin < patience_seconds):
        time.sleep(_SETTLE_SECONDS)
        before = read_times(peer.pid)
        timing = peer.measure(scenario, seed)
        others = other_cores(before, read_times(peer.pid))
        tries.append(Figure(tokens_per_second(scenario, timing), others, is_quiet=others <= peer.spare_cores + _NOISE))
    return min(tries, key=lambda figure: figure.other_cores)


def _summary(figures: dict[str, list[Figure]]) -> str:
    parts = []
    for name, values in figures.items():
        disturbed = sum(not figure.is_quiet for figure in values)
        median = Spread.of([figure.tokens_per_second for figure in values]).median
        parts.append(f"{name} {median:.1f}" + (f" ({disturbed} disturbed)" if disturbed else ""))
    return ", ".join(parts)


def write_json(path: Path, results: Sequence[Result], versions: dict[str, object]) -> None:
    """Device, versions and every figure."""
    content = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_facts(),
        "engines": versions,
        "results": [result.record() for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


@click.command(help=__doc__)
@click.option("--shape", "shapes", multiple=True, type=click.Choice(list(SHAPES)), help="Default: all.")
@click.option("--peer", "peers", multiple=True, type=click.Choice(list(PEERS)), help="Default: all.")
@click.option("--threads", multiple=True, type=click.IntRange(min=1), help="Default: 1, and all cores.")
@click.option("--batch", "batches", multiple=True, type=click.IntRange(min=1), default=(1, 8), show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="For prefill.")
@click.option("--new-tokens", type=click.IntRange(min=2), default=65, show_default=True, help="For decode.")
@click.option("--rounds", type=click.IntRange(min=2), default=6, show_default=True, help="At most.")
@click.option("--seconds", type=float, default=45.0, show_default=True, help="Time after which no round begins.")
@click.option(
    "--patience", type=float, default=5.0, show_default=True, help="Seconds to wait for other processes, per figure."
)
@click.option("--work", type=click.Path(path_type=Path), default=DEFAULT_WORK, help="Checkpoints, converted models.")
@click.option("--peers-python", type=click.Path(path_type=Path), default=PEERS_VENV / "bin" / "python")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/cpu-decode.json"
)
def main(
    shapes: tuple[str, ...],
    peers: tuple[str, ...],
    threads: tuple[int, ...],
    batches: tuple[int, ...],
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    seconds: float,
    patience: float,
    work: Path,
    peers_python: Path,
    json_path: Path,
) -> None:
    """Measure, print the table, write the JSON."""
    wanted = tuple(scenarios(batches, prompt_tokens, new_tokens))
    plan = Plan(peers or tuple(PEERS), wanted, rounds, seconds, patience, work, peers_python)
    results: list[Result] = []
    versions: dict[str, object] = {}
    for shape in shapes or tuple(SHAPES):
        for count in threads or sorted({1, available_cores()}):
            results += run_shape(plan, shape, count, versions)
    if not results:
        raise click.ClickException("no engine could be measured; see the reasons above")
    write_json(json_path, results, versions)
    ours = [name for name in plan.peers if PEERS[name].runs_in == "this"]
    Console(width=None if Console().is_terminal else 220).print(make_table(results, plan.peers, ours))
    click.echo(f"written to {json_path}")


if __name__ == "__main__":
    main()
