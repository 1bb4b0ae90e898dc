"""Continuous, static and dynamic batching under a Poisson load: throughput and latency of each.

    python -m benchmarks.cpu.batching                        # a simulated engine: seconds of a clock that steps advance
    python -m benchmarks.cpu.batching --artifact artifacts/demo --requests 60 --load 0.8

The load is the same for every policy: requests arrive at random (exponential times between arrivals), prompts and
outputs have lengths from a log-normal distribution, as those of chats do. Its rate is a share of what continuous
batching serves when all requests are there from the start, so that 1.0 keeps an engine just busy.

The simulation runs the real scheduler, blocks and step loop; a step takes a fixed time, a time for each sequence in it
and a time for each token, chosen to resemble a small model on two cores. Nothing in it depends on this machine. With an
artifact, the same load is served in real time.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import click
from rich.console import Console
from rich.table import Table
from tests.simulators.fake_executor import FakeExecutor

from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from ingot.artifact import open_artifact
from ingot.runtime import Engine, ForwardBatch, SamplingParams
from ingot.runtime.forward_batch import FloatArray
from ingot.runtime.scheduling_policy import Batching, SchedulingPolicy
from ingot.runtime.steps.metrics import HistogramSnapshot

POLICIES: tuple[Batching, ...] = get_args(Batching)
MAX_SEQUENCES = 16
CONTEXT_TOKENS = 512


@dataclass(frozen=True)
class StepTime:
    """Seconds that a simulated step takes."""

    fixed: float = 3e-3
    per_sequence: float = 0.1e-3
    per_token: float = 0.25e-3

    def of(self, batch: ForwardBatch) -> float:
        """Duration of one step."""
        return self.fixed + self.per_sequence * len(batch.context_lens) + self.per_token * batch.num_tokens


class SimulatedTime:
    """A clock that steps and sleeping advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance."""
        self.now += seconds


class SimulatedExecutor(FakeExecutor):
    """Takes simulated time for each step."""

    def __init__(self, clock: SimulatedTime, step_time: StepTime) -> None:
        super().__init__(
            num_blocks=MAX_SEQUENCES * CONTEXT_TOKENS // 16, max_batch_tokens=256, context_tokens=CONTEXT_TOKENS
        )
        self._clock, self._step_time = clock, step_time

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """As FakeExecutor's, in simulated time."""
        self._clock.sleep(self._step_time.of(batch))
        return super().forward(batch)


@dataclass(frozen=True)
class Arrival:
    """One request of the load."""

    seconds: float
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Figures:
    """Throughput and times of one policy, in seconds; `ttft` from arrival to the first token, `e2e` to the last."""

    policy: str
    load: float
    output_tokens_per_second: float
    mean_batch: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    e2e_p50: float
    e2e_p99: float


def make_load(count: int, requests_per_second: float, vocab_size: int, seed: int) -> list[Arrival]:
    """Random requests; a rate of 0 has all of them arrive at once."""
    rng = random.Random(seed)
    load, now = [], 0.0
    for _ in range(count):
        prompt = [rng.randrange(vocab_size) for _ in range(_length(rng, 60, 200))]
        load.append(Arrival(now, prompt, _length(rng, 50, 200)))
        now += rng.expovariate(requests_per_second) if requests_per_second else 0.0
    return load


def _length(rng: random.Random, median: int, most: int) -> int:
    return max(4, min(most, round(median * rng.lognormvariate(0, 0.8))))


def serve(
    engine: Engine, load: Sequence[Arrival], clock: Callable[[], float], sleep: Callable[[float], object]
) -> float:
    """Serve the load; returns the seconds that it took."""
    started, waiting = clock(), list(reversed(load))
    while waiting or engine.has_unfinished():
        now = clock() - started
        while waiting and waiting[-1].seconds <= now:
            arrival = waiting.pop()
            params = SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True)
            engine.add(arrival.prompt, params, arrival_seconds=started + arrival.seconds)
        if engine.has_unfinished():
            engine.step()
        elif waiting:
            sleep(waiting[-1].seconds - now)
    return clock() - started


