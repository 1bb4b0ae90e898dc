"""The order of measurements, their number, and intervals."""

from benchmarks.cpu.rounds import another_round, interval, order_of_round

from tests.each_case import each_case


def test_every_second_round_runs_backwards() -> None:
    names = ["a", "b", "c"]
    assert [order_of_round(names, index) for index in range(3)] == [names, ["c", "b", "a"], names]


@each_case(
    ("done", "spent_seconds", "expected"),
    [
        (0, 0.0, True),
        (1, 9.0, True),  # two rounds, one in each direction ...
        (1, 10.0, False),  # ... unless one takes the whole time
        (2, 6.0, True),
        (2, 7.0, False),  # a third of 3.5 seconds would take longer
        (5, 1.0, False),
    ],
)
def test_rounds_end_within_the_time(done: int, spent_seconds: float, expected: bool) -> None:
    assert another_round(done, spent_seconds, max_rounds=5, budget_seconds=10.0) is expected


def test_an_interval_contains_the_median_and_grows_with_the_spread() -> None:
    narrow, wide = interval([1.0, 1.01, 0.99] * 10), interval([1.0, 1.5, 0.5] * 10)
    assert narrow[0] <= 1.0 <= narrow[1]
    assert wide[1] - wide[0] >= narrow[1] - narrow[0]
    assert interval([2.0] * 5) == (2.0, 2.0)
