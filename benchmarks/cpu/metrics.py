"""Cost of the metrics: nanoseconds for a token, a step and a request, and for a snapshot and its text.

    python -m benchmarks.cpu.metrics

Each figure is the least of interleaved rounds, less that of an empty loop: other processes only add time.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import click
from tests.simulators.fake_executor import FakeExecutor

from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from ingot.runtime import Engine, SamplingParams, prometheus_text
from ingot.runtime.steps.metrics import MetricsRegistry
from ingot.runtime.steps.service_rates import Served, ServingRates

ROUNDS = 15


def actions() -> dict[str, tuple[Callable[[int], object], int]]:
    """A function to measure, called with the number of the repetition, and the repetitions of a round."""
    registry, rates = MetricsRegistry(), ServingRates()
    rates.resume(0.0)
    with Engine(FakeExecutor()) as engine:
        completion = engine.generate([1, 2, 3], SamplingParams(max_tokens=8))
        metrics = engine.metrics()
    observe = registry.itl_seconds.observe

    def step(number: int) -> None:
        registry.count(64)
        rates.record(Served(64.0 * number, number, number), number * 0.01)

    return {
        "empty loop": (lambda number: None, 20_000),
        "token, same time as the one before": (lambda number: observe(0.025), 20_000),
        "token, another time": (lambda number: observe(0.001 * (number % 97)), 20_000),
        "step": (step, 20_000),
        "end of a request": (lambda number: registry.finish(completion), 5_000),
        "snapshot of the registry": (lambda number: registry.snapshot(), 500),
        "Prometheus text": (lambda number: prometheus_text(metrics), 20),
    }


def nanoseconds(action: Callable[[int], object], repeats: int) -> float:
    """Time of one call."""
    started = time.perf_counter_ns()
    for number in range(repeats):
        action(number)
    return (time.perf_counter_ns() - started) / repeats


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/metrics.json")
def main(output: Path) -> None:
    """Measure, print and write."""
    measured = actions()
    rounds = [{name: nanoseconds(*measured[name]) for name in measured} for _ in range(ROUNDS)]
    least = {name: min(each[name] for each in rounds) for name in measured}
    empty = least.pop("empty loop")
    found = {name: round(figure - empty) for name, figure in least.items()}
    for name, figure in found.items():
        click.echo(f"{name:40} {figure:>10,} ns")
    output.write_text(json.dumps({"device": device_facts(), "nanoseconds": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
