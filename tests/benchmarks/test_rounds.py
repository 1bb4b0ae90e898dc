"""What is measured in which order, and what the figures come to."""

import pytest
from benchmarks.rounds import Scenario, Spread, another_round, bandwidth_share, order_of_round, scenarios

DECODE = Scenario("decode", batch=8, prompt_tokens=32, new_tokens=65)
PREFILL = Scenario("prefill", batch=8, prompt_tokens=512, new_tokens=1)


def test_every_second_round_runs_backwards() -> None:
    names = ["a", "b", "c"]
    assert [order_of_round(names, index) for index in range(3)] == [names, ["c", "b", "a"], names]


def test_the_first_new_token_belongs_to_the_prefill() -> None:
    assert DECODE.counted_tokens == 8 * 64
    assert PREFILL.counted_tokens == 8 * 512


def test_every_phase_is_measured_at_every_batch_size() -> None:
    found = [(scenario.phase, scenario.batch) for scenario in scenarios([1, 8], prompt_tokens=512, new_tokens=65)]
    assert found == [("decode", 1), ("decode", 8), ("prefill", 1), ("prefill", 8)]


def test_a_warm_up_is_short_and_keeps_phase_and_batch() -> None:
    assert PREFILL.warm_up == Scenario("prefill", batch=8, prompt_tokens=32, new_tokens=1)
    assert DECODE.warm_up == Scenario("decode", batch=8, prompt_tokens=32, new_tokens=4)


@pytest.mark.parametrize(
    ("done", "spent_seconds", "expected"),
    [(0, 0.0, True), (1, 1000.0, True), (2, 9.0, True), (2, 11.0, False), (5, 1.0, False)],
)
def test_rounds_go_on_within_the_time_but_there_are_always_two(done: int, spent_seconds: float, expected: bool) -> None:
    assert another_round(done, spent_seconds, max_rounds=5, budget_seconds=10.0) is expected


def test_a_spread_holds_the_median_and_both_ends() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=3.0, rounds=3)


def test_a_decode_step_reads_the_weights_once_for_all_sequences() -> None:
    # 80 tokens a second at batch 8 are 10 steps a second, each reading 1 GB, of 20 GB/s
    assert bandwidth_share(DECODE, 80.0, weight_bytes=10**9, bandwidth=20e9) == pytest.approx(0.5)


def test_prefill_has_no_share_of_the_bandwidth() -> None:
    assert bandwidth_share(PREFILL, 80.0, weight_bytes=10**9, bandwidth=20e9) is None
