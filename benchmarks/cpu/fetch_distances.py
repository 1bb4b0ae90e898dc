"""Decode speed by how far ahead few rows fetch the weights: as the kernels do, everywhere the same, as tried at load.

    python -m benchmarks.cpu.fetch_distances

One thread; the engines take turns, each with weights in huge pages of its own. The ratio is to the kernels' own
distance (usual), of tokens per second in one round.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from unittest.mock import patch

import click

from benchmarks.cpu.machine import measure_read_bandwidth
from benchmarks.cpu.rounds import interval, order_of_round
from benchmarks.device import device_facts
from benchmarks.kv.synthetic_artifacts import synthetic_artifact
from benchmarks.paths import RESULTS
from benchmarks.shapes import SHAPES
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.cpu.native import program
from ingot.runtime.cpu.native.fetch_ahead import DISTANCES, choose_distances
from ingot.runtime.cpu.native.kernels import Kernels
from ingot.runtime.cpu.native.structures import LinearOperation
from ingot.runtime.engine.engine import Engine

_PROMPT_TOKENS = 64
_Choose = Callable[[Kernels, Sequence[LinearOperation]], None]


def everywhere(distance: int) -> _Choose:
    """Return what sets one distance for all matrices."""

    def choose(_: Kernels, operations: Sequence[LinearOperation]) -> None:
        for operation in operations:
            operation.matrix.contents.fetch_ahead = distance

    return choose


WAYS: dict[str, _Choose] = {
    **{f"{distance} bytes" if distance else "usual": everywhere(distance) for distance in DISTANCES},
    "tried": choose_distances,
}


def decode_rate(engine: Engine, rows: int, steps: int) -> float:
    """Tokens per second of `rows` sequences that decode together: the time of one token is left out."""
    prompts = [list(range(row + 1, row + 1 + _PROMPT_TOKENS)) for row in range(rows)]
    seconds = []
    for tokens in (1, 1, 1 + steps):
        begin = time.perf_counter()
        engine.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
        seconds.append(time.perf_counter() - begin)
    return rows * steps / (seconds[2] - seconds[1])


@click.command(help=__doc__)
@click.option("--shape", "shapes", multiple=True, default=("smollm2-135m", "tinyllama-1.1b"), show_default=True)
@click.option("--rows", default="1,2,4,8", show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--seconds", default=0.4, show_default=True, help="Of a case in a round, about.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "cpu-fetch-distances.json")
def main(shapes: tuple[str, ...], rows: str, rounds: int, seconds: float, output: Path) -> None:
    """Measure, print and write the result."""
    read = measure_read_bandwidth(1)
    facts: dict[str, object] = {"device": device_facts(), "read_bandwidth": round(read / 1e9, 1), "rounds": rounds}
    for shape in shapes:
        artifact, engines = synthetic_artifact(SHAPES[shape], "int4-cpu", context_tokens=2048), dict[str, Engine]()
        for name, choose in WAYS.items():
            with patch.object(program, "choose_distances", choose):
                engines[name] = Engine.load(artifact, num_threads=1, weights="copied")
        cases: dict[str, object] = {}
        for count in map(int, rows.split(",")):
            steps = max(4, int(seconds * decode_rate(engines["usual"], count, 4) / count))
            rates: dict[str, list[float]] = {name: [] for name in engines}
            for number in range(rounds):
                for name in order_of_round([*engines], number):
                    rates[name].append(decode_rate(engines[name], count, steps))
            cases[str(count)] = {
                name: {
                    "tokens_per_second": round(median(found), 1),
                    "ratio": round(median(ratios := [a / b for a, b in zip(found, rates["usual"], strict=True)]), 3),
                    "interval": [round(bound, 3) for bound in interval(ratios)],
                }
                for name, found in rates.items()
            }
            click.echo(f"{shape}, {count} rows: {json.dumps(cases[str(count)])}")
        facts[shape] = cases
        for engine in engines.values():
            engine.close()
    output.write_text(json.dumps(facts, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
