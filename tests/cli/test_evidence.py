"""Tables of evidence and gates on the command line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.artifact import GateOutcome, open_artifact
from ingot.cli.evidence import print_evidence, print_gates, print_warning_of
from ingot.validation.machine import MachineLoad
from ingot.validation.report.formatting import title
from ingot.validation.statistics import Estimate, Measured
from tests.artifact.test_manifest import PASSED, seal_measured
from tests.validation.sample_evidence import sample_evidence

Captured = pytest.CaptureFixture[str]


def gate(name: str, verdict: str, advisory: bool = False, **facts: object) -> GateOutcome:
    facts = {"measured": 0.0123456, "low": 0.01, "high": 0.1, "limit": 0.1, "bound": "max", **facts}
    return GateOutcome.model_validate({"name": name, "verdict": verdict, "advisory": advisory, **facts})


def test_gates_are_shown_with_verdict_value_interval_and_limit(capsys: Captured) -> None:
    top1: dict[str, Any] = {"measured": 0.8, "low": 0.7, "high": 0.85, "limit": 0.9, "bound": "min"}
    print_gates(
        [gate("kl_mean", "PASS"), gate("top1_agreement", "FAIL", **top1), gate("kl_p99", "FAIL", advisory=True)]
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["kl_mean", "PASS", "0.012", "0.010", "to", "0.100", "≤", "0.1"] in lines
    assert ["top1_agreement", "FAIL", "80.0", "%", "70.0", "to", "85.0", "%", "≥", "90", "%"] in lines
    assert ["kl_p99", "FAIL", "(advisory)"] in [line[:3] for line in lines]


def test_evidence_is_shown_metric_by_metric_with_both_names_gates_and_report(capsys: Captured) -> None:
    evidence = sample_evidence()
    print_evidence(evidence, Path("somewhere/report.html"))
    shown = capsys.readouterr()
    assert f"Evidence: {evidence.candidate.name} compared with {evidence.baseline.name}" in shown.out
    assert all(title(measured.metric) in shown.out for measured in evidence.measured.values())
    assert all(gate.name in shown.out for gate in evidence.gates)
    assert "Latency, 4 in flight" in shown.out
    assert shown.out.endswith("report somewhere/report.html\n")
    assert "may differ from the ratio of the two columns" in shown.err


def test_what_got_significantly_worse_or_better_is_a_word_in_its_row(capsys: Captured) -> None:
    measured = {
        "ttft_ratio@1": Measured("ttft_ratio", Estimate(1.14, 1.1, 1.2, 5, "t"), 1.0, 1.14, "seconds", level=1),
        "tpot_ratio@1": Measured("tpot_ratio", Estimate(0.5, 0.4, 0.6, 5, "t"), 1.0, 0.5, "seconds", level=1),
        "e2e_ratio@1": Measured("e2e_ratio", Estimate(1.0, 0.9, 1.1, 5, "t"), 1.0, 1.0, "seconds", level=1),
    }
    print_evidence(replace(sample_evidence(gates=()), measured=measured), None)
    shown = capsys.readouterr().out
    rows = {line.split("  ")[1]: line.split() for line in shown.splitlines() if line.startswith("  ")}
    assert "worse" in rows["Time to first token"]
    assert "+14.0 %" in " ".join(rows["Time to first token"])
    assert "better" in rows["Time per output token"]
    assert not {"worse", "better"} & set(rows["End-to-end time"])
    assert "Significantly worse than the baseline, without a gate: Time to first token, 1 in flight (+14.0 %)" in shown
    assert "NO GATES: " in shown
    assert "report" not in shown


@pytest.mark.parametrize(("others", "beginning"), [(1.9, "BUSY MACHINE: "), (0.0, "machine: ")])
def test_the_load_of_other_processes_is_shown(others: float, beginning: str, capsys: Captured) -> None:
    evidence = sample_evidence()
    assert evidence.latency is not None
    load = MachineLoad(others=others, peak=2.0, cores=2, threads=2)
    print_evidence(replace(evidence, latency=replace(evidence.latency, load=load)), None)
    assert f"{beginning}other processes kept {others} of 2 processors busy" in capsys.readouterr().out


def test_an_artifact_that_no_gate_passed_is_shown_with_a_warning(tmp_path: Path, capsys: Captured) -> None:
    print_warning_of(open_artifact(seal_measured(tmp_path / "a", PASSED)).manifest)
    assert capsys.readouterr().out == ""
    print_warning_of(open_artifact(seal_measured(tmp_path / "b")).manifest)
    assert capsys.readouterr().out.startswith("NO GATES: ")
    print_warning_of(open_artifact(seal_measured(tmp_path / "c", measured=False)).manifest)
    assert capsys.readouterr().out.startswith("NOT MEASURED: ")