def measure(
    open_engine: Callable[[SchedulingPolicy], Engine], batching: Batching, load: list[Arrival], share: float
) -> Figures:
    """Figures of one policy under one load."""
    with open_engine(SchedulingPolicy(batching=batching)) as engine:
        seconds = serve(engine, load, engine.clock, engine._loop.sleep)
        found = engine.metrics()
    decoded = found.output_tokens / max(1, found.num_steps)
    ttft, itl, e2e = (_p50_p99(each) for each in (found.ttft_seconds, found.itl_seconds, found.e2e_seconds))
    return Figures(batching, share, found.output_tokens / seconds, decoded, *ttft, *itl, *e2e)


def _p50_p99(histogram: HistogramSnapshot) -> tuple[float, float]:
    return histogram.quantile(0.5) or 0.0, histogram.quantile(0.99) or 0.0


def simulated_engine(policy: SchedulingPolicy) -> Engine:
    """An engine whose steps take simulated time."""
    clock = SimulatedTime()
    engine = Engine(SimulatedExecutor(clock, StepTime()), max_sequences=MAX_SEQUENCES, policy=policy, clock=clock)
    engine._loop.sleep = clock.sleep
    return engine


def artifact_engine(path: Path) -> Callable[[SchedulingPolicy], Engine]:
    """Engines of one artifact."""
    artifact = open_artifact(path)

    def load(policy: SchedulingPolicy) -> Engine:
        return Engine.load(artifact, max_sequences=MAX_SEQUENCES, batching=policy.batching)

    return load


def show(found: Sequence[Figures]) -> None:
    """Print a table."""
    table = Table("policy", "load", "tokens/s", "tokens/step", "TTFT p50/p99 s", "ITL p50/p99 ms", "E2E p50/p99 s")
    for each in found:
        table.add_row(
            each.policy,
            f"{each.load:.2f}",
            f"{each.output_tokens_per_second:.0f}",
            f"{each.mean_batch:.1f}",
            f"{each.ttft_p50:.2f} / {each.ttft_p99:.2f}",
            f"{each.itl_p50 * 1e3:.1f} / {each.itl_p99 * 1e3:.1f}",
            f"{each.e2e_p50:.2f} / {each.e2e_p99:.2f}",
        )
    Console(width=120).print(table)


@click.command(help=__doc__)
@click.option("--artifact", type=click.Path(path_type=Path), help="Serve in real time instead of simulating.")
@click.option("--requests", default=400, show_default=True, help="Requests of one load.")
@click.option("--load", "loads", multiple=True, type=float, default=(0.5, 0.8, 0.95), show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/batching.json")
def main(artifact: Path | None, requests: int, loads: tuple[float, ...], seed: int, output: Path) -> None:
    """Measure the capacity, then every policy at shares of it."""
    open_engine = artifact_engine(artifact) if artifact else simulated_engine
    with open_engine(SchedulingPolicy()) as engine:
        vocab_size = engine.model.vocab_size
        seconds = serve(engine, make_load(requests, 0, vocab_size, seed), engine.clock, engine._loop.sleep)
    capacity = requests / seconds
    click.echo(f"capacity: {capacity:.2f} requests/s")
    found = []
    for share in loads:
        load = make_load(requests, share * capacity, vocab_size, seed)
        found += [measure(open_engine, batching, load, share) for batching in POLICIES]
    show(found)
    facts = {
        "device": device_facts() if artifact else "simulated",
        "measured_at": time.strftime("%Y-%m-%d", time.gmtime()),
        "artifact": artifact.name if artifact else None,
        "step_time": None if artifact else asdict(StepTime()),
        "requests": requests,
        "capacity_requests_per_second": capacity,
        "results": [asdict(each) for each in found],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
