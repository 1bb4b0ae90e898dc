"""Tables of evidence and gate verdicts, as `build`, `validate` and `inspect` print them."""

from collections.abc import Sequence
from pathlib import Path

from ingot.artifact import GateOutcome
from ingot.cli.console import print_note, stdout
from ingot.cli.tables import print_table
from ingot.validation.report import formatting as fmt
from ingot.validation.result import Evidence

_MARKS = (
    "better, worse: the whole interval is on one side of the baseline. The ratio is the mean of paired rounds, and may "
    "differ from the ratio of the medians."
)


def print_gates(gates: Sequence[GateOutcome]) -> None:
    """Print gates with measured value, 95 % interval, limit and verdict."""
    rows = [
        (
            gate.name,
            fmt.fitted(gate.name, [gate.measured], gate.low, gate.high)[0],
            "exact" if gate.low == gate.high else fmt.range_of(gate.name, gate.low, gate.high),
            fmt.limit(gate),
            f"{gate.verdict}{' (advisory)' if gate.advisory else ''}",
        )
        for gate in gates
    ]
    print_table("Gates", ("gate", "measured", "95 % interval", "limit", "verdict"), rows)


def print_evidence(evidence: Evidence, report: Path | None) -> None:
    """Print every metric of both sides with its 95 % interval, the gates and the report's path."""
    rows = [
        (
            fmt.key_title(key),
            *fmt.sides(measured),
            fmt.ratio(measured),
            measured.change or "-",
            fmt.interval(measured),
        )
        for key, measured in evidence.measured.items()
    ]
    names = (evidence.baseline.name, evidence.candidate.name)
    print_table("Evidence", ("metric", *names, "ratio (paired)", "change", "95 % interval"), rows)
    if any(measured.change for measured in evidence.measured.values()):
        stdout().print(_MARKS, markup=False)
    if evidence.gates:
        print_gates(evidence.gates)
    if evidence.load and evidence.load.is_busy:
        print_note(f"the machine was busy during the latency rounds: {evidence.load}")
    if report:
        stdout().print(f"report {report}", markup=False)
