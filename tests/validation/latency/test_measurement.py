"""Latency: rounds, prompts, closed loop, records and their summary."""

import gc
from dataclasses import replace

import pytest

from ingot.errors import UsageError
from ingot.progress import progress_to
from ingot.validation.latency.measurement import (
    LatencyResult,
    RequestRecord,
    closed_loop,
    garbage_collection_paused,
    measure_latency,
    prompts,
    runs_of_round,
)
from ingot.validation.latency.metrics import latency_metrics
from ingot.validation.options import LatencyLoad
from tests.validation.fake_subject import Clock, ClockedSubject

OPTIONS = LatencyLoad(concurrency=(1, 2), prompt_tokens=4, output_tokens=3, requests=4, rounds=2)


def test_the_times_of_a_request_follow_their_definitions() -> None:
    record = RequestRecord(submitted=1.0, token_seconds=(1.5, 1.7, 2.1))
    assert record.ttft == 0.5
    assert record.e2e == pytest.approx(1.1)
    assert record.tpot == pytest.approx((1.1 - 0.5) / 2)
    assert record.itl == pytest.approx((0.2, 0.4))


def test_a_closed_loop_keeps_its_concurrency_and_replaces_finished_requests() -> None:
    clock = Clock(100.0)
    subject = ClockedSubject(clock, step_seconds=1.0, prefill_steps=2)
    records = closed_loop(subject, [[1], [2], [3]], output_tokens=2, concurrency=2, clock=clock)
    assert subject.most_in_flight == 2
    assert [record.submitted for record in records] == [0.0, 0.0, 3.0]
    assert [record.token_seconds for record in records] == [(2.0, 3.0), (2.0, 3.0), (5.0, 6.0)]


def test_both_engines_get_the_same_prompts_and_warm_up_is_not_counted() -> None:
    clock = Clock()
    candidate, baseline = ClockedSubject(clock, 1.0), ClockedSubject(clock, 2.0)
    result = measure_latency(candidate, baseline, OPTIONS, clock=clock)
    assert sorted(candidate.prompts) == sorted(baseline.prompts)
    assert len(result.runs) == 8
    counted = sum(len(run.requests) for run in result.runs)
    assert counted == 8 * 4
    assert len(candidate.prompts) + len(baseline.prompts) == counted + 2 * (1 + 2)


def test_every_record_has_the_clock_s_times() -> None:
    clock = Clock()
    result = measure_latency(ClockedSubject(clock, 1.0), ClockedSubject(clock, 2.0), OPTIONS, clock=clock)
    tpots = {run.run.side: {request.tpot for request in run.requests} for run in result.runs}
    assert tpots == {"candidate": {1.0}, "baseline": {2.0}}


def test_progress_counts_warm_up_and_runs() -> None:
    clock = Clock()
    seen: list[tuple[str, int, int]] = []
    subject = ClockedSubject(clock, 1.0)
    with progress_to(lambda *event: seen.append(event)):
        measure_latency(subject, subject, OPTIONS, clock)
    assert seen == [("latency", done, 12) for done in range(13)]


def test_a_request_longer_than_the_context_is_refused() -> None:
    subject = ClockedSubject(Clock(), 1.0, context_tokens=6)
    message = r"prompt_tokens \+ output_tokens is 7, but the candidate's context is limited to 6"
    with pytest.raises(UsageError, match=message):
        measure_latency(subject, subject, OPTIONS)


def test_the_garbage_collector_is_off_during_the_block() -> None:
    assert gc.isenabled()
    with garbage_collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_garbage_collector_is_on_again_after_an_error() -> None:
    with pytest.raises(RuntimeError), garbage_collection_paused():
        raise RuntimeError
    assert gc.isenabled()


def test_runs_alternate_baseline_first_then_candidate_first() -> None:
    options = LatencyLoad(concurrency=(1,))
    runs = [(run.round, run.level, run.side) for number in range(3) for run in runs_of_round(options, number)]
    assert runs == [
        (0, 1, "baseline"),
        (0, 1, "candidate"),
        (1, 1, "candidate"),
        (1, 1, "baseline"),
        (2, 1, "baseline"),
        (2, 1, "candidate"),
    ]


def test_every_round_has_both_engines_at_every_level() -> None:
    options = LatencyLoad(concurrency=(1, 8))
    runs = [run for number in range(4) for run in runs_of_round(options, number)]
    assert len(runs) == len(set(runs)) == 16


def test_prompts_depend_on_the_seed_and_differ_by_round() -> None:
    options = LatencyLoad(prompt_tokens=5, requests=3)
    assert prompts(options, 100, 0, 1) == prompts(options, 100, 0, 1)
    assert prompts(options, 100, 0, 1) != prompts(options, 100, 1, 1)
    assert [len(prompt) for prompt in prompts(options, 100, 0, 1)] == [5, 5, 5]
    assert all(0 <= token < 100 for prompt in prompts(options, 100, 0, 1) for token in prompt)


def test_there_are_enough_requests_to_fill_the_concurrency() -> None:
    assert len(prompts(LatencyLoad(requests=3), 100, 0, 8)) == 8


def test_rounds_are_added_until_the_gates_are_decided() -> None:
    clock, asked = Clock(), list[int]()
    subject = ClockedSubject(clock, 1.0)

    def is_decided(result: LatencyResult) -> bool:
        asked.append(result.num_rounds)
        return result.num_rounds >= 8

    options = replace(OPTIONS, max_seconds=1000)
    seen: list[tuple[str, int, int]] = []
    with progress_to(lambda *event: seen.append(event)):
        result = measure_latency(subject, subject, options, clock, is_decided=is_decided)
    assert asked == [2, 4, 8]
    assert result.stop is not None
    assert (result.num_rounds, result.stop.looks, len(result.runs)) == (8, 3, 8 * 4)
    assert seen[-1] == ("more latency rounds", 16, 16)
    [one, *_] = latency_metrics(result)
    assert (one.sample_size, one.estimate.method) == (8, "t over items, log scale, 99.38% at look 3")


def test_no_round_is_added_when_the_time_is_over_and_the_progress_ends() -> None:
    clock, seen = Clock(), list[tuple[str, int, int]]()
    subject = ClockedSubject(clock, 1.0)
    one_round = 4 * 3 * (1 + 1 / 2) * 2  # seconds: 12 steps alone and 6 in pairs, on both sides
    options = replace(OPTIONS, max_seconds=3.5 * one_round)
    with progress_to(lambda *event: seen.append(event)):
        result = measure_latency(subject, subject, options, clock, is_decided=lambda result: False)
    assert result.num_rounds == 3
    assert (seen[-1][1], seen[-1][0]) == (seen[-1][2], "more latency rounds")


def test_without_gates_the_rounds_are_fixed_and_their_intervals_have_95_percent() -> None:
    clock = Clock()
    result = measure_latency(ClockedSubject(clock, 1.0), ClockedSubject(clock, 2.0), OPTIONS, clock=clock)
    assert result.num_rounds == 2
    assert result.confidence == pytest.approx(0.95)
    assert latency_metrics(result)[0].estimate.method == "t over items, log scale"
