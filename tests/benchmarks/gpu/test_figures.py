"""Figures of the GPU benchmark: shares of the GPU's peaks, and goals."""

import math

import pytest
from benchmarks.gpu.figures import Peaks, Spread, Work, goals, peaks_of
from benchmarks.gpu.parts import Record

RATES: list[Record] = [
    {"figure": "rate", "name": name, "per_second": rate}
    for name, rate in (
        ("within the device", 3e12),
        ("matmul float16", 7e14),
        ("matmul bfloat16", 8e14),
        ("to the device", 5e10),
    )
]


def test_peaks_are_the_best_of_what_was_measured_and_not_a_number_where_nothing_was() -> None:
    found = peaks_of(RATES)
    assert (found.bytes_per_second, found.flops_per_second, found.to_device) == (3e12, 8e14, 5e10)
    assert math.isnan(found.to_host)


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
        {"figure": "offload", "way": "restore", "share_of_link": 0.7},
        {"figure": "gap", "program": "llama-3.1-8b-int4-kv-16-bit", "steps": 90, "steps_waited_for_python": 0},
        {"figure": "gap", "program": "two-layers-int4-kv-16-bit", "steps": 90, "steps_waited_for_python": 88},
    ]
    assert [goal["met"] for goal in goals(figures, 1.0)] == [False, True, None, None, False, True]
    assert goals(figures, 0.0)[0]["met"] is True
    assert goals(figures, None)[0]["met"] is None


def test_a_time_without_measured_peaks_meets_no_goal() -> None:
    peaks = peaks_of([])
    seconds = Spread.of([1e-3])
    step: Record = {"figure": "step", "program": "llama-3.1-8b-int4-kv-16-bit", "bucket": "decode-1"}
    over = {"over_weights": seconds.median * peaks.bytes_per_second / 1e9}
    found = goals([{**step, **over, **Work(1e9, 1e9).record(seconds, peaks)}], 0.0)
    assert found[1]["measured"] is None
    assert found[1]["met"] is None
