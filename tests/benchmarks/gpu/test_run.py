"""The GPU benchmark writes figures as they come, parts that failed or were skipped, and goals."""

import json
import sys
import time
from pathlib import Path

import pytest
from benchmarks.gpu import run as gpu
from benchmarks.gpu.figures import Peaks, Record, Spread, Work, goals, peaks_of
from benchmarks.gpu.run import Report
from click.testing import CliRunner

HARDWARE: Record = {"figure": "hardware", "device": "NVIDIA H100 80GB"}
RATES: list[Record] = [
    {"figure": "rate", "name": name, "per_second": rate}
    for name, rate in (
        ("within the device", 3e12),
        ("matmul float16", 7e14),
        ("matmul bfloat16", 8e14),
        ("to the device", 5e10),
    )
]


def report(folder: Path, budget: float = 100.0) -> Report:
    return Report(folder, {"dry_run": False, "begun_monotonic": time.monotonic(), "budget_seconds": budget})


def test_the_file_is_named_after_the_gpu_and_holds_the_records_so_far(tmp_path: Path) -> None:
    made = report(tmp_path)
    made.parts["hardware"] = {"status": "running", "records": [HARDWARE]}
    file = made.write()
    assert file.name == "gpu-nvidia-h100-80gb.json"
    content = json.loads(file.read_text())
    assert content["parts"]["hardware"]["status"] == "running"
    assert all(goal["met"] is None for goal in content["goals"])


def test_a_part_that_no_longer_fits_is_left_out_and_says_so(tmp_path: Path) -> None:
    made = report(tmp_path, budget=1.0)
    gpu._part(made, "steps", tmp_path, tmp_path, dry_run=True)
    assert made.parts["steps"] == {"status": "skipped: the budget of seconds is spent", "records": []}


def test_a_part_that_fails_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    made = report(tmp_path)
    gpu._part(made, "hardware", tmp_path, tmp_path, dry_run=True)
    assert made.parts["hardware"]["status"] == "failed"
    assert (tmp_path / "gpu-unknown.json").is_file()


def test_an_unknown_part_is_refused() -> None:
    result = CliRunner().invoke(gpu.main, ["--parts", "hardware,cheks"])
    assert result.exit_code == 2
    assert "unknown part 'cheks'; parts: hardware" in result.output


def test_peaks_are_the_best_of_what_was_measured_and_one_where_nothing_was() -> None:
    assert peaks_of(RATES) == Peaks(3e12, 8e14, 5e10, 1.0)


def test_a_share_of_the_roofline_is_the_slower_floor_over_the_time() -> None:
    peaks = Peaks(1e12, 1e15, 1.0, 1.0)
    record = Work(bytes=1e9, flops=5e11).record(Spread.of([2e-3, 2e-3, 4e-3]), peaks)
    assert record["bound"] == "bytes"
    assert record["share_of_roofline"] == pytest.approx(0.5)
    assert Work(bytes=1e9, flops=2e12).record(Spread.of([4e-3]), peaks)["bound"] == "flops"


def test_goals_are_held_against_their_figures() -> None:
    step: Record = {"figure": "step", "program": "llama-3.1-8b-int4-kv-16-bit", "bucket": "decode-1"}
    figures: list[Record] = [
        {**step, "seconds": {"median": 1.0}, "over_weights": 1.25},
        {"figure": "check", "within": True},
        {"figure": "case", "within": False},
        {"figure": "offload", "way": "restore", "share_of_link": 0.7},
        {"figure": "gap", "steps": 90, "steps_waited_for_python": 0},
    ]
    met = [goal["met"] for goal in goals(figures)]
    assert met == [False, True, None, None, False, True]
