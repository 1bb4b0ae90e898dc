"""The cost of LoRA adapters in the native engine: tokens per second with 1, 4 and 16 adapters, over those without.

    python -m benchmarks.cpu.lora                                 # the demo
    python -m benchmarks.cpu.lora ARTIFACT --rank 64 --rounds 30

Every sequence of a decode step has an adapter, which changes each projection of each layer; sequence i has adapter i
mod their number. "half" is 16 adapters for every second sequence, "none" a step without adapters while 16 are loaded.
Settings take turns within a round, so a ratio compares neighbours in time; it is the median over rounds, with a 95 %
interval. A prompt's step is measured in the same way.

Matrices are random 16-bit floats, as an adapter of a 16-bit checkpoint has them (--form float32 for 32).
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import click
import numpy as np

from benchmarks.cpu.profile_step import Step
from benchmarks.cpu.rounds import interval, order_of_round
from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from ingot.artifact import open_artifact
from ingot.artifact.programs.cpu_program import CpuProgram, Linear
from ingot.artifact.programs.cpu_program_checks import read_operations
from ingot.artifact.programs.operation_row import LANES, Matrix
from ingot.runtime.adapters import Adapter, LowRankUpdate
from ingot.runtime.cpu.native_executor import NativeExecutor
from ingot.runtime.forward_batch import FloatArray, ForwardBatch

SLOTS = 16
BATCHES = (1, 16, 32)
ADAPTERS = (1, 4, 16)
FORMS = ("bfloat16", "float32")
_CONTEXT = 128
_LAST_HALF = np.uint32(0xFFFF0000)  # of a float32's bits: those of bfloat16
_SECONDS = 0.1  # of a measurement: a number of steps


@dataclass(frozen=True)
class Figure:
    """Tokens per second of a setting: the median of all rounds, and the ratio to "none" of the same round."""

    step: str
    adapters: str
    tokens_per_second: float
    ratio: float
    ratio_interval: tuple[float, float]


def make_adapter(program: CpuProgram, rank: int, seed: int, form: str) -> Adapter:
    """A change of every linear operation but the head, of `rank` for each of the checkpoint's layers in it."""
    rng, changes = np.random.default_rng(seed), dict[str, list[LowRankUpdate]]()
    for operation in program.operations:
        if isinstance(operation, Linear) and operation.output.buffer != "logits":
            matrix = program.matrices[operation.matrix]
            changes[operation.node] = [
                LowRankUpdate("", begin, _random(rng, (rank, matrix.k), form), _random(rng, (end - begin, rank), form))
                for begin, end in pairwise(_bounds(operation, matrix))
            ]
    return Adapter(f"random {seed}", changes)


def _bounds(operation: Linear, matrix: Matrix) -> tuple[int, ...]:
    """Where the checkpoint's layers begin in an operation; of packed queries, keys and values about thirds."""
    if matrix.pairs:
        return 0, matrix.n // 2, matrix.n
    third = matrix.n // 3 // LANES * LANES
    return (0, third, 2 * third, matrix.n) if operation.node.endswith("qkv_proj") else (0, matrix.n)


def _random(rng: np.random.Generator, shape: tuple[int, int], form: str) -> FloatArray:
    values = (0.01 * rng.standard_normal(shape)).astype(np.float32)
    return values if form == "float32" else (values.view(np.uint32) & _LAST_HALF).view(np.float32)


