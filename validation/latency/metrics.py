"""Summary of the runs of a latency measurement: percentiles per engine, and paired ratios of candidate to baseline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ingot.validation.latency.measurement import LatencyResult, RequestRecord, RunRecord
from ingot.validation.options import ServiceLevel
from ingot.validation.statistics import (
    CONFIDENCE,
    Measured,
    mean_interval,
    percentiles,
    proportion_interval,
    ratio_interval,
)

PERCENTILES = (50, 90, 99)
_SIDES = ("baseline", "candidate")
_SECONDS: dict[str, Callable[[RequestRecord], float]] = {
    "ttft": lambda request: request.ttft,
    "tpot": lambda request: request.tpot,
    "e2e": lambda request: request.e2e,
}


@dataclass(frozen=True)
class LevelSummary:
    """One engine at one concurrency, over all rounds.

    percentiles   {"ttft" | "tpot" | "itl" | "e2e": {"p50" | "p90" | "p99": seconds}}
    throughput    output tokens per second
    goodput       requests per second that met the objective; None without an objective
    """

    level: int
    side: str
    num_requests: int
    percentiles: dict[str, dict[str, float]]
    throughput: float
    goodput: float | None


def summarize(result: LatencyResult) -> list[LevelSummary]:
    """One summary per level and side, the baseline first."""
    levels, slo = result.options.concurrency, result.options.slo
    pairs = [(level, side) for level in levels for side in _SIDES]
    return [_summary(level, side, select(result, level, side), slo) for level, side in pairs]


def select(result: LatencyResult, level: int, side: str) -> list[RunRecord]:
    """The runs of one engine at one level, by round."""
    return [record for record in result.runs if (record.run.level, record.run.side) == (level, side)]


def request_values(runs: Sequence[RunRecord], name: str) -> list[float]:
    """ "ttft", "tpot", "e2e" (one per request) or "itl" (one per gap) of all runs, in seconds."""
    requests = [request for run in runs for request in run.requests]
    if name == "itl":
        return [gap for request in requests for gap in request.itl]
    return [_SECONDS[name](request) for request in requests]


def latency_metrics(result: LatencyResult) -> list[Measured]:
    """The metrics ttft_ratio, tpot_ratio, e2e_ratio (of medians) and throughput_ratio at every level.

    With an objective also goodput and slo.
    """
    found = []
    for level in result.options.concurrency:
        found += [_ratio(result, level, name) for name in (*_SECONDS, "throughput")]
        if slo := result.options.slo:
            found += [_goodput(result, level, slo), _kept_share(result, level, slo)]
    return found


def round_ratios(result: LatencyResult, level: int, name: str) -> list[float]:
    """Candidate over baseline, one ratio per round: of medians over requests, or of throughputs."""
    values = [[_run_value(run, name) for run in select(result, level, side)] for side in ("candidate", "baseline")]
    return [candidate / baseline for candidate, baseline in zip(*values, strict=True)]


def _run_value(run: RunRecord, name: str) -> float:
    if name == "throughput":
        return run.output_tokens / run.seconds
    return float(np.median(request_values([run], name)))


def _pooled(runs: Sequence[RunRecord], name: str) -> float:
    if name == "throughput":
        return sum(run.output_tokens for run in runs) / sum(run.seconds for run in runs)
    return float(np.median(request_values(runs, name)))


def _ratio(result: LatencyResult, level: int, name: str) -> Measured:
    estimate = ratio_interval(np.log(round_ratios(result, level, name)), result.confidence)
    if result.stop and result.confidence > CONFIDENCE:
        level_text = f"{result.confidence:.2%} at look {result.stop.looks}"
        estimate = replace(estimate, method=f"{estimate.method}, {level_text}")
    return Measured(
        metric=f"{name}_ratio",
        estimate=estimate,
        baseline=_pooled(select(result, level, "baseline"), name),
        candidate=_pooled(select(result, level, "candidate"), name),
        unit="tokens/s" if name == "throughput" else "seconds",
        level=level,
        sample_unit="latency rounds",
        sample_size=result.num_rounds,
    )


def _goodput(result: LatencyResult, level: int, slo: ServiceLevel) -> Measured:
    baseline, candidate = ([_met_rate([run], slo) for run in select(result, level, side)] for side in _SIDES)
    estimate = mean_interval(candidate, result.confidence)
    return Measured(
        metric="goodput",
        estimate=replace(estimate, low=max(0.0, estimate.low)),
        baseline=sum(baseline) / len(baseline),
        candidate=estimate.value,
        unit="requests/s",
        level=level,
        sample_unit="latency rounds",
        sample_size=result.num_rounds,
    )


def _kept_share(result: LatencyResult, level: int, slo: ServiceLevel) -> Measured:
    """Share of requests that kept the objective; requests of one round are one cluster."""
    sides = [select(result, level, side) for side in _SIDES]
    baseline, candidate = ([_num_kept([run], slo) for run in runs] for runs in sides)
    counts = [len(run.requests) for run in sides[1]]
    estimate = proportion_interval(candidate, counts, result.confidence)
    return Measured(
        metric="slo",
        estimate=estimate,
        baseline=sum(baseline) / sum(len(run.requests) for run in sides[0]),
        candidate=estimate.value,
        level=level,
        sample_unit="latency rounds",
        sample_size=result.num_rounds,
        details=_exceeded_limits(sides[1], slo),
    )


def _exceeded_limits(runs: Sequence[RunRecord], slo: ServiceLevel) -> tuple[str, ...]:
    """A line for each limit that requests exceed, the farthest first: how many, and by how much."""
    found = []
    for name, limit in slo.limits.items():
        values = request_values(runs, name)
        exceeding = sum(value > limit for value in values)
        if exceeding:
            median, worst = (percentiles(values, PERCENTILES)[key] for key in ("p50", "p99"))
            line = (
                f"{name.upper()} is above latency.slo.{name}_seconds ({limit:g} s) in {exceeding} of {len(values)}"
                f" requests: median {median:.3g} s, 99th percentile {worst:.3g} s, {worst / limit:.2f} times the limit"
            )
            found.append((worst / limit, line))
    return tuple(line for _, line in sorted(found, reverse=True))


def _num_kept(runs: Sequence[RunRecord], slo: ServiceLevel) -> int:
    """Requests that kept all limits of the objective."""
    requests = [request for run in runs for request in run.requests]
    return sum(all(_SECONDS[name](one) <= limit for name, limit in slo.limits.items()) for one in requests)


def _met_rate(runs: Sequence[RunRecord], slo: ServiceLevel) -> float:
    """Requests per second that kept the objective."""
    return _num_kept(runs, slo) / sum(run.seconds for run in runs)


def _summary(level: int, side: str, runs: list[RunRecord], slo: ServiceLevel | None) -> LevelSummary:
    requests = [request for run in runs for request in run.requests]
    return LevelSummary(
        level=level,
        side=side,
        num_requests=len(requests),
        percentiles={name: percentiles(request_values(runs, name), PERCENTILES) for name in (*_SECONDS, "itl")},
        throughput=_pooled(runs, "throughput"),
        goodput=_met_rate(runs, slo) if slo else None,
    )
