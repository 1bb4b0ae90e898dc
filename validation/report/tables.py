"""The report's tables as text: gates, metrics by group, significant changes, samples."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ingot.artifact import GateOutcome
from ingot.artifact.metrics import METRICS, Section
from ingot.validation.latency.metrics import LevelSummary, summarize
from ingot.validation.prediction import Prediction, figure_title, figure_unit
from ingot.validation.report import charts
from ingot.validation.report import formatting as fmt
from ingot.validation.result import Evidence, Sample
from ingot.validation.statistics import Measured

_GROUPS: dict[Section | None, str] = {"evaluation": "Accuracy", "verify": "Runtime"}


@dataclass(frozen=True)
class GateRow:
    """One gate. `bar` is its interval and limit as SVG."""

    title: str
    verdict: str
    advisory: bool
    measured: str
    interval: str
    limit: str
    bar: Markup


@dataclass(frozen=True)
class MetricRow:
    """One metric. `mark` is "better", "worse" or empty."""

    title: str
    mark: str
    baseline: str
    candidate: str
    ratio: str
    change: str
    interval: str
    detectable: str
    method: str
    num_items: int

    @property
    def cells(self) -> dict[str, str]:
        """The numbers of the row, by the label that each has where there is no space for columns."""
        return {
            "Baseline": self.baseline,
            "Candidate": self.candidate,
            "Ratio (paired)": self.ratio,
            "Change": self.change,
            "95 % interval": self.interval,
            "Detectable": self.detectable,
        }


@dataclass(frozen=True)
class ChangeRow:
    """A metric that got significantly better or worse, and the gates on it: "no gate", "gate PASS"."""

    title: str
    change: str
    interval: str
    gate: str


@dataclass(frozen=True)
class SampleRow:
    """One prompt with both continuations, each split after the beginning that both share."""

    prompt: str
    shared: str
    baseline: str | None
    candidate: str


@dataclass(frozen=True)
class PredictionRow:
    """One predicted figure; measured, error and outcome are "-" where it was not measured."""

    title: str
    predicted: str
    interval: str
    measured: str
    error: str
    outcome: str


def prediction_rows(prediction: Prediction | None) -> list[PredictionRow]:
    """The figures that were predicted before the measurement, with their scores."""
    rows = []
    for name, figure in prediction.figures.items() if prediction else ():
        unit, score = figure_unit(name), prediction.scores.get(name) if prediction else None
        exact, ends = figure.low == figure.high, (fmt.quantity(end, unit) for end in (figure.low, figure.high))
        rows.append(
            PredictionRow(
                title=figure_title(name).capitalize(),
                predicted=fmt.quantity(figure.value, unit),
                interval="exact" if exact else " to ".join(ends),
                measured=fmt.quantity(score.measured, unit) if score else "-",
                error=f"{score.error:+.1%}" if score else "-",
                outcome=("inside" if score.inside else "OUTSIDE") if score else "-",
            )
        )
    return rows


def gate_rows(evidence: Evidence) -> list[GateRow]:
    """The gates that must pass, then the advisory ones."""
    return [_gate_row(gate) for gate in sorted(evidence.gates, key=lambda gate: gate.advisory)]


def metric_groups(evidence: Evidence) -> dict[str, list[MetricRow]]:
    """Heading -> metrics: accuracy, latency at each concurrency, size and memory."""
    groups: dict[str, list[MetricRow]] = {}
    for measured in evidence.measured.values():
        groups.setdefault(_group(measured), []).append(_metric_row(measured))
    return groups


def level_groups(evidence: Evidence) -> dict[str, list[LevelSummary]]:
    """Heading -> percentiles of both sides, for each concurrency."""
    groups: dict[str, list[LevelSummary]] = {}
    for level in summarize(evidence.latency) if evidence.latency else []:
        groups.setdefault(f"{level.level} in flight", []).append(level)
    return groups


def changes(evidence: Evidence, mark: str) -> list[ChangeRow]:
    """The metrics marked "better" or "worse"."""
    return [
        ChangeRow(
            title=fmt.key_title(key),
            change=fmt.change(measured),
            interval=fmt.interval(measured),
            gate=_gates_on(key, evidence.gates),
        )
        for key, measured in evidence.measured.items()
        if measured.change == mark
    ]


def sample_rows(samples: Sequence[Sample]) -> list[SampleRow]:
    """The generated samples."""
    return [_sample_row(sample) for sample in samples]


def verdict_words(evidence: Evidence) -> str:
    """PASS, FAIL, UNDECIDED; NO GATES, or NOT MEASURED where accuracy and latency are missing too."""
    if evidence.verdict:
        return evidence.verdict
    return "NO GATES" if evidence.accuracy or evidence.latency else "NOT MEASURED"


def verdict_sentences(evidence: Evidence) -> list[str]:
    """Sentences on the gates' decisions, and on what was not measured."""
    required = [gate for gate in evidence.gates if not gate.advisory]
    sentences = [_gate_sentence(required)]
    missed = [gate for gate in evidence.gates if gate.advisory and gate.verdict != "PASS"]
    if missed:
        named = ", ".join(f"{fmt.key_title(gate.name)} {gate.verdict}" for gate in missed)
        sentences.append(f"Advisory gates that do not pass, which does not prevent a seal: {named}.")
    ungated = [row for row in changes(evidence, "worse") if row.gate == "no gate"]
    if ungated:
        named = ", ".join(f"{row.title} ({row.change})" for row in ungated)
        sentences.append(f"Significantly worse than the baseline, without a gate: {named}.")
    absent = [name for name, part in (("accuracy", evidence.accuracy), ("latency", evidence.latency)) if not part]
    if absent:
        sentences.append(f"NOT MEASURED: {' and '.join(absent)}.")
    if sentence := overlap_sentence(evidence):
        sentences.append(sentence)
    return sentences


