"""Predicted serving next to measured: an artifact serves slices of traces, and a simulation predicts the same.

    python -m benchmarks.cpu.simulation --traces ../shared/data/traces [--artifact artifacts/demo]

Everything is served once a round, one after the other, so that what other processes and virtual machines take meets all
alike; a measured step is its mean over the rounds, a measured figure the median. The step model is fitted to steps of
another load: a term for each step, row, prompt token, attended token and token in context, none negative
(planning/fitting.py). Each trace is served in real time, with lengths scaled to the model's context, and simulated with
the predicted times. Fed with the measured times instead, the simulation makes the same batches; that is asserted too.

Twelve configurations of the engine serve one load more, and are ranked by what is measured and by what is predicted
(Kendall's tau). `kendall_tau_of_rounds` is that of two rounds, on average: how well a measurement ranks the next one. A
95 % interval of a step is the step model's, and one of a figure of a run is from the simulations with all steps longer,
and shorter, by its relative error; `covered` is the share with the measured value inside.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
import numpy as np
from tests.planning.simulation.recorded_run import MeasuredTimes, RecordedRun, record

from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from ingot.artifact import Artifact, open_artifact
from ingot.planning.fitting import MeasuredStep, fit_steps, scaled
from ingot.planning.simulation.figures import Outcomes, Quantiles
from ingot.planning.simulation.replica import Replica, TimedRequest, serve
from ingot.planning.simulation.simulated_executor import EngineShape, StepRecord
from ingot.planning.simulation.traffic import RequestSizes, parse_traffic
from ingot.planning.step_model import Count, StepModel, Term, Use
from ingot.runtime import Engine
from ingot.runtime.options import EngineOptions

LIMITS: dict[str, Any] = {"kv_blocks": 256, "max_batch_tokens": 256, "max_sequences": 16}
COUNTS: tuple[Count, ...] = ("steps", "num_sequences", "prefill_tokens", "prefill_context_tokens", "context_tokens")
CALIBRATION_REQUESTS = 60
RANKED_BY = ("output_tokens_per_second", "e2e_p50", "ttft_p90")
CONFIGURATIONS: tuple[dict[str, Any], ...] = tuple(
    {"batching": batching, "max_sequences": max_sequences, "max_batch_tokens": max_batch_tokens}
    for batching in ("continuous", "static")
    for max_sequences in (2, 6, 16)
    for max_batch_tokens in (64, 256)
)


@dataclass(frozen=True)
class Trace:
    """A file, and how it is sent: lengths and speed that the demo model bears on two cores."""

    file: str
    scale: float
    speed: float


TRACES = (
    Trace("conversation_trace.jsonl", 1 / 32, 4.0),
    Trace("azure2023-code.csv", 1 / 16, 4.0),
)


@dataclass
class Served:
    """A load, the engine's options, and its runs, one a round."""

    artifact: Artifact
    load: Sequence[TimedRequest]
    options: dict[str, Any]
    runs: list[RecordedRun] = field(default_factory=list)

    @classmethod
    def of(cls, artifact: Artifact, source: str, options: dict[str, Any] | None = None, **traffic: Any) -> "Served":
        """Read a load whose lengths fit the model."""
        context = artifact.manifest.model.context_tokens
        return cls(artifact, list(parse_traffic(source, context_tokens=context, **traffic)), LIMITS | (options or {}))

    def serve(self) -> None:
        """Serve the load once more, with an engine of its own."""
        with Engine.load(self.artifact, **self.options) as engine:
            self.runs.append(record(engine, self.load))

    @property
    def measured(self) -> dict[str, float]:
        """Each figure's median over the rounds."""
        found = [figures(Outcomes.of(run.ended)) for run in self.runs]
        return {name: median(each[name] for each in found) for name in found[0]}

    @property
    def steps(self) -> list[MeasuredStep]:
        """The steps of the last round with their mean seconds, or with its own where rounds made other batches."""
        last = self.runs[-1]
        alike = [run.seconds for run in self.runs if run.steps == last.steps]
        means = (fmean(each) for each in zip(*alike, strict=True))
        return [MeasuredStep(one.shape, seconds) for one, seconds in zip(last.steps, means, strict=True) if seconds > 0]


def fit(calibration: Served) -> StepModel:
    """Fit a step model to a load that was served in every round."""
    terms = [Term(count, (Use("overhead", count, 1.0),)) for count in COUNTS]
    return fit_steps(terms, calibration.steps, "a load that was served before")


def simulate(served: Served, times: Any) -> tuple[Outcomes, list[StepRecord]]:
    """Serve a load with predicted or measured times."""
    limits, model = served.options, served.artifact.manifest.model
    shape = EngineShape(
        kv=served.artifact.manifest.kv,
        num_blocks=limits["kv_blocks"],
        max_batch_tokens=limits["max_batch_tokens"],
        max_sequences=limits["max_sequences"],
        context_tokens=model.context_tokens,
        vocab_size=model.vocab_size,
    )
    steps: list[StepRecord] = []
    replica = Replica(shape, times, EngineOptions(**limits), observe=lambda batch: steps.append(StepRecord.of(batch)))
    return Outcomes.of(serve(replica, served.load)), steps


def figures(outcomes: Outcomes) -> dict[str, float]:
    """Return quantiles of TTFT and end-to-end time in seconds, and output tokens a second."""
    found: dict[str, float] = {}
    for name in ("ttft", "e2e"):
        times = Quantiles.of(getattr(outcomes, name))
        found |= {f"{name}_{share}": getattr(times, share) for share in ("p50", "p90")}
    seconds = outcomes.finish_seconds - min(outcomes.arrivals)
    return found | {"output_tokens_per_second": outcomes.counts["output_tokens"] / seconds}


