"""The tables that are made from records of cells."""

from pathlib import Path

import click
import pytest
from benchmarks.cpu.cells import WORK, Cell
from benchmarks.cpu.comparison_results import DEFAULT_OUTPUT, ProcessorResults
from benchmarks.cpu.comparison_tables import (
    BEGIN,
    DOCUMENT,
    END,
    README,
    bandwidths,
    render,
    summarize,
    write_summary,
    write_tables,
)
from benchmarks.device import processor_name

from tests.benchmarks.cpu.comparison_records import BANDWIDTH, DECODE, PREFILL, engine, record


def test_the_lowest_and_highest_bandwidth_of_each_thread_count_are_shown() -> None:
    records = [record(), record() | {"bandwidth": 30e9}, record() | {"threads": 2}]
    assert bandwidths(records) == {1: (BANDWIDTH, 30e9), 2: (BANDWIDTH, BANDWIDTH)}


def test_the_tables_have_a_row_for_each_cell_and_name_every_failure(tmp_path: Path) -> None:
    results = ProcessorResults.of_this_machine(tmp_path)
    found = record(
        failed={"genai": "out of memory"},
        missing={"openvino": "no such wheel"},
        native=engine(40.0, 42.0, 41.0),
        llama=engine(20.0, 20.0, 20.0),
    )
    results.put(Cell("smollm2-135m", 1, DECODE).key, found)
    text = render(tmp_path)
    assert text.startswith(f"### {processor_name()}\n")
    columns = "Ingot native | llama.cpp Q4_0 | onnxruntime-genai int4 | OpenVINO GenAI int4"
    assert f"| shape | threads | work | {columns} | Ingot / best peer | goal |" in text
    row = "| smollm2-135m | 1 | decode, batch 1, context 64 | 41.0 (42.0) 34% | 20.0 (20.0) 16% | failed | missing |"
    assert f"{row} 2.05 (2.00 to 2.10) | met |" in text
    assert "met in 1 of 1 cells" in text
    assert "* onnxruntime-genai int4 failed in all cells: out of memory" in text
    assert "* OpenVINO GenAI int4 missing in all cells: no such wheel" in text
    assert "| smollm2-135m | 1 | decode, batch 1, context 64 | 12.3 | 12.3 | - | - |" in text
    assert "* llama.cpp Q4_0: package 1.2. notes" in text
    assert "20.0 to 20.0 GB/s with threads 1" in " ".join(text.split())


def test_a_failure_in_some_cells_names_them(tmp_path: Path) -> None:
    results = ProcessorResults.of_this_machine(tmp_path)
    both = {"native": engine(4.0), "llama": engine(2.0)}
    eight = next(work for work in WORK if work.part == "decode" and work.batch == 8)
    results.put(Cell("smollm2-135m", 1, DECODE).key, record(**both))
    results.put(Cell("smollm2-135m", 1, eight).key, record(eight, failed={"mistral.rs": "not contiguous"}, **both))
    found = " ".join(render(tmp_path).split())
    assert "* mistral.rs Q4_0 failed in smollm2-135m, threads 1, decode, batch 8, context 16: not contiguous" in found


def test_parts_that_an_engine_cannot_run_are_in_the_notes(tmp_path: Path) -> None:
    results = ProcessorResults.of_this_machine(tmp_path)
    busy = next(work for work in WORK if work.neighbours)
    both = {"native": engine(4.0), "llama": engine(2.0)}
    results.put(Cell("smollm2-135m", 1, DECODE).key, record(**both | {"ik_llama.cpp-q4_0": engine(3.0)}))
    results.put(Cell("smollm2-135m", 1, busy).key, record(busy, **both))
    text = render(tmp_path)
    assert "* ik_llama.cpp Q4_0: package 1.2. notes; cannot run: neighbours\n" in text
    assert "* llama.cpp Q4_0: package 1.2. notes\n" in text


def test_huge_pages_are_in_the_notes(tmp_path: Path) -> None:
    one = engine(2.0)
    one["facts"]["huge_bytes"] = 75 * 10**6
    found = record(native=engine(4.0), llama=one)
    ProcessorResults.of_this_machine(tmp_path).put(Cell("smollm2-135m", 1, DECODE).key, found)
    assert "package 1.2. notes; in huge pages: 0.75 times the weights' bytes or more" in render(tmp_path)


