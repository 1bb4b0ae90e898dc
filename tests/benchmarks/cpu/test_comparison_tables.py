"""Ratios, shares and goals of cells, and the tables that are made from them."""

from pathlib import Path
from typing import Any

import click
import pytest
from benchmarks.cpu.cells import WORK, Cell
from benchmarks.cpu.comparison_results import DEFAULT_OUTPUT, PartResults
from benchmarks.cpu.comparison_tables import (
    BEGIN,
    DOCUMENT,
    END,
    Comparison,
    bandwidth_share,
    bandwidths,
    compare,
    render,
    write_tables,
)

from tests.each_case import each_case

DECODE, PREFILL = (next(work for work in WORK if work.part == part) for part in ("decode", "prefill"))
BANDWIDTH = 20e9


def engine(*rates: float, weight_bytes: int = 10**8) -> dict[str, Any]:
    facts = {"weight_bytes": weight_bytes, "kv_token_bytes": 10**6, "versions": {"package": "1.2"}, "notes": "notes"}
    return {
        "median": sorted(rates)[len(rates) // 2],
        "best": max(rates),
        "cpu_seconds_per_1000_tokens": 12.34,
        "disturbed_rounds": 0,
        "rounds": [{"tokens_per_second": rate} for rate in rates],
        "facts": facts,
    }


def record(work: Any = DECODE, failed: dict[str, str] | None = None, **engines: dict[str, Any]) -> dict[str, Any]:
    names = {"native": "ingot-native", "onnx": "ingot-onnxruntime", "llama": "llama.cpp-q4_0"}
    key = Cell("smollm2-135m", 1, work).key
    found = {names.get(name, name): each for name, each in engines.items()}
    day = "2026-01-02T03:04:05+00:00"
    return key | {"measured_at": day, "bandwidth": BANDWIDTH, "engines": found, "failed": failed or {}}


def test_the_faster_of_ours_is_compared_with_the_fastest_peer_round_by_round() -> None:
    found = compare(
        record(
            native=engine(20.0, 30.0, 24.0),
            onnx=engine(5.0, 5.0, 5.0),
            llama=engine(10.0, 10.0, 16.0),
            genai=engine(9, 9, 9),
        )
    )
    assert found is not None
    assert (found.ours, found.theirs, found.ratio) == ("ingot-native", "llama.cpp-q4_0", 2.0)
    assert (found.low, found.high) == (1.5, 3.0)


def test_attention_in_bfloat16_is_compared_with_a_peer_that_attends_in_it_and_with_no_other() -> None:
    ours = {"native": engine(30.0), "ingot-native-bfloat16": engine(40.0)}
    found = compare(record(**ours, openvino=engine(20.0), llama=engine(10.0)))
    assert found is not None
    assert (found.ours, found.ratio) == ("ingot-native-bfloat16", 2.0)
    found = compare(record(**ours, openvino=engine(5.0), llama=engine(10.0)))
    assert found is not None
    assert (found.ours, found.ratio) == ("ingot-native", 3.0)


def test_without_ours_or_without_a_peer_nothing_is_compared() -> None:
    assert compare(record(llama=engine(1.0))) is None
    assert compare(record(native=engine(1.0))) is None


def test_a_decode_step_reads_the_weights_once_and_the_keys_and_values_of_every_sequence() -> None:
    # 64 cached tokens of 1 MB and 100 MB of weights: 164 MB a step; 10 steps a second
    assert bandwidth_share(record(), engine(10.0)) == pytest.approx(164e6 * 10 / BANDWIDTH)
    eight = next(work for work in WORK if work.part == "decode" and work.batch == 8)
    assert bandwidth_share(record(eight), engine(80.0)) == pytest.approx(228e6 * 10 / BANDWIDTH)


def test_prefill_and_neighbours_have_no_share_of_the_bandwidth() -> None:
    busy = next(work for work in WORK if work.neighbours)
    assert bandwidth_share(record(PREFILL), engine(10.0)) is None
    assert bandwidth_share(record(busy), engine(10.0)) is None


@each_case(
    ("ratio", "low", "high", "share", "goal"),
    [
        (1.5, 1.31, 1.6, 0.5, "met"),
        (1.5, 1.29, 1.6, 0.5, "open"),
        (1.2, 1.1, 1.31, None, "open"),
        (1.2, 1.1, 1.29, None, "not met"),
        (0.9, 0.8, 1.0, 0.9, "met"),
        (1.31, None, None, None, "met"),
        (1.29, None, None, 0.89, "not met"),
    ],
)
def test_a_goal_is_met_by_the_whole_interval_or_by_the_bandwidth(
    ratio: float, low: float | None, high: float | None, share: float | None, goal: str
) -> None:
    assert Comparison("ingot-native", "genai", ratio, low, high, share).goal == goal


def test_the_lowest_and_highest_bandwidth_of_each_thread_count_are_shown() -> None:
    records = [record(), record() | {"bandwidth": 30e9}, record() | {"threads": 2}]
    assert bandwidths(records) == {1: (BANDWIDTH, 30e9), 2: (BANDWIDTH, BANDWIDTH)}


def test_the_tables_have_a_row_for_each_cell_and_name_every_failure(tmp_path: Path) -> None:
    results = PartResults.load(tmp_path, "decode")
    found = record(
        failed={"openvino": "no such wheel"}, native=engine(40.0, 42.0, 41.0), llama=engine(20.0, 20.0, 20.0)
    )
    results.put(Cell("smollm2-135m", 1, DECODE).key, found)
    text = render(tmp_path)
    columns = "Ingot native | llama.cpp Q4_0 | OpenVINO GenAI int4"
    assert f"| shape | threads | work | {columns} | Ingot / best peer | goal |" in text
    row = "| smollm2-135m | 1 | decode, batch 1, context 64 | 41.0 (42.0) 34% | 20.0 (20.0) 16% | failed |"
    assert f"{row} 2.05 (2.00 to 2.10) | met |" in text
    assert "met in 1 of 1 cells" in text
    assert "* OpenVINO GenAI int4 failed in 1 cells: no such wheel" in text
    assert "| smollm2-135m | 1 | decode, batch 1, context 64 | 12.3 | 12.3 | - |" in text
    assert "* llama.cpp Q4_0: package 1.2. notes" in text
    assert "20.0 to 20.0 GB/s with threads 1" in " ".join(text.split())


def test_recipes_have_a_table_of_their_own_with_the_ratio_of_the_two_engines(tmp_path: Path) -> None:
    work = next(work for work in WORK if work.part == "recipes")
    engines = {
        "w8a8-static-native": engine(30.0, 33.0, 36.0),
        "w8a8-static-onnxruntime": engine(15.0, 11.0, 12.0),
        "fp16-native": engine(9.0, 9.0, 9.0),
    }
    found = record(work, failed={"fp16-onnxruntime": "no memory"}, **engines)
    PartResults.load(tmp_path, "recipes").put(Cell("smollm2-135m", 1, work).key, found)
    text = render(tmp_path)
    row = "| smollm2-135m | 1 | decode, batch 1, context 64 | W8A8, static scales | 33.0 (36.0) 27% | 12.0 (15.0) 10% |"
    assert f"{row} 3.00 (2.00 to 3.00) | 12.3, 12.3 |" in text
    assert "| float16 weights | 9.00 (9.00) 7% | failed | - | 12.3, - |" in text
    assert "a scale per token" not in text
    assert "Goals met" not in text
    assert "* W8A8, static scales, native: package 1.2. notes" in text
    assert "* float16 weights, onnxruntime failed in 1 cells: no memory" in text


def test_memory_of_loading_is_in_mebibytes(tmp_path: Path) -> None:
    memory = {"peak_rss_bytes": 5 << 20, "pss_bytes": 4 << 20, "private_bytes": 3 << 20, "anonymous_bytes": 2 << 20}
    loaded = {"load_seconds": 0.5, "ready_seconds": 1.25, "first_token_seconds": 12.5, "memory": memory}
    facts = {"versions": {}, "notes": ""}
    key = {"part": "load", "shape": "tinyllama-1.1b", "threads": 2}
    engines = {"engines": {"genai": loaded | {"facts": facts}}, "failed": {}}
    PartResults.load(tmp_path, "load").put(key, key | engines | {"measured_at": "2026-01-02"})
    assert "| onnxruntime-genai int4 | 0.50 | 1.25 | 12.5 | 5 | 4 | 3 | 2 |" in render(tmp_path)


def test_only_the_text_between_the_markers_changes(tmp_path: Path) -> None:
    document = tmp_path / "doc.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_tables(document, tmp_path / "none")
    assert document.read_text() == f"before\n{BEGIN}\n\nNot measured yet.\n\n{END}\nafter\n"


def test_a_document_without_markers_is_refused(tmp_path: Path) -> None:
    document = tmp_path / "doc.md"
    document.write_text("text\n")
    with pytest.raises(click.ClickException, match=r"doc\.md has no lines .* around the tables; add them"):
        write_tables(document, tmp_path)


def test_the_documents_tables_are_those_of_the_committed_results() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == f"\n\n{render(DEFAULT_OUTPUT)}\n"