@dataclass(frozen=True)
class Comparison:
    """Figures of one run by name, measured and predicted, and the 95 % intervals of the predicted ones."""

    measured: dict[str, float]
    predicted: dict[str, float]
    intervals: dict[str, tuple[float, float]]

    @property
    def as_json(self) -> dict[str, Any]:
        """Errors relative to the measured figures, and the figures."""
        errors = {name: value / self.measured[name] - 1 for name, value in self.predicted.items()}
        return {**errors, "measured": self.measured, "intervals": self.intervals}

    @property
    def covered(self) -> list[bool]:
        """Return whether each measured figure is in its interval."""
        return [low <= self.measured[name] <= high for name, (low, high) in self.intervals.items()]


def compare(served: Served, model: StepModel) -> Comparison:
    """Compare runs with their predictions: with the step model, and with steps shorter and longer by its error."""
    factors = (1.0, max(0.01, 1 - model.relative_error), 1 + model.relative_error)
    models = (replace(model, parts=tuple(scaled(each, factor) for each in model.parts)) for factor in factors)
    predicted, faster, slower = (figures(simulate(served, each)[0]) for each in models)
    intervals = {
        name: (min(value, faster[name], slower[name]), max(value, faster[name], slower[name]))
        for name, value in predicted.items()
    }
    return Comparison(served.measured, predicted, intervals)


def covered_steps(model: StepModel, served: Served) -> list[bool]:
    """Return whether each measured step is in the interval of its prediction."""
    return [low <= one.seconds <= high for one in served.steps for low, high in [model.interval(one.step)]]


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the rank correlation of two orders, from -1 to 1; a tie counts for neither (tau-a)."""
    pairs = list(combinations(range(len(one)), 2))
    signs = (np.sign(one[i] - one[j]) * np.sign(other[i] - other[j]) for i, j in pairs)
    return float(sum(signs)) / len(pairs)


def rank(served: Sequence[Served], found: Sequence[Comparison]) -> dict[str, Any]:
    """Return the rank correlations of configurations by measurement and prediction, and of one round and another."""
    taus, of_rounds = {}, {}
    rounds = [[figures(Outcomes.of(run.ended)) for run in each.runs] for each in served]
    for name in RANKED_BY:
        taus[name] = kendall_tau([each.measured[name] for each in found], [each.predicted[name] for each in found])
        pairs = combinations(zip(*rounds, strict=True), 2)
        of_rounds[name] = fmean(
            kendall_tau([each[name] for each in one], [each[name] for each in other]) for one, other in pairs
        )
    runs = [options | each.as_json for options, each in zip(CONFIGURATIONS, found, strict=True)]
    return {"kendall_tau": taus, "kendall_tau_of_rounds": of_rounds, "runs": runs}


def measure(served: Served, model: StepModel, compared: Comparison) -> dict[str, Any]:
    """Return the figures of a trace, whose simulation with measured times makes the same batches in every round."""
    for run in served.runs:
        assert simulate(served, MeasuredTimes(run.seconds))[1] == run.steps, "the batches differ"
    errors = [abs(model.seconds(one.step) / one.seconds - 1) for one in served.steps]
    facts = {"steps": len(served.runs[-1].steps), "same_batches": True, "median_step_error": median(errors)}
    return facts | compared.as_json


def share(values: Iterable[bool]) -> float:
    """Return the share of true values."""
    return float(np.mean(list(values)))


@click.command(help=__doc__)
@click.option("--artifact", type=click.Path(path_type=Path), default=ROOT / "artifacts/demo")
@click.option("--traces", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--requests", default=120, show_default=True, help="Of each trace.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=2))
@click.option("--seed", default=1, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/simulation.json")
def main(artifact: Path, traces: Path, requests: int, rounds: int, seed: int, output: Path) -> None:
    """Measure, print and write."""
    opened, sizes = open_artifact(artifact), RequestSizes(prompt_tokens=120, output_tokens=30)
    calibration = Served.of(opened, "at-once", sizes=sizes, count=CALIBRATION_REQUESTS, seed=seed)
    configured = [
        Served.of(opened, "at-once", options, sizes=sizes, count=requests, seed=seed + 1) for options in CONFIGURATIONS
    ]
    traced = [
        Served.of(opened, str(traces / one.file), count=requests, scale=one.scale, speed=one.speed) for one in TRACES
    ]
    Served(opened, calibration.load, LIMITS).serve()  # what the first run of a process adds counts nowhere
    for _ in range(rounds):
        for each in (calibration, *configured, *traced):
            each.serve()
    model = fit(calibration)
    compared = [compare(each, model) for each in (*configured, *traced)]
    found = {
        "rounds": rounds,
        "relative_error": model.relative_error,
        "covered": {
            "steps": share(one for each in (*configured, *traced) for one in covered_steps(model, each)),
            "figures": share(one for each in compared for one in each.covered),
        },
        "traces": {
            trace.file: measure(each, model, one)
            for trace, each, one in zip(TRACES, traced, compared[len(configured) :], strict=True)
        },
        "ranking": rank(configured, compared[: len(configured)]),
    }
    click.echo(json.dumps(found, indent=2))
    facts = {
        "device": device_facts(),
        "measured_at": time.strftime("%Y-%m-%d", time.gmtime()),
        "artifact": artifact.name,
    }
    output.write_text(json.dumps({**facts, **found}, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