def settings_of(batch: ForwardBatch) -> dict[str, ForwardBatch]:
    """The step with each number of adapters that its sequences can have."""
    sequences = len(batch.context_lens)
    numbers = np.arange(sequences)
    found = {"none": batch}
    for count in ADAPTERS:
        if count <= sequences:
            found[str(count)] = replace(batch, adapter_slots=(numbers % count).astype(np.int32))
    if sequences >= 2 * SLOTS:
        half = np.where(numbers % 2 == 0, numbers // 2 % SLOTS, -1).astype(np.int32)
        found["half"] = replace(batch, adapter_slots=half)
    return found


def measure(executor: NativeExecutor, name: str, batch: ForwardBatch, rounds: int) -> list[Figure]:
    """Figures of a step with each setting."""
    settings = settings_of(batch)
    counts = {setting: _steps(executor, each) for setting, each in settings.items()}
    seconds: dict[str, list[float]] = {setting: [] for setting in settings}
    for number in range(rounds):
        for setting in order_of_round(list(settings), number):
            begin = time.perf_counter()
            for _ in range(counts[setting]):
                executor.forward(settings[setting])
            seconds[setting].append((time.perf_counter() - begin) / counts[setting])
    return [_figure(name, setting, batch.num_tokens, seconds) for setting in settings]


def _steps(executor: NativeExecutor, batch: ForwardBatch) -> int:
    """Steps of a measurement."""
    begin = time.perf_counter()
    for _ in range(3):
        executor.forward(batch)
    return max(3, round(3 * _SECONDS / (time.perf_counter() - begin)))


def _figure(name: str, setting: str, tokens: int, seconds: Mapping[str, Sequence[float]]) -> Figure:
    ratios = [none / own for none, own in zip(seconds["none"], seconds[setting], strict=True)]
    return Figure(name, setting, tokens / median(seconds[setting]), median(ratios), interval(ratios))


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path), default=ROOT / "artifacts" / "demo")
@click.option("--rank", default=16, show_default=True, help="Rank of every change.")
@click.option("--form", type=click.Choice(FORMS), default=FORMS[0], show_default=True, help="What holds the numbers.")
@click.option("--prompt", default=256, show_default=True, help="Tokens of the prompt's step.")
@click.option("--rounds", default=15, show_default=True, help="Measurements of each setting.")
@click.option("--threads", type=int, help="Threads; one per core by default.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file for the figures.")
def main(
    folder: Path, rank: int, form: str, prompt: int, rounds: int, threads: int | None, output: Path | None
) -> None:
    """Measure, print and write."""
    artifact = open_artifact(folder)
    program = read_operations(artifact)
    steps = {f"batch {size}": Step(size, 1, _CONTEXT) for size in BATCHES}
    steps[f"prompt of {prompt}"] = Step(1, prompt, 0)
    blocks = sum(BATCHES) * (_CONTEXT + 1) + prompt
    executor = NativeExecutor(
        artifact,
        num_blocks=blocks // program.kv.block_tokens + SLOTS,
        max_batch_tokens=max(prompt, *BATCHES),
        num_threads=threads,
        max_adapters=SLOTS,
    )
    for slot in range(SLOTS):
        executor.load_adapter(slot, make_adapter(program, rank, slot, form))
    weight_bytes = sum(matrix.num_bytes for matrix in program.matrices.values())
    click.echo(f"{executor.kernel_version}, {executor.num_threads} threads")
    click.echo(f"an adapter takes {executor.adapter_bytes / SLOTS / weight_bytes:.1%} of the weights' bytes")
    figures = []
    for name, step in steps.items():
        for figure in measure(executor, name, step.batch(program), rounds):
            low, high = figure.ratio_interval
            click.echo(
                f"{name:14} {figure.adapters:>5} adapters {figure.tokens_per_second:12,.1f} tokens/s"
                f"   {figure.ratio:.3f} ({low:.3f} to {high:.3f})"
            )
            figures.append(asdict(figure))
    if output is not None:
        facts = {
            "device": device_facts(),
            "kernels": executor.kernel_version,
            "threads": executor.num_threads,
            "artifact": artifact.manifest.name,
            "rank": rank,
            "form": form,
            "adapter_bytes": executor.adapter_bytes // SLOTS,
            "weight_bytes": weight_bytes,
            "figures": figures,
        }
        output.write_text(json.dumps(facts, indent=2) + "\n")
    executor.close()


if __name__ == "__main__":
    main()
