"""Tables of evidence and gate verdicts, as `build`, `validate` and `inspect` print them."""

from collections.abc import Sequence
from pathlib import Path

from ingot.artifact import GateOutcome
from ingot.cli.console import print_note, stdout
from ingot.cli.tables import print_table
from ingot.validation.report.formatting import interval, key_title, metric_value, quantity
from ingot.validation.result import Evidence


def print_gates(gates: Sequence[GateOutcome]) -> None:
    """Print gates with measured value, 95 % interval, limit and verdict."""
    rows = [
        (
            gate.name,
            f"{gate.measured:.4g}",
            f"{gate.low:.4g} .. {gate.high:.4g}",
            f"{'≤' if gate.bound == 'max' else '≥'} {gate.limit:g}",
            f"{gate.verdict}{' (advisory)' if gate.advisory else ''}",
        )
        for gate in gates
    ]
    print_table("Gates", ("gate", "measured", "95 % interval", "limit", "verdict"), rows)


def print_evidence(evidence: Evidence, report: Path | None) -> None:
    """Print every metric of both sides with its 95 % interval, the gates and the report's path."""
    rows = [
        (
            key_title(key),
            quantity(measured.baseline, measured.unit),
            quantity(measured.candidate, measured.unit),
            metric_value(measured.metric, measured.estimate.value),
            interval(measured),
        )
        for key, measured in evidence.measured.items()
    ]
    names = (evidence.baseline.name, evidence.candidate.name)
    print_table("Evidence", ("metric", *names, "compared", "95 % interval"), rows)
    if evidence.gates:
        print_gates(evidence.gates)
    if evidence.load and evidence.load.is_busy:
        print_note(f"the machine was busy during the latency rounds: {evidence.load}")
    if report:
        stdout().print(f"report {report}", markup=False)
