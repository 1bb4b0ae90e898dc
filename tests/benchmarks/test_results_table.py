"""The table and the ratios that it shows."""

import io
import json

from benchmarks.results_table import Result, make_table, ratio_to
from benchmarks.rounds import Scenario, Spread
from rich.console import Console

DECODE = Scenario("decode", batch=1, prompt_tokens=32, new_tokens=65)


def result(peer: str, tokens_per_second: float, disturbed: int = 0) -> Result:
    return Result("small", 2, DECODE, peer, Spread.of([tokens_per_second]), disturbed, 10**8, bandwidth=20e9)


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
