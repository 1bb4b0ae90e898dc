"""Time and peak memory of GPTQ and AWQ: Ingot, gptqmodel and llm-compressor, each in a process of its own.

    python -m benchmarks.quantizers.setup_packages     # once: a virtual environment for each package
    python -m benchmarks.quantizers.speed

Weights and calibration tokens are random, in the shape of SmolLM2-135M: only the cost is measured, from the checkpoint
on disk to the quantized one on disk, without imports. Run it on a quiet machine; the packages take minutes. `--layers`
shortens the model for a quick run, and the result says so.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import numpy as np

from benchmarks.adapters.base import random_prompts
from benchmarks.adapters.quantizing import Outcome
from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from benchmarks.peers import DEFAULT_WORK, PeerFailed
from benchmarks.quantizers.runs import VENVS, Case, Peer, job_of, run_adapter
from benchmarks.shapes import SHAPES, ModelShape
from benchmarks.synthetic import write_checkpoint

INGOT = "Ingot"
# The same algorithm by three tools, each with its defaults.
METHODS: dict[str, tuple[Peer, ...]] = {
    "GPTQ": (
        Peer(INGOT, "ingot_quantizer", "GPTQ", True, is_ours=True),
        Peer("gptqmodel", "gptqmodel", "gptq", True),
        Peer("llm-compressor", "llm_compressor", "gptq", True),
    ),
    "AWQ": (
        Peer(INGOT, "ingot_quantizer", "AWQ", False, is_ours=True),
        Peer("gptqmodel", "gptqmodel", "awq", False),
        Peer("llm-compressor", "llm_compressor", "awq", False),
    ),
}
TOOLS = tuple(peer.label for peer in METHODS["GPTQ"])
_MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Cost:
    """A row of the table; `failure` is the reason why there are no figures."""

    method: str
    tool: str
    outcome: Outcome | None = None
    failure: str = ""


def measure(case: Case, methods: Sequence[str], tools: Sequence[str], venvs: Path) -> Iterator[Cost]:
    """Run one tool after the other; what a run writes is deleted."""
    for method in methods:
        for peer in METHODS[method]:
            if peer.label in tools:
                yield run_once(method, peer, case, venvs)


def run_once(method: str, peer: Peer, case: Case, venvs: Path) -> Cost:
    """Run a process to its end."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return Cost(method, peer.label, run_adapter(peer, job_of(peer, case, Path(folder) / "checkpoint"), venvs))
        except PeerFailed as error:
            return Cost(method, peer.label, failure=str(error))


def table(costs: Sequence[Cost]) -> str:
    """Markdown; ratios are a tool's figure over Ingot's for the same method."""
    ours = {cost.method: cost.outcome for cost in costs if cost.tool == INGOT}
    lines = ["| method | tool | seconds | CPU seconds | peak MiB | times Ingot's seconds | times its memory |"]
    lines.append("|---|---|---|---|---|---|---|")
    return "\n".join([*lines, *(_line(cost, ours.get(cost.method)) for cost in costs)])


def _line(cost: Cost, ours: Outcome | None) -> str:
    if cost.outcome is None:
        return f"| {cost.method} | {cost.tool} | {cost.failure} | | | | |"
    one = cost.outcome
    ratios = f"{one.seconds / ours.seconds:.2f} | {one.peak_bytes / ours.peak_bytes:.2f}" if ours else " | "
    figures = f"{one.seconds:.1f} | {one.cpu_seconds:.1f} | {one.peak_bytes / _MEBIBYTE:.0f}"
    return f"| {cost.method} | {cost.tool} | {figures} | {ratios} |"


def shape_of(name: str, layers: int | None) -> ModelShape:
    """The shape, cut to this many layers."""
    shape = SHAPES[name]
    return shape if layers is None else replace(shape, name=f"{name}-{layers}-layers", num_layers=layers)


def prepare(shape: ModelShape, sequences: int, sequence_tokens: int, work: Path) -> tuple[Path, Path]:
    """The checkpoint, and the file of calibration tokens."""
    checkpoint = write_checkpoint(shape, work / shape.name / "checkpoint")
    file = work / shape.name / f"tokens-{sequences}x{sequence_tokens}.npy"
    np.save(file, random_prompts(sequences, sequence_tokens, shape.vocab_size, seed=0))
    return checkpoint, file


@click.command(help=__doc__)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="smollm2-135m", show_default=True)
@click.option("--layers", type=click.IntRange(min=1), help="Default: all of the shape's.")
@click.option("--sequences", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--sequence-tokens", type=click.IntRange(min=2), default=512, show_default=True)
@click.option("--bits", type=click.Choice([3, 4]), default=4, show_default=True)
@click.option("--group-size", default=64, show_default=True, help="SmolLM2's width 576 is not a multiple of 128.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--method", "methods", multiple=True, type=click.Choice(list(METHODS)), help="Default: all.")
@click.option("--tool", "tools", multiple=True, type=click.Choice(TOOLS), help="Default: all.")
@click.option("--work", type=click.Path(path_type=Path), default=DEFAULT_WORK, help="Checkpoints.")
@click.option("--venvs", type=click.Path(path_type=Path), default=VENVS, help="The packages' environments.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/quantizer-speed.json"
)
def main(
    shape: str,
    layers: int | None,
    sequences: int,
    sequence_tokens: int,
    bits: int,
    group_size: int,
    threads: int,
    methods: tuple[str, ...],
    tools: tuple[str, ...],
    work: Path,
    venvs: Path,
    json_path: Path,
) -> None:
    """Measure, print the table, write the JSON."""
    made = shape_of(shape, layers)
    checkpoint, file = prepare(made, sequences, sequence_tokens, work)
    case = Case(checkpoint, file, bits, group_size, threads=threads)
    costs: list[Cost] = []
    for cost in measure(case, methods or tuple(METHODS), tools or TOOLS, venvs):
        click.echo(f"{cost.method}, {cost.tool}: {cost.outcome or cost.failure}", err=True)
        costs.append(cost)
    click.echo(table(costs))
    facts = {"sequences": sequences, "sequence_tokens": sequence_tokens, "bits": bits, "group_size": group_size}
    document = {"device": device_facts(), "shape": asdict(made), **facts, "threads": threads}
    json_path.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(cost) for cost in costs]
    json_path.write_text(json.dumps({**document, "costs": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
