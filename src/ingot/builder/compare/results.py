"""Results of a comparison: figures with intervals, paired with the best, the Pareto front, gates and the winner.

Accuracy is paired window by window, with the baseline and with the best: the same tokens. Latency is paired with the
baseline round by round; the best was measured in other rounds, so the ratio to it is one of two ratios to the same
baseline, with Welch's interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from ingot.artifact import GateOutcome
from ingot.builder.compare.candidates import Group
from ingot.builder.compare.run import Outcome
from ingot.builder.measurements import gate_specs
from ingot.errors import UsageError, unknown
from ingot.validation.evidence_change import paired_accuracy
from ingot.validation.evidence_json import Recorded
from ingot.validation.gates import decide
from ingot.validation.result import artifact_size, worst_verdict
from ingot.validation.statistics import Estimate, exact, ratio_interval, unpaired_ratio_interval

Better = Literal["lower", "higher"]
_TOKENS_OF_A_PRICE = 1_000_000


AXES: Mapping[str, Better] = {
    "bits": "lower",
    "bytes": "lower",
    "perplexity_ratio": "lower",
    "kl_mean": "lower",
    "top1_agreement": "higher",
    "ttft": "lower",
    "tpot": "lower",
    "tokens_per_second": "higher",
    "cost": "lower",
    "peak_memory": "lower",
}
"""The figures of the table, and which of their values are better."""
DIFFERENCES = ("kl_mean", "top1_agreement")
"""Figures that are compared with the best by difference, the others by ratio."""
DEFAULT_AXES = ("kl_mean", "tpot", "bytes")
_LATENCY = {"ttft": "ttft", "tpot": "tpot", "tokens_per_second": "throughput"}


@dataclass
class ComparedRow:
    """One candidate with its figures by the names of AXES.

    against_baseline  latency ratios to the baseline, round by round
    against_best      ratios to the best (bytes, perplexity, latency), and differences from it (KL, top-1)
    unmeasured_gates  gates of its recipe that a comparison does not measure
    """

    outcome: Outcome
    figures: dict[str, Estimate] = field(default_factory=dict)
    against_baseline: dict[str, Estimate] = field(default_factory=dict)
    against_best: dict[str, Estimate] = field(default_factory=dict)
    gates: tuple[GateOutcome, ...] = ()
    unmeasured_gates: tuple[str, ...] = ()
    on_front: bool = False

    @property
    def name(self) -> str:
        """The candidate's name."""
        return self.outcome.candidate.name

    @property
    def verdict(self) -> str:
        """PASS if every gate that is not advisory passed, else the worst verdict; "-" without such a gate."""
        return worst_verdict(self.gates) or "-"

    @property
    def may_win(self) -> bool:
        """True where it was measured and no gate rejects it."""
        return bool(self.figures) and self.verdict in ("PASS", "-")


@dataclass(frozen=True)
class Comparison:
    """The rows of one checkpoint. `best` has the rows that others are paired with; None where nothing was measured.

    winner       the row that no gate rejects with the best value of `prefer`
    levels       concurrency of TTFT and TPOT, and of tokens a second and cost
    """

    group: Group
    rows: tuple[ComparedRow, ...]
    axes: tuple[str, ...]
    prefer: str
    levels: tuple[int, int]
    best: ComparedRow | None
    winner: ComparedRow | None

    def as_json(self) -> dict[str, Any]:
        """All figures with their intervals."""
        return {
            "checkpoint": self.group.name,
            "axes": list(self.axes),
            "prefer": self.prefer,
            "concurrency": {"ttft_tpot": self.levels[0], "tokens_per_second": self.levels[1]},
            "winner": self.winner.name if self.winner else None,
            "best": self.best.name if self.best else None,
            "candidates": [_row_json(row) for row in self.rows],
        }


def compare(
    group: Group,
    outcomes: Sequence[Outcome],
    axes: Sequence[str] = DEFAULT_AXES,
    prefer: str = "tpot",
    price: float | None = None,
) -> Comparison:
    """Make the comparison of what was measured. `price` is in dollars an hour of this machine.

    UsageError for an axis that is unknown, or that needs a price.
    """
    check_axes((*axes, prefer), price)
    levels = _levels(group)
    rows = tuple(_row(group, outcome, levels, price) for outcome in outcomes)
    measured = [row for row in rows if row.figures]
    for row in measured:
        row.on_front = not any(_dominates(other, row, axes) for other in measured)
    allowed = [row for row in measured if row.may_win]
    winner = _first(allowed, prefer)
    best = winner or _first(measured, axes[0])
    for row in measured:
        if best is not None and row is not best:
            row.against_best = _against(row, best, levels)
    return Comparison(group, rows, tuple(axes), prefer, levels, best, winner)


def check_axes(names: Sequence[str], price: float | None) -> None:
    """Raise UsageError for a name that is not an axis, and for the cost without a price."""
    for name in names:
        if name not in AXES:
            raise UsageError(unknown("axis", name, AXES, "axes"))
        if name == "cost" and price is None:
            raise UsageError("the axis cost needs a price: give --price, or --on with a row of hardware that has one")


def _levels(group: Group) -> tuple[int, int]:
    latency = group.options.latency
    return (min(latency.concurrency), max(latency.concurrency)) if latency else (1, 1)


