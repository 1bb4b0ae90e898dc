"""Percentiles, throughput, goodput and ratios of runs whose times are known."""

import pytest

from ingot.errors import GateFailed, GateUndecided
from ingot.validation.gates import GateSpec, decide, raise_for
from ingot.validation.latency.measurement import LatencyResult, measure_latency
from ingot.validation.latency.metrics import latency_metrics, round_ratios, summarize
from ingot.validation.options import LatencyLoad, ServiceLevel
from tests.validation.fake_subject import Clock, ClockedSubject


def _result(slo: ServiceLevel | None = None, rounds: int = 2) -> LatencyResult:
    options = LatencyLoad(concurrency=(1, 2), prompt_tokens=4, output_tokens=3, requests=4, rounds=rounds, slo=slo)
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


def test_goodput_is_a_metric_where_there_is_an_objective() -> None:
    measured = {one.key: one for one in latency_metrics(_result(ServiceLevel(2.0, 1.0)))}
    goodput = measured["goodput@1"]
    assert (goodput.baseline, goodput.candidate, goodput.unit) == (0.0, goodput.estimate.value, "requests/s")
    assert goodput.estimate.value > 0
    assert goodput.estimate.low >= 0
    (outcome,) = decide([GateSpec("goodput@1", "min", 1e-3)], measured)
    assert outcome.verdict in ("PASS", "UNDECIDED")
    (outcome,) = decide([GateSpec("goodput@1", "min", 1e3)], measured)
    assert outcome.verdict == "FAIL"


def test_the_share_that_keeps_an_objective_decides_and_says_which_limit_it_misses() -> None:
    spec = GateSpec("slo", "min", 0.95)
    measured = {
        one.key: one for one in latency_metrics(_result(ServiceLevel(ttft_seconds=1.6, e2e_seconds=4.0), rounds=5))
    }
    share = measured["slo@2"]
    assert (share.baseline, share.candidate) == (0.0, 0.0)
    outcomes = decide([spec], measured)
    assert [(one.name, one.verdict) for one in outcomes] == [("slo@1", "FAIL"), ("slo@2", "FAIL")]
    with pytest.raises(GateFailed) as failed:
        raise_for(outcomes, measured)
    assert "TTFT is above latency.slo.ttft_seconds (1.6 s) in 20 of 20 requests: median 2 s" in str(failed.value)
    assert "1.25 times the limit" in str(failed.value)
    assert "E2E" not in str(failed.value)


def test_a_few_requests_that_all_keep_an_objective_do_not_prove_a_high_share() -> None:
    measured = {one.key: one for one in latency_metrics(_result(ServiceLevel(e2e_seconds=100.0)))}
    share = measured["slo@1"].estimate
    assert (share.value, share.high) == (1.0, 1.0)
    assert share.low < 0.95
    outcomes = decide([GateSpec("slo@1", "min", 0.95)], measured)
    with pytest.raises(GateUndecided, match=r"About \d+ latency rounds instead of 2 might decide it\."):
        raise_for(outcomes, measured)


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