def overlap_sentence(evidence: Evidence) -> str:
    """Return how much of the evaluation the calibration text has; "" for nothing, and for uncalibrated builds."""
    record = evidence.candidate.calibration
    if record is None or not record.evaluation_overlap:
        return ""
    return f"OVERLAP: the calibration text {record.text} has {record.evaluation_overlap:.2%} of the evaluated tokens."


def _gate_sentence(required: Sequence[GateOutcome]) -> str:
    counts = {verdict: sum(gate.verdict == verdict for gate in required) for verdict in ("FAIL", "UNDECIDED")}
    total = f"{len(required)} {'gate' if len(required) == 1 else 'gates'}"
    if not required:
        return "NO GATES: nothing had to hold for this artifact to be sealed."
    if counts["FAIL"]:
        undecided = f", {counts['UNDECIDED']} undecided" if counts["UNDECIDED"] else ""
        return f"{counts['FAIL']} of {total} failed{undecided}: this artifact is rejected."
    if counts["UNDECIDED"]:
        return f"{counts['UNDECIDED']} of {total} undecided: the sample is too small, and such a gate does not pass."
    return f"{total} passed: every 95 % interval is on the right side of its limit."


def _gate_row(gate: GateOutcome) -> GateRow:
    [measured] = fmt.fitted(gate.name, [gate.measured], gate.low, gate.high)
    return GateRow(
        title=fmt.key_title(gate.name),
        verdict=gate.verdict,
        advisory=gate.advisory,
        measured=measured,
        interval="exact" if gate.low == gate.high else fmt.range_of(gate.name, gate.low, gate.high),
        limit=fmt.limit(gate),
        bar=Markup(charts.gate_bar(gate)),
    )


def _metric_row(measured: Measured) -> MetricRow:
    baseline, candidate = fmt.sides(measured)
    return MetricRow(
        title=fmt.title(measured.metric),
        mark=measured.change or "",
        baseline=baseline,
        candidate=candidate,
        ratio=fmt.ratio(measured),
        change=fmt.change(measured),
        interval=fmt.interval(measured),
        detectable=fmt.detectable(measured),
        method=measured.estimate.method,
        num_items=measured.estimate.items,
    )


def _group(measured: Measured) -> str:
    if measured.level is not None:
        return f"Latency, {measured.level} in flight"
    return _GROUPS.get(METRICS[measured.metric].section, "Size and memory")


def _gates_on(key: str, gates: Sequence[GateOutcome]) -> str:
    found = [f"{'advisory gate' if gate.advisory else 'gate'} {gate.verdict}" for gate in gates if gate.name == key]
    return ", ".join(found) or "no gate"


def _sample_row(sample: Sample) -> SampleRow:
    pairs = enumerate(zip(sample.candidate, sample.baseline or "", strict=False))
    shorter = min(len(sample.candidate), len(sample.baseline or ""))
    shared = next((index for index, (one, other) in pairs if one != other), shorter)
    return SampleRow(
        prompt=sample.prompt,
        shared=sample.candidate[:shared],
        baseline=None if sample.baseline is None else sample.baseline[shared:],
        candidate=sample.candidate[shared:],
    )
