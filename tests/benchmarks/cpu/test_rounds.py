"""The order of measurements, their summary, the table and its ratios."""

import io
import json

import pytest
from benchmarks.cpu.rounds import (
    Result,
    Scenario,
    Spread,
    another_round,
    bandwidth_share,
    make_table,
    order_of_round,
    ratio_to,
    scenarios,
)
from rich.console import Console

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


DECODED = Scenario("decode", batch=1, prompt_tokens=32, new_tokens=65)


def result(peer: str, tokens_per_second: float, disturbed: int = 0) -> Result:
    return Result("small", 2, DECODED, peer, Spread.of([tokens_per_second]), disturbed, 10**8, bandwidth=20e9)


def test_a_ratio_compares_medians_and_is_none_for_what_was_not_measured() -> None:
    results = [result("ingot", 150.0), result("llama.cpp", 100.0)]
    assert ratio_to(results, "ingot", "llama.cpp") == 1.5
    assert ratio_to(results, "ingot", "genai") is None


def test_the_table_shows_the_best_of_ours_beside_each_peer_and_a_dash_for_one_left_out() -> None:
    results = [result("ingot", 150.0), result("ingot-b128", 200.0), result("llama.cpp", 100.0, disturbed=1)]
    console = Console(width=240, file=io.StringIO(), record=True)
    table = make_table(results, ["ingot", "ingot-b128", "llama.cpp", "genai"], ours=["ingot", "ingot-b128"])
    console.print(table)
    (row,) = [line for line in console.export_text().splitlines() if "small" in line]
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    assert cells == [
        "small",
        "2",
        "decode, batch 1",
        "150.0 (150.0 to 150.0) 75%",
        "200.0 (200.0 to 200.0) 100%",
        "100.0 (100.0 to 100.0)* 50%",
        "-",
        "2.00",
        "-",
    ]


def test_a_record_can_be_written_as_json() -> None:
    record = json.loads(json.dumps(result("ingot", 150.0).record()))
    assert record["bandwidth_share"] == 0.75
    assert record["scenario"]["phase"] == "decode"
    assert record["tokens_per_second"]["median"] == 150.0
