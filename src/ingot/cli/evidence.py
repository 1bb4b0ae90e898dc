"""The evidence as `build` and `validate` print it: baseline against candidate, then the gates."""

from pathlib import Path

from ingot.cli.console import print_table, stdout
from ingot.cli.gates import print_gates
from ingot.validation.formatting import interval, key_title, metric_value, quantity
from ingot.validation.result import Evidence


def print_evidence(evidence: Evidence, report: Path | None) -> None:
    """Print every metric of both sides with its 95 % interval, the gates, and where the report lies."""
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
    if report:
        stdout().print(f"report {report}", markup=False)
