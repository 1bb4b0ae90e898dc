"""The benchmark of predicted serving: ranks, intervals, and the figures of a run of a small model."""

import pytest
from benchmarks.cpu import simulation
from benchmarks.cpu.simulation import Comparison, Served, compare, covered_steps, fit, kendall_tau, measure, rank

from ingot.planning.simulation.traffic import RequestSizes
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
    chosen = simulation.CONFIGURATIONS[::6]
    monkeypatch.setattr(simulation, "CONFIGURATIONS", chosen)
    sizes = RequestSizes(prompt_tokens=60, output_tokens=10)
    served = [Served.of(artifact, "at-once", options, sizes=sizes, count=6, seed=1) for options in ({}, *chosen)]
    for _ in range(2):
        for each in served:
            each.serve()
    calibration, *configured = served
    assert calibration.runs[0].steps == calibration.runs[1].steps
    for one, *seconds in zip(calibration.steps, *(run.seconds for run in calibration.runs), strict=True):
        assert one.seconds == pytest.approx(sum(seconds) / 2)
    model = fit(calibration)
    compared = [compare(each, model) for each in configured]
    found = rank(configured, compared)
    assert found["kendall_tau"].keys() == found["kendall_tau_of_rounds"].keys() == set(simulation.RANKED_BY)
    assert [(each["batching"], each["max_sequences"]) for each in found["runs"]] == [
        (each["batching"], each["max_sequences"]) for each in chosen
    ]
    assert all(len(one.covered) == len(one.predicted) for one in compared)
    assert sum(len(covered_steps(model, each)) for each in configured) > 20
    assert measure(configured[0], model, compared[0])["same_batches"]
