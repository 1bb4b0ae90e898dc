""" """

import gc

import pytest

from ingot.errors import UsageError
from ingot.progress import progress_to
from ingot.validation.latency import (
    LatencyOptions,
    RequestRecord,
    ServiceLevel,
    closed_loop,
    garbage_collection_paused,
    measure_latency,
    prompts,
    schedule,
)
from tests.validation.fake_subject import Clock, ClockedSubject

OPTIONS = LatencyOptions(concurrency=(1, 2), prompt_tokens=4, output_tokens=3, requests=4, rounds=2)


def test_the_times_of_a_request_follow_their_definitions() -> None:
    record = RequestRecord(submitted=1.0, token_seconds=(1.5, 1.7, 2.1))
    assert record.ttft == 0.5
    assert record.e2e == pytest.approx(1.1)
    assert record.tpot == pytest.approx((1.1 - 0.5) / 2)
    assert record.itl == pytest.approx((0.2, 0.4))


def test_a_closed_loop_keeps_so_many_in_flight_and_replaces_the_finished() -> None:
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


def test_a_slower_clock_shows_in_every_record() -> None:
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
    with pytest.raises(UsageError, match="prompt_tokens \\+ output_tokens is 7, the candidate's context holds 6"):
        measure_latency(subject, subject, OPTIONS)


def test_the_garbage_collector_rests_and_comes_back() -> None:
    assert gc.isenabled()
    with garbage_collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_garbage_collector_comes_back_after_an_error() -> None:
    with pytest.raises(RuntimeError), garbage_collection_paused():
        raise RuntimeError
    assert gc.isenabled()


def test_runs_alternate_baseline_first_then_candidate_first() -> None:
    runs = [(run.round, run.level, run.side) for run in schedule(LatencyOptions(concurrency=(1,), rounds=3))]
    assert runs == [
        (0, 1, "baseline"),
        (0, 1, "candidate"),
        (1, 1, "candidate"),
        (1, 1, "baseline"),
        (2, 1, "baseline"),
        (2, 1, "candidate"),
    ]


def test_every_round_has_both_engines_at_every_level() -> None:
    runs = list(schedule(LatencyOptions(concurrency=(1, 8), rounds=4)))
    assert len(runs) == len(set(runs)) == 16


def test_prompts_are_the_same_for_the_same_seed_and_new_in_every_round() -> None:
    options = LatencyOptions(prompt_tokens=5, requests=3)
    assert prompts(options, 100, 0, 1) == prompts(options, 100, 0, 1)
    assert prompts(options, 100, 0, 1) != prompts(options, 100, 1, 1)
    assert [len(prompt) for prompt in prompts(options, 100, 0, 1)] == [5, 5, 5]
    assert all(0 <= token < 100 for prompt in prompts(options, 100, 0, 1) for token in prompt)


def test_there_are_enough_requests_to_fill_the_concurrency() -> None:
    assert len(prompts(LatencyOptions(requests=3), 100, 0, 8)) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": ()}, r"concurrency is \[\]"),
        ({"concurrency": (0,)}, r"levels of 1 or more"),
        ({"concurrency": (2, 2)}, "names a level twice"),
        ({"output_tokens": 1}, "output_tokens is 1; it must be 2 or more"),
        ({"rounds": 1}, "rounds is 1; it must be 2 or more"),
        ({"requests": 0}, "requests is 0"),
    ],
)
def test_a_load_that_measures_nothing_is_refused(options: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LatencyOptions(**options)  # type: ignore[arg-type]


def test_an_objective_of_no_time_is_refused() -> None:
    with pytest.raises(UsageError, match="tpot_seconds is 0"):
        ServiceLevel(ttft_seconds=1.0, tpot_seconds=0)
