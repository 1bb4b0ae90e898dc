"""The table of gate verdicts, as `build`, `validate` and `inspect` print it."""

from collections.abc import Sequence

from ingot.artifact import GateOutcome
from ingot.cli.console import print_table


def print_gates(gates: Sequence[GateOutcome]) -> None:
    """Print gates with measured value, 95 % interval, limit and verdict."""
    rows = [
        (
            gate.name,
            f"{gate.measured:.4g}",
            f"{gate.low:.4g} .. {gate.high:.4g}",
            f"{'≤' if gate.bound == 'max' else '≥'} {gate.limit:g}",
            gate.verdict,
        )
        for gate in gates
    ]
    print_table("Gates", ("gate", "measured", "95 % interval", "limit", "verdict"), rows)
