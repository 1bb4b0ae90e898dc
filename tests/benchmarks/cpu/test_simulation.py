"""The benchmark of predicted serving: ranks, intervals, and the figures of a run of a small model."""

import pytest
from benchmarks.cpu import simulation
from benchmarks.cpu.simulation import Comparison, calibrate, kendall_tau, rank

from ingot.runtime import Engine
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL


def test_tau_is_one_for_equal_orders_and_less_for_each_pair_that_differs() -> None:
    assert kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert kendall_tau([1, 2, 3, 4], [40, 30, 20, 10]) == -1
    assert kendall_tau([1, 2, 3, 4], [20, 10, 30, 40]) == pytest.approx(4 / 6)
    assert kendall_tau([1, 1, 3], [10, 20, 30]) == pytest.approx(2 / 3)


def test_a_figure_is_covered_inside_its_interval_alone() -> None:
    found = Comparison({"a": 2.0, "b": 5.0}, {"a": 1.0, "b": 4.0}, {"a": (1.0, 3.0), "b": (3.0, 4.5)})
    assert found.covered == [True, False]
    assert found.as_json["a"] == -0.5
    assert found.as_json["b"] == pytest.approx(-0.2)


def test_configurations_are_served_predicted_and_ranked(
    build_unmeasured: BuildArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = build_unmeasured("demo", DEMO_MODEL)
    monkeypatch.setattr(simulation, "CALIBRATION_REQUESTS", 8)
    monkeypatch.setattr(simulation, "CONFIGURATIONS", simulation.CONFIGURATIONS[::6])
    with Engine.load(artifact, **simulation.LIMITS) as engine:
        model, _ = calibrate(engine, 1)
    found, covered, steps = rank(artifact, model, 6, 1)
    assert found["kendall_tau"].keys() == set(simulation.RANKED_BY)
    assert len(found["runs"]) == 2
    assert len(covered) == 2 * len(found["runs"][0]["intervals"])
    assert len(steps) > 20
    assert len({(each["batching"], each["max_sequences"]) for each in found["runs"]}) == 2
