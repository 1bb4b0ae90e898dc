import pytest

from ingot.errors import UsageError
from ingot.validation.workload import LatencyOptions, ServiceLevel, prompts, schedule


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
