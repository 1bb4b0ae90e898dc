"""Tables of evidence and gates on the command line."""

from pathlib import Path

import pytest

from ingot.artifact import GateOutcome
from ingot.cli.evidence import print_evidence, print_gates
from ingot.validation.report.formatting import key_title
from tests.validation.sample_evidence import sample_evidence

Captured = pytest.CaptureFixture[str]


def test_gates_are_shown_with_value_interval_limit_and_verdict(capsys: Captured) -> None:
    print_gates(
        [
            GateOutcome(name="kl_mean", verdict="PASS", measured=0.0123456, low=0.01, high=0.1, limit=0.1, bound="max"),
            GateOutcome(
                name="top1_agreement", verdict="FAIL", measured=0.8, low=0.7, high=0.85, limit=0.9, bound="min"
            ),
        ]
    )
    lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["kl_mean", "0.012", "0.010", "to", "0.100", "≤", "0.1", "PASS"] in lines
    assert ["top1_agreement", "80.0", "%", "70.0", "to", "85.0", "%", "≥", "90", "%", "FAIL"] in lines


def test_evidence_is_shown_metric_by_metric_with_both_names_gates_and_report(capsys: Captured) -> None:
    evidence = sample_evidence()
    print_evidence(evidence, Path("somewhere/report.html"))
    shown = capsys.readouterr().out
    assert evidence.baseline.name in shown
    assert evidence.candidate.name in shown
    assert all(key_title(key) in shown for key in evidence.measured)
    assert all(gate.name in shown for gate in evidence.gates)
    assert shown.endswith("report somewhere/report.html\n")


def test_a_significant_change_is_marked_gate_or_not(capsys: Captured) -> None:
    print_evidence(sample_evidence(gates=()), None)
    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert (
        "metric ┃ stdlib-llama-6m baseline ┃ stdlib-llama-6m <int4> ┃ ratio (paired) ┃ change ┃ 95 % interval" in lines
    )
    assert "Size on disk 23.3 MB 5.0 MB 0.2157 better exact" in lines
    assert any(line.startswith("Perplexity ratio") and " worse " in line for line in lines)
    assert any(line.startswith("better, worse: the whole interval is on one side") for line in lines)


def test_without_gates_and_report_only_the_metrics_are_shown(capsys: Captured) -> None:
    print_evidence(sample_evidence(gates=()), None)
    shown = capsys.readouterr().out
    assert "verdict" not in shown
    assert "report" not in shown


def test_a_machine_that_was_busy_is_named_next_to_the_verdicts(capsys: Captured) -> None:
    print_evidence(sample_evidence(), None)
    noted = " ".join(capsys.readouterr().err.split())
    assert "busy during the latency rounds: other processes kept 1.6 of 4 processors busy (at most 1.9)" in noted