def _row(group: Group, outcome: Outcome, levels: tuple[int, int], price: float | None) -> ComparedRow:
    if outcome.recorded is None or outcome.artifact is None:
        return ComparedRow(outcome)
    recorded, manifest = outcome.recorded, outcome.artifact.manifest
    size = artifact_size(outcome.artifact)
    figures = {"bits": exact(8 * size.weights / manifest.model.num_parameters), "bytes": exact(float(size.program))}
    against = {}
    for name in ("perplexity_ratio", "kl_mean", "top1_agreement"):
        if name in recorded.measured:
            figures[name] = recorded.measured[name].estimate
    for name, kind in _LATENCY.items():
        level = levels[name == "tokens_per_second"]
        rounds = recorded.rounds(kind, level)
        if len(rounds) > 1:
            figures[name] = ratio_interval(np.log(rounds))
            against[name] = recorded.measured[f"{kind}_ratio@{level}"].estimate
    if price is not None and "tokens_per_second" in figures:
        figures["cost"] = _cost(figures["tokens_per_second"], price)
    if recorded.peak_bytes:
        figures["peak_memory"] = ratio_interval(np.log(recorded.peak_bytes))
        against["peak_memory"] = recorded.measured["peak_memory_ratio"].estimate
    specs = gate_specs(group.measured_as(outcome.candidate).applied_gates)
    names = {measured.metric for measured in recorded.measured.values()} | set(recorded.measured)
    known = [spec for spec in specs if spec.metric in names]
    absent = tuple(spec.metric for spec in specs if spec.metric not in names)
    return ComparedRow(
        outcome, figures, against, gates=tuple(decide(known, recorded.measured)), unmeasured_gates=absent
    )


def _cost(rate: Estimate, price: float) -> Estimate:
    """Dollars for a million tokens of output at a price an hour."""
    dollars = price / 3600 * _TOKENS_OF_A_PRICE
    return Estimate(dollars / rate.value, dollars / rate.high, dollars / rate.low, rate.items, rate.method)


def _sign(name: str) -> int:
    return 1 if AXES[name] == "lower" else -1


def _dominates(one: ComparedRow, other: ComparedRow, axes: Sequence[str]) -> bool:
    """Report if one is at least as good on every axis that both have, and better on one, by the measured values."""
    shared = [name for name in axes if name in one.figures and name in other.figures]
    gaps = [_sign(name) * (one.figures[name].value - other.figures[name].value) for name in shared]
    return bool(gaps) and max(gaps) <= 0 and min(gaps) < 0


def _first(rows: Sequence[ComparedRow], name: str) -> ComparedRow | None:
    known = [row for row in rows if name in row.figures]
    return min(known, key=lambda row: _sign(name) * row.figures[name].value, default=None)


def _against(row: ComparedRow, best: ComparedRow, levels: tuple[int, int]) -> dict[str, Estimate]:
    one, other = row.outcome.recorded, best.outcome.recorded
    assert one is not None
    assert other is not None
    found = {"bytes": exact(row.figures["bytes"].value / best.figures["bytes"].value)}
    if one.accuracy and other.accuracy:
        found |= paired_accuracy(one.accuracy, other.accuracy)
    for name, kind in _LATENCY.items():
        level = levels[name == "tokens_per_second"]
        logs = [_log_ratios(each, kind, level) for each in (one, other)]
        if min(map(len, logs)) > 1:
            found[name] = unpaired_ratio_interval(*logs)
    return found


def _log_ratios(recorded: Recorded, kind: str, level: int) -> list[float]:
    """Logs of candidate over baseline, round by round."""
    pairs = zip(recorded.rounds(kind, level), recorded.rounds(kind, level, "baseline"), strict=True)
    return [float(np.log(candidate / baseline)) for candidate, baseline in pairs]


def is_ahead(row: ComparedRow, name: str) -> bool:
    """Report if the best is better than the row on an axis, by the whole paired interval."""
    estimate = row.against_best.get(name)
    if estimate is None:
        return False
    same = 0.0 if name in DIFFERENCES else 1.0
    return estimate.low > same if _sign(name) > 0 else estimate.high < same


def _row_json(row: ComparedRow) -> dict[str, Any]:
    outcome = row.outcome

    def estimates(found: Mapping[str, Estimate]) -> dict[str, Any]:
        return {name: asdict(estimate) for name, estimate in found.items()}

    return {
        "name": row.name,
        "source": outcome.candidate.source,
        "artifact": str(outcome.artifact.path) if outcome.artifact else None,
        "identity": outcome.artifact.manifest.identity if outcome.artifact else None,
        "report": str(outcome.evidence / "report.html") if outcome.evidence else None,
        "error": str(outcome.error) if outcome.error else None,
        "figures": estimates(row.figures),
        "against_baseline": estimates(row.against_baseline),
        "against_best": estimates(row.against_best),
        "verdict": row.verdict,
        "gates": [gate.model_dump(mode="json") for gate in row.gates],
        "unmeasured_gates": list(row.unmeasured_gates),
        "on_front": row.on_front,
        "prediction": outcome.prediction.model_dump(mode="json") if outcome.prediction else None,
    }
