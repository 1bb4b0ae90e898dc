"""Tables of evidence, gate verdicts and scores, as `build`, `validate`, `inspect` and `plan` print them."""

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from ingot.artifact import GateOutcome, Manifest
from ingot.cli.terminal.console import print_json, print_line, print_note, print_text
from ingot.cli.terminal.tables import Cell, print_table
from ingot.validation.prediction import figure_title, read_scoreboard
from ingot.validation.report import formatting as fmt
from ingot.validation.report.tables import metric_groups, verdict_sentences
from ingot.validation.result import Evidence

_STYLES = {"PASS": "green", "FAIL": "bold red", "UNDECIDED": "bold yellow", "better": "green", "worse": "bold red"}
_NOTE = (
    "better, worse: the whole interval is on one side of the baseline. A ratio is the mean of paired rounds, windows "
    "or probes, and may differ from the ratio of the two columns, which are medians for latencies."
)
_SCORES = ("figure", "scores", "inside", "coverage", "mean error", "median error", "worst", "bias")


def print_gates(gates: Sequence[GateOutcome]) -> None:
    """Print gates with measured value, 95 % interval, limit and verdict."""
    rows = []
    for gate in gates:
        [measured] = fmt.fitted(gate.name, [gate.measured], gate.low, gate.high)
        interval = "exact" if gate.low == gate.high else fmt.range_of(gate.name, gate.low, gate.high)
        rows.append((gate.name, _verdict(gate), measured, interval, fmt.limit(gate)))
    print_table("Gates", ("gate", "verdict", "measured", "95 % interval", "limit"), rows, left=2)


def print_evidence(evidence: Evidence, report: Path | None) -> None:
    """Print every metric of both sides with its 95 % interval, the gates, what they decided and the report's path."""
    rows: list[Sequence[Cell]] = []
    for group, metrics in metric_groups(evidence).items():
        rows.append([Text(group, style="bold")])
        for one in metrics:
            mark = Text(one.mark, style=_STYLES.get(one.mark, ""))
            rows.append((f"  {one.title}", mark, one.baseline, one.candidate, one.ratio, one.change, one.interval))
    title = f"Evidence: {evidence.candidate.name} compared with {evidence.baseline.name}"
    header = ("metric", "", "baseline", "candidate", "ratio (paired)", "change", "95 % interval")
    print_table(title, header, rows, left=2, optional=("change", "baseline"))
    if evidence.gates:
        print_gates(evidence.gates)
    for sentence in verdict_sentences(evidence):
        print_text(sentence)
    prediction = evidence.notes.prediction
    if prediction and prediction.sentence:
        print_text(f"prediction: {prediction.sentence}")
    if evidence.load:
        busy = Text("BUSY MACHINE: ", style="bold yellow") if evidence.load.is_busy else Text("machine: ")
        print_line(busy + Text(str(evidence.load)))
    if report:
        print_line(f"report {report}")
    print_note(_NOTE)


def print_warning_of(manifest: Manifest) -> None:
    """Print that no gate has passed an artifact, if so: NOT MEASURED, NO GATES or NOT PASSED."""
    if manifest.warning:
        print_line(Text(manifest.warning, style="bold yellow"))


def _verdict(gate: GateOutcome) -> Text:
    words = f"{gate.verdict} (advisory)" if gate.advisory else gate.verdict
    return Text(words, style="" if gate.advisory and gate.verdict != "PASS" else _STYLES[gate.verdict])


def print_scoreboard(folder: Path, as_json: bool) -> None:
    """Print the scores of all predictions in the folder, a row for each kind of figure."""
    board = read_scoreboard(folder)
    if as_json:
        figures = {row.figure: {**row._asdict(), "coverage": row.coverage} for row in board.rows}
        print_json({"predictions": list(map(str, board.files)), "unscored": board.unscored, "figures": figures})
        return
    rows = [
        (
            figure_title(row.figure),
            str(row.num_scores),
            str(row.inside),
            f"{row.coverage:.0%}",
            f"{row.mean_error:.1%}",
            f"{row.median_error:.1%}",
            f"{row.worst_error:.1%}",
            f"{row.bias:+.1%}",
        )
        for row in board.rows
    ]
    print_table(f"Predictions of {len(board.files)} builds, scored by what they measured", _SCORES, rows)
    print_note(
        "coverage: measured values inside of the predicted 95 % interval; bias: above 0, predictions are too high"
    )
