"""Ratios, shares and goals of cells."""

import pytest
from benchmarks.cpu.cells import WORK
from benchmarks.cpu.comparison_ratios import Comparison, bandwidth_share, compare

from tests.benchmarks.cpu.comparison_records import BANDWIDTH, PREFILL, engine, record
from tests.each_case import each_case


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
