"""Predicted serving next to measured: an artifact serves slices of traces, and a simulation predicts the same.

    python -m benchmarks.cpu.simulation --traces ../shared/data/traces [--artifact artifacts/demo]

The step model is fitted to steps of another load, which is served first: a term for each step, row, prompt token,
attended token and token in context, none negative (planning/fitting.py). Then each trace is served in real time, with
lengths scaled to the model's context, and simulated with the predicted times. Fed with the measured times instead, the
simulation makes the same batches; that is asserted too.

Twelve configurations of the engine serve one load more, and are ranked by what is measured and by what is predicted
(Kendall's tau). A 95 % interval of a step is the step model's, and one of a figure of a run is from the simulations
with all steps longer, and shorter, by its relative error; `covered` is the share with the measured value inside.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
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


def calibrate(engine: Engine, seed: int) -> tuple[StepModel, float]:
    """Fit a step model to a load of random lengths; also the rate at which it was served."""
    sizes = RequestSizes(prompt_tokens=120, output_tokens=30)
    load = list(
        parse_traffic(
            "at-once", sizes=sizes, count=CALIBRATION_REQUESTS, context_tokens=engine.model.context_tokens, seed=seed
        )
    )
    run = record(engine, load)
    measured = [
        MeasuredStep(each.shape, seconds) for each, seconds in zip(run.steps, run.seconds, strict=True) if seconds > 0
    ]
    terms = [Term(count, (Use("overhead", count, 1.0),)) for count in COUNTS]
    return fit_steps(terms, measured, "a load that was served before"), len(load) / sum(run.seconds)


def simulate(
    engine: Engine, load: Sequence[TimedRequest], times: Any, **options: Any
) -> tuple[Outcomes, list[StepRecord]]:
    """Serve a load with predicted or measured times."""
    limits = LIMITS | options
    shape = EngineShape(
        kv=engine._executor.kv_geometry,
        num_blocks=limits["kv_blocks"],
        max_batch_tokens=limits["max_batch_tokens"],
        max_sequences=limits["max_sequences"],
        context_tokens=engine.model.context_tokens,
        vocab_size=engine.model.vocab_size,
    )
    steps: list[StepRecord] = []
    replica = Replica(shape, times, EngineOptions(**limits), observe=lambda batch: steps.append(StepRecord.of(batch)))
    return Outcomes.of(serve(replica, load)), steps


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


def compare(
    engine: Engine, load: Sequence[TimedRequest], run: RecordedRun, model: StepModel, **options: Any
) -> Comparison:
    """Compare a run with its predictions: with the step model, and with steps shorter and longer by its error."""
    factors = (1.0, max(0.01, 1 - model.relative_error), 1 + model.relative_error)
    predicted, faster, slower = (
        figures(
            simulate(
                engine, load, replace(model, parts=tuple(scaled(each, factor) for each in model.parts)), **options
            )[0]
        )
        for factor in factors
    )
    intervals = {
        name: (min(value, faster[name], slower[name]), max(value, faster[name], slower[name]))
        for name, value in predicted.items()
    }
    return Comparison(figures(Outcomes.of(run.ended)), predicted, intervals)


def covered_steps(model: StepModel, run: RecordedRun) -> list[bool]:
    """Return whether each measured step is in the interval of its prediction."""
    found = []
    for each, seconds in zip(run.steps, run.seconds, strict=True):
        low, high = model.interval(each.shape)
        found.append(low <= seconds <= high)
    return found


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the rank correlation of two orders, from -1 to 1; a tie counts for neither (tau-a)."""
    pairs = list(combinations(range(len(one)), 2))
    signs = (np.sign(one[i] - one[j]) * np.sign(other[i] - other[j]) for i, j in pairs)
    return float(sum(signs)) / len(pairs)


def rank(
    artifact: Artifact, model: StepModel, requests: int, seed: int
) -> tuple[dict[str, Any], list[bool], list[bool]]:
    """Serve one load with each configuration; return the ranks, and what intervals of figures and steps cover."""
    found: list[Comparison] = []
    steps: list[bool] = []
    for options in CONFIGURATIONS:
        with Engine.load(artifact, **LIMITS | options) as engine:
            sizes = RequestSizes(prompt_tokens=120, output_tokens=30)
            context = engine.model.context_tokens
            load = list(parse_traffic("at-once", sizes=sizes, count=requests, context_tokens=context, seed=seed + 1))
            run = record(engine, load)
            found.append(compare(engine, load, run, model, **options))
            steps += covered_steps(model, run)
    taus = {
        name: kendall_tau([each.measured[name] for each in found], [each.predicted[name] for each in found])
        for name in RANKED_BY
    }
    runs = [options | each.as_json for options, each in zip(CONFIGURATIONS, found, strict=True)]
    return {"kendall_tau": taus, "runs": runs}, [each for one in found for each in one.covered], steps


def measure(
    artifact: Artifact, folder: Path, trace: Trace, requests: int, model: StepModel
) -> tuple[dict[str, Any], list[bool], list[bool]]:
    """Serve and simulate one trace; return its figures, and what intervals of figures and steps cover."""
    with Engine.load(artifact, **LIMITS) as engine:
        load = list(
            parse_traffic(
                str(folder / trace.file),
                count=requests,
                context_tokens=engine.model.context_tokens,
                scale=trace.scale,
                speed=trace.speed,
            )
        )
        run = record(engine, load)
        compared = compare(engine, load, run, model)
        _, steps = simulate(engine, load, MeasuredTimes(run.seconds))
    assert steps == run.steps, "the batches differ"
    step_errors = [
        model.seconds(each.shape) / seconds - 1 for each, seconds in zip(run.steps, run.seconds, strict=True)
    ]
    facts = {
        "steps": len(run.steps),
        "same_batches": True,
        "median_step_error": float(np.median(np.abs(step_errors))),
    }
    return facts | compared.as_json, compared.covered, covered_steps(model, run)


def share(values: Iterable[bool]) -> float:
    """Return the share of true values."""
    return float(np.mean(list(values)))


@click.command(help=__doc__)
@click.option("--artifact", type=click.Path(path_type=Path), default=ROOT / "artifacts/demo")
@click.option("--traces", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--requests", default=120, show_default=True, help="Of each trace.")
@click.option("--seed", default=1, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/simulation.json")
def main(artifact: Path, traces: Path, requests: int, seed: int, output: Path) -> None:
    """Measure, print and write."""
    opened = open_artifact(artifact)
    with Engine.load(opened, **LIMITS) as engine:
        model, rate = calibrate(engine, seed)
    ranking, covered, steps = rank(opened, model, requests, seed)
    runs = {}
    for trace in TRACES:
        runs[trace.file], more_covered, more_steps = measure(opened, traces, trace, requests, model)
        covered, steps = covered + more_covered, steps + more_steps
    found = {
        "calibration_requests_per_second": rate,
        "relative_error": model.relative_error,
        "covered": {"steps": share(steps), "figures": share(covered)},
        "traces": runs,
        "ranking": ranking,
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