def test_the_range_has_losses_and_leaves_out_neighbours_and_mixtures(tmp_path: Path) -> None:
    results = ProcessorResults.of_this_machine(tmp_path)
    busy = next(work for work in WORK if work.neighbours)
    eight = next(work for work in WORK if work.part == "decode" and work.batch == 8)
    for shape, work, ours in (
        ("smollm2-135m", DECODE, 30.0),
        ("smollm2-135m", eight, 9.0),
        ("smollm2-135m", PREFILL, 15.0),
        ("smollm2-135m", busy, 1.0),
        ("mixture-1b", DECODE, 90.0),
    ):
        key = Cell(shape, 1, work).key
        results.put(key, record(work, native=engine(ours), llama=engine(10.0)) | key)
    row = f"| {processor_name()} | llama.cpp | 0.90 to 3.00 | 1.50 to 1.50 | 1 of 3 |"
    assert summarize(tmp_path).splitlines()[2:] == [row]
    assert summarize(tmp_path / "none") == "Not measured yet.\n"


def test_several_processors_end_with_a_row_of_all(tmp_path: Path) -> None:
    results = ProcessorResults.of_this_machine(tmp_path)
    results.put(Cell("smollm2-135m", 1, DECODE).key, record(native=engine(30.0), llama=engine(10.0)))
    other = ProcessorResults.load(tmp_path / "another.json")
    other.put(Cell("smollm2-135m", 1, DECODE).key, record(native=engine(8.0), genai=engine(10.0)))
    last = summarize(tmp_path).splitlines()[-1]
    assert last == "| all | llama.cpp, onnxruntime-genai | 0.80 to 3.00 | - | 1 of 2 |"


def test_recipes_have_a_table_of_their_own_with_the_ratio_of_the_two_engines(tmp_path: Path) -> None:
    work = next(work for work in WORK if work.part == "recipes")
    engines = {
        "w8a8-static-native": engine(30.0, 33.0, 36.0),
        "w8a8-static-onnxruntime": engine(15.0, 11.0, 12.0),
        "fp16-native": engine(9.0, 9.0, 9.0),
    }
    found = record(work, failed={"fp16-onnxruntime": "no memory"}, **engines)
    ProcessorResults.of_this_machine(tmp_path).put(Cell("smollm2-135m", 1, work).key, found)
    text = render(tmp_path)
    row = "| smollm2-135m | 1 | decode, batch 1, context 64 | W8A8, static scales | 33.0 (36.0) 27% | 12.0 (15.0) 10% |"
    assert f"{row} 3.00 (2.00 to 3.00) | 12.3, 12.3 |" in text
    assert "| float16 weights | 9.00 (9.00) 7% | failed | - | 12.3, - |" in text
    assert "a scale per token" not in text
    assert "Goals met" not in text
    assert "* W8A8, static scales, native: package 1.2. notes" in text
    assert "* float16 weights, onnxruntime failed in all cells: no memory" in text


def test_memory_of_loading_is_in_mebibytes(tmp_path: Path) -> None:
    memory = {"peak_rss_bytes": 5 << 20, "pss_bytes": 4 << 20, "private_bytes": 3 << 20, "anonymous_bytes": 2 << 20}
    loaded = {"load_seconds": 0.5, "ready_seconds": 1.25, "first_token_seconds": 12.5, "memory": memory}
    facts = {"versions": {}, "notes": ""}
    key = {"part": "load", "shape": "tinyllama-1.1b", "threads": 2}
    engines = {"engines": {"genai": loaded | {"facts": facts}}, "failed": {}, "missing": {}}
    ProcessorResults.of_this_machine(tmp_path).put(key, key | engines | {"measured_at": "2026-01-02"})
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


def test_the_readmes_range_is_that_of_the_committed_results() -> None:
    text = README.read_text("utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == f"\n\n{summarize(DEFAULT_OUTPUT)}\n"


def test_the_range_is_written_between_the_markers(tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_summary(document, tmp_path / "none")
    assert document.read_text() == f"before\n{BEGIN}\n\nNot measured yet.\n\n{END}\nafter\n"


def test_the_documents_tables_are_those_of_the_committed_results() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == f"\n\n{render(DEFAULT_OUTPUT)}\n"
