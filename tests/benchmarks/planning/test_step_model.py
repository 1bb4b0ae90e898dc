"""The step model predicts rows that were measured on H100s, from 8 rows of a group and from other engines alone."""

import pytest
from benchmarks.planning.h100_rows import Group, calibration_rows, read_groups
from benchmarks.planning.step_model import calibrated, joined, pooled, without_engine

from ingot.planning.fitting import fit_factors
from ingot.planning.roofline import MEASURED
from tests.data_paths import shared_data


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    return read_groups(shared_data("plan/h100-serving.csv"))


def test_eight_rows_of_a_group_predict_its_others(groups: list[Group]) -> None:
    score = joined("all", [calibrated(group) for group in groups])
    assert len(score.errors) > 500
    assert score.mean <= 0.08
    assert score.median <= 0.05
    assert 0.9 <= score.covered <= 0.99


def test_other_engines_predict_an_engine(groups: list[Group]) -> None:
    scores = without_engine(groups)
    assert {score.name for score in scores} == {"sglang", "trtllm", "vllm"}
    assert max(score.mean for score in scores) <= 0.15


def test_the_data_sheet_has_the_factors_of_the_fit(groups: list[Group]) -> None:
    names, columns, seconds = pooled(groups)
    factors = dict(zip(names, fit_factors(columns, seconds).factors, strict=True))
    reached = MEASURED["gpu"]
    assert 1 / factors["linear layers"] == pytest.approx(reached.bandwidth, rel=0.02)
    assert 1 / factors["prefill attention"] == pytest.approx(reached.attention_flops, rel=0.05)
    assert 1 / factors["all-reduces"] == pytest.approx(reached.link, rel=0.02)
    assert factors["layers"] == pytest.approx(reached.layer_seconds * 1e6, rel=0.02)
    assert factors["sequences"] == pytest.approx(reached.row_seconds * 1e6, rel=0.02)


def test_calibration_rows_are_spread_and_do_not_repeat(groups: list[Group]) -> None:
    chosen = calibration_rows(groups[0].rows, 8)
    assert len(set(chosen)) == 8
    assert len({groups[0].rows[index].load.prompt_tokens for index in chosen}) > 1
