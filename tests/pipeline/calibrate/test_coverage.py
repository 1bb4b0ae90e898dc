"""Warnings about layers that too little calibration data reaches, each given once."""

import logging

import numpy as np
import pytest

from ingot.pipeline.calibrate.coverage import Coverage, CoverageLog, count_choices


def warnings_of(caplog: pytest.LogCaptureFixture, log: CoverageLog) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "ingot.pipeline"):
        log.warn()
    return caplog.messages


def test_enough_data_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    log = CoverageLog()
    log.add(Coverage.of("q", 64, np.ones(64)))
    assert warnings_of(caplog, log) == []


def test_all_kinds_of_too_little_data_are_named_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    log = CoverageLog()
    for number in range(4):
        log.add(Coverage.of(f"layers.{number}", 1000 + number, np.ones(2000)))
    log.add(Coverage.of("dead", 5000, np.zeros(8)))
    log.add(Coverage.of("half", 5000, np.array([0.0, 1, 0, 2])))
    assert warnings_of(caplog, log) == [
        "calibration: fewer tokens than input channels reach layers.0 (1,000 tokens, 2,000 channels), "
        "layers.1 (1,001 tokens, 2,000 channels), layers.2 (1,002 tokens, 2,000 channels) and 1 more, so that X^T X "
        "is singular. Raise calibration.sequences or sequence_tokens until each gets at least 2,000 tokens, better "
        "ten times as many; only zeros reach dead (8 channels); its weights are rounded without data; 2 input "
        "channels are zero for all tokens, in half (2 of 4); their weights are rounded without data"
    ]


def test_a_warning_is_given_once_and_a_new_layer_gives_another(caplog: pytest.LogCaptureFixture) -> None:
    log = CoverageLog()
    log.add(Coverage.of("dead", 8, np.zeros(8)))
    assert len(warnings_of(caplog, log)) == 1
    assert warnings_of(caplog, log) == []
    log.add(Coverage.of("also", 8, np.zeros(8)))
    assert "dead (8 channels), also (8 channels)" in warnings_of(caplog, log)[0]


def test_distinct_experts_are_counted_in_windows_and_over_sequences() -> None:
    first = np.array([[0, 1], [1, 0], [2, 1], [0, 3], [3, 2]])  # the last token is in no window of two or four
    second = np.array([[4, 0], [4, 1]])
    found = count_choices([first, second], 6)
    assert found.chosen == 2
    assert found.counts == (4, 4, 2, 2, 2, 0)
    assert found.consecutive == (2.0, (2 + 4 + 3) / 3, 4.0)
    assert found.concurrent == (2.0, (3 + 3) / 2)


def test_sequences_that_are_far_apart_decode_together() -> None:
    sequences = [np.array([[expert]]) for expert in (0, 0, 1, 1)]
    assert count_choices(sequences, 2).concurrent == (1.0, 2.0, 2.0)


def test_sequences_of_one_token_have_no_longer_windows() -> None:
    assert count_choices([np.array([[1]]), np.array([[0]])], 2).consecutive == (1.0,)
