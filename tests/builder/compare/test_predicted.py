"""Sizes are predicted to the byte before anything is built; times need a row of hardware; accuracy is unknown."""

import pytest

from ingot.builder.compare import predicted
from ingot.builder.compare.predicted import BASELINE, predict_group
from ingot.errors import UsageError
from ingot.planning.hardware import find_hardware
from ingot.validation.result import artifact_size
from tests.builder.compare.conftest import Compared


def test_predicted_sizes_are_those_of_the_artifacts(compared: Compared) -> None:
    rows = {row.name: row for row in predict_group(compared.group, None, None)}
    assert list(rows) == [BASELINE, "fp32-cpu", "int8-cpu", "int4-cpu"]
    for outcome in compared.outcomes:
        assert outcome.artifact
        subject = rows[outcome.candidate.name].subject
        assert subject
        assert subject.program.weight_bytes == artifact_size(outcome.artifact).weights
        assert rows[outcome.candidate.name].as_json()["accuracy"] is None
    assert all(row.latency is None for row in rows.values())


def test_times_and_cost_follow_from_a_row_of_hardware(compared: Compared) -> None:
    rows = {row.name: row for row in predict_group(compared.group, ("epyc-9654", find_hardware("epyc-9654", ())), 2.0)}
    found = [rows[name].latency for name in ("fp32-cpu", "int8-cpu", "int4-cpu")]
    assert all(found)
    tpots = [one.tpot for one in found if one]
    assert tpots == sorted(tpots, reverse=True)
    assert rows["int4-cpu"].as_json()["money"]["price_per_hour"] == pytest.approx(2.0)


def test_a_candidate_without_a_plan_has_the_reason(compared: Compared, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise UsageError("no plan for it")

    monkeypatch.setattr(predicted, "plan_program", refuse)
    rows = predict_group(compared.group, None, None)
    assert [row.reason for row in rows] == ["no plan for it"] * 3 + [""]  # the artifact needs no plan
