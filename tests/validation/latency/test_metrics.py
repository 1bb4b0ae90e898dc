"""Percentiles, throughput, goodput and ratios of runs whose times are known."""

import pytest

from ingot.validation.latency.measurement import LatencyResult, measure_latency
from ingot.validation.latency.metrics import latency_metrics, round_ratios, summarize
from ingot.validation.options import LatencyLoad, ServiceLevel
from tests.validation.fake_subject import Clock, ClockedSubject


def _result(slo: ServiceLevel | None = None) -> LatencyResult:
    options = LatencyLoad(concurrency=(1, 2), prompt_tokens=4, output_tokens=3, requests=4, rounds=2, slo=slo)
    clock = Clock()
    candidate, baseline = ClockedSubject(clock, 1.0, prefill_steps=2), ClockedSubject(clock, 2.0, prefill_steps=2)
    return measure_latency(candidate, baseline, options, clock=clock)


def test_percentiles_throughput_and_counts_of_every_level_and_side() -> None:
    summary = {(level.level, level.side): level for level in summarize(_result())}
    assert list(summary) == [(1, "baseline"), (1, "candidate"), (2, "baseline"), (2, "candidate")]
    baseline = summary[1, "baseline"]
    assert baseline.num_requests == 8
    assert baseline.percentiles["ttft"] == {"p50": 4.0, "p90": 4.0, "p99": 4.0}
    assert baseline.percentiles["itl"] == baseline.percentiles["tpot"] == {"p50": 2.0, "p90": 2.0, "p99": 2.0}
    assert baseline.percentiles["e2e"]["p99"] == 8.0
    assert baseline.throughput == pytest.approx(3 / 8)
    assert summary[2, "candidate"].throughput == pytest.approx(2 * 3 / 4)


def test_goodput_counts_requests_within_both_objectives() -> None:
    summary = {(level.level, level.side): level.goodput for level in summarize(_result(ServiceLevel(2.0, 1.0)))}
    assert summary[1, "baseline"] == 0
    assert summary[1, "candidate"] == pytest.approx(1 / 4)
    assert summarize(_result())[0].goodput is None


def test_ratios_are_candidate_over_baseline_at_every_level() -> None:
    measured = {one.key: one for one in latency_metrics(_result())}
    assert set(measured) == {
        f"{name}_ratio@{level}" for name in ("ttft", "tpot", "e2e", "throughput") for level in (1, 2)
    }
    tpot = measured["tpot_ratio@2"]
    assert (tpot.estimate.value, tpot.estimate.low, tpot.estimate.high) == pytest.approx((0.5, 0.5, 0.5))
    assert (tpot.baseline, tpot.candidate, tpot.unit) == (2.0, 1.0, "seconds")
    assert (tpot.sample_unit, tpot.sample_size) == ("latency rounds", 2)
    assert measured["throughput_ratio@1"].estimate.value == pytest.approx(2.0)


def test_there_is_one_ratio_per_round() -> None:
    assert round_ratios(_result(), 1, "ttft") == [0.5, 0.5]
