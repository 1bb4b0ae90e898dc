"""`ingot compare`: recipes and artifacts in one table, with intervals, the Pareto front and the winner."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ingot.builder.compare.candidates import ComparedSources, Group, read_groups
from ingot.builder.compare.predicted import PredictedRow, predict_group
from ingot.builder.compare.results import AXES, DIFFERENCES, ComparedRow, Comparison, check_axes, compare, is_ahead
from ingot.builder.compare.run import locked, run_group
from ingot.builder.compare.winner import require_recipe_file, winner_file, write_winner
from ingot.cli.set_shorthands import with_shorthands
from ingot.cli.terminal.console import print_json, print_line, print_note, print_text
from ingot.cli.terminal.progress_display import progress_shown
from ingot.cli.terminal.tables import print_table
from ingot.errors import GateFailed, GateUndecided
from ingot.planning.hardware import Hardware, find_hardware
from ingot.sizes import format_bytes
from ingot.validation.report import formatting as fmt
from ingot.validation.report.page import Page, PageSection, PageTable, render_page
from ingot.validation.statistics import Estimate

STATE = Path("artifacts") / "compare"
REPORT = "report.html"
_NOTES = (
    "Every candidate of a checkpoint reads the same windows of text and serves the same prompts as one baseline: the"
    " first recipe without its lossy passes. Accuracy is paired with the baseline and with the best window by window,"
    " latency with the baseline round by round. Candidates are measured one after another, so a ratio of latencies to"
    " the best is one of two ratios to the baseline, with Welch's interval.",
    "±: half of the 95 % interval. Front: no other candidate is at least as good on every axis and better on one, by"
    " the measured values.",
)


def compare_command(
    sources: tuple[str, ...],
    checkpoints: tuple[Path, ...],
    evaluation: Path | None,
    calibration: Path | None,
    overrides: tuple[str, ...],
    gates: tuple[str, ...],
    axes: str,
    prefer: str,
    hardware_name: str | None,
    hardware_files: tuple[Path, ...],
    price: float | None,
    only_predict: bool,
    state: Path | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Compare every SOURCE, a recipe or an artifact."""
    hardware = find_hardware(hardware_name, hardware_files) if hardware_name else None
    price = price if price is not None or hardware is None else hardware.price_per_hour
    chosen = tuple(name.strip() for name in axes.split(","))
    check_axes((*chosen, prefer), price)
    if output:
        require_recipe_file(output)
    given = with_shorthands(overrides, {"--eval": evaluation, "--calibration": calibration})
    groups = read_groups(ComparedSources(sources, checkpoints, given, gates))
    if only_predict:
        row = (hardware_name, hardware) if hardware_name and hardware else None
        _predict(groups, row, price, as_json)
        return 0
    folder = state or STATE
    with progress_shown(), locked(folder):
        for group in groups:
            _ = group.options
        comparisons = [compare(group, run_group(group, folder), chosen, prefer, price) for group in groups]
        report = folder / REPORT
        report.write_text(_page(comparisons, folder), encoding="utf-8")
    written = _write_winners(comparisons, output)
    if as_json:
        files = {name: str(file) for name, file in written.items()}
        print_json({"report": str(report), "winners": files, "comparisons": [one.as_json() for one in comparisons]})
    else:
        _print(comparisons, report, written)
    return max(map(_exit_code, comparisons), default=0)


def _write_winners(comparisons: Sequence[Comparison], output: Path | None) -> dict[str, Path]:
    """Write the winner of each checkpoint; return the files by checkpoint."""
    written = {}
    for one in comparisons if output else ():
        if one.winner is not None and output:
            file = winner_file(output, one, len(comparisons))
            write_winner(one, one.winner, file)
            written[one.group.name] = file
    return written


def _exit_code(comparison: Comparison) -> int:
    if any(row.outcome.error for row in comparison.rows):
        return 1
    if comparison.winner is not None:
        return 0
    is_undecided = any(row.verdict == "UNDECIDED" for row in comparison.rows)
    return GateUndecided.exit_code if is_undecided else GateFailed.exit_code


def _print(comparisons: Sequence[Comparison], report: Path, written: dict[str, Path]) -> None:
    for one in comparisons:
        for table in _tables(one):
            left = 3 if "front" in table.header else 1
            print_table(f"{one.group.name}: {table.caption}", table.header, table.rows, left=left)
        for sentence in _sentences(one):
            print_text(sentence)
        for row in one.rows:
            if row.outcome.error:
                print_line(f"{row.name}: {row.outcome.error}")
        if one.group.name in written:
            print_line(f"winner {written[one.group.name]}")
    print_line(f"report {report}")
    for note in _NOTES:
        print_note(note)


_Cell = Callable[[Estimate], str]


def _milliseconds(estimate: Estimate) -> str:
    return fmt.plus_minus(estimate, 1e3)


_CELLS: dict[str, tuple[str, _Cell]] = {
    "bits": ("bits", fmt.plus_minus),
    "bytes": ("size", lambda estimate: format_bytes(estimate.value)),
    "perplexity_ratio": ("perplexity x", fmt.plus_minus),
    "kl_mean": ("KL, nats", fmt.plus_minus),
    "top1_agreement": ("top-1 %", lambda estimate: fmt.plus_minus(estimate, 100)),
    "ttft": ("TTFT ms", _milliseconds),
    "tpot": ("TPOT ms", _milliseconds),
    "tokens_per_second": ("tokens/s", fmt.plus_minus),
    "peak_memory": ("peak MB", lambda estimate: fmt.plus_minus(estimate, 1e-6)),
    "cost": ("$ a 1M tokens", fmt.plus_minus),
}


def _tables(comparison: Comparison) -> list[PageTable]:
    """Figures of all candidates, then the ratios to the baseline, then to the best."""
    rows = [row for row in comparison.rows if row.figures]
    if not rows:
        return []
    names = [name for name in AXES if any(name in row.figures for row in rows)]
    header = ["candidate", "front", "gates", *(_title(name, comparison) for name in names)]
    cells = [
        [row.name, "front" if row.on_front else "", row.verdict, *(_cell(row.figures, name) for name in names)]
        for row in rows
    ]
    found = [PageTable("figures", header, cells, left=3, links=[_link(row) for row in rows])]
    ratios = [("of the baseline", [row.against_baseline for row in rows], rows)]
    if comparison.best is not None and len(rows) > 1:
        others = [row for row in rows if row is not comparison.best]
        ratios.append((f"against the best, {comparison.best.name}", [row.against_best for row in others], others))
    for caption, paired, shown in ratios:
        kinds = [name for name in AXES if any(name in one for one in paired)]
        titles = ["candidate", *(_paired_title(name, comparison) for name in kinds)]
        found.append(
            PageTable(caption, titles, [_paired_row(row, one, kinds) for row, one in zip(shown, paired, strict=True)])
        )
    return found


def _title(name: str, comparison: Comparison) -> str:
    title = _CELLS[name][0]
    if name in ("ttft", "tpot"):
        return f"{title} @{comparison.levels[0]}"
    return f"{title} @{comparison.levels[1]}" if name in ("tokens_per_second", "cost") else title


def _paired_title(name: str, comparison: Comparison) -> str:
    """A difference has its figure's unit, a ratio none."""
    if name in DIFFERENCES:
        return f"{_CELLS[name][0]}, difference"
    return f"{_title(name, comparison).replace(' ms', '').replace(' MB', '').removesuffix(' x')} x"


def _cell(figures: dict[str, Estimate], name: str) -> str:
    return _CELLS[name][1](figures[name]) if name in figures else "-"


def _paired_row(row: ComparedRow, paired: dict[str, Estimate], kinds: Sequence[str]) -> list[str]:
    scales = {"top1_agreement": 100.0}
    return [
        row.name,
        *(fmt.with_interval(paired[name], scales.get(name, 1.0)) if name in paired else "-" for name in kinds),
    ]


def _link(row: ComparedRow) -> str:
    """The address of the candidate's own report, relative to the comparison's."""
    return str(row.outcome.evidence / "report.html") if row.outcome.evidence else ""


def _sentences(comparison: Comparison) -> list[str]:
    """The front, the winner and how sure it is, gates that were not measured, and predictions."""
    front = [row.name for row in comparison.rows if row.on_front]
    found = [f"Front on {', '.join(comparison.axes)}: {', '.join(front) or 'nothing was measured'}."]
    winner = comparison.winner
    if winner is not None:
        others = [row for row in comparison.rows if row.may_win and row is not winner]
        close = [row.name for row in others if not is_ahead(row, comparison.prefer)]
        sure = f"; not surely better than {', '.join(close)}" if close else ""
        gates = "no gate decides" if winner.verdict == "-" else "its gates pass"
        found.append(f"Winner: {winner.name}, the best {comparison.prefer} where {gates}{sure}.")
    elif any(row.figures for row in comparison.rows):
        found.append("No winner: no candidate passes its gates.")
    missed = [
        f"{row.name} {gate.name} {gate.verdict}"
        for row in comparison.rows
        for gate in row.gates
        if gate.verdict != "PASS"
    ]
    if missed:
        found.append(f"Gates that do not pass: {', '.join(missed)}.")
    absent = sorted({name for row in comparison.rows for name in row.unmeasured_gates})
    if absent:
        found.append(f"Gates that a comparison does not measure, and a build does: {', '.join(absent)}.")
    scores = [
        score for row in comparison.rows if row.outcome.prediction for score in row.outcome.prediction.scores.values()
    ]
    if scores:
        inside = sum(score.inside for score in scores)
        found.append(
            f"Predicted before the measurements: {inside} of {len(scores)} figures are inside of their intervals."
        )
    return found


def _page(comparisons: Sequence[Comparison], folder: Path) -> str:
    sections = []
    for number, one in enumerate(comparisons):
        errors = [f"{row.name}: {row.outcome.error}" for row in one.rows if row.outcome.error]
        tables = [
            replace(table, links=[os.path.relpath(link, folder) if link else "" for link in table.links])
            for table in _tables(one)
        ]
        words = [*_sentences(one), *errors]
        sections.append(PageSection(f"checkpoint-{number}", one.group.name, sentences=words, tables=tables))
    sections.append(PageSection("method", "Method", sentences=_NOTES))
    candidates = sum(len(one.rows) for one in comparisons)
    return render_page(Page("Ingot comparison", f"{candidates} candidates", sections))


_PREDICTED = (
    "candidate",
    "weights",
    "of baseline",
    "KV a token",
    "TTFT ms",
    "TPOT ms",
    "of baseline",
    "tokens/s",
    "accuracy",
)


def _predict(
    groups: Sequence[Group], hardware: tuple[str, Hardware] | None, price: float | None, as_json: bool
) -> None:
    """Print what planning says of every candidate, before anything is built."""
    found = {group.name: predict_group(group, hardware, price) for group in groups}
    if as_json:
        on = hardware[0] if hardware else None
        print_json(
            {"hardware": on, "predicted": {name: [row.as_json() for row in rows] for name, rows in found.items()}}
        )
        return
    for name, rows in found.items():
        print_table(f"{name}: predicted", _PREDICTED, [_predicted_row(row, rows[0]) for row in rows])
        for row in rows:
            if row.reason:
                print_text(f"{row.name}: {row.reason}")
    if hardware is None:
        print_note("times are unknown without hardware: name a row with --on; `ingot plan` lists all")
    else:
        print_note("times are a data sheet's, with the interval of its row: `ingot plan --on` explains them")
    print_note("accuracy is unknown until it is measured: run the same command without --predict")


def _predicted_row(row: PredictedRow, baseline: PredictedRow) -> list[str]:
    if row.subject is None:
        return [row.name, *["-"] * 7, "unknown"]
    size, latency, first = row.subject.program.weight_bytes, row.latency, baseline.latency
    share = f"{size / baseline.subject.program.weight_bytes:.2f} x" if baseline.subject else "-"
    cells = [row.name, format_bytes(size), share, f"{row.subject.shape.kv_token_bytes:,.0f} B"]
    if latency is None:
        return [*cells, *["-"] * 4, "unknown"]
    error = latency.relative_error
    gain = f"{latency.tpot / first.tpot:.2f} x" if first else "-"
    times = [f"{seconds * 1e3:,.2f} ±{seconds * error * 1e3:,.2f}" for seconds in (latency.ttft, latency.tpot)]
    return [*cells, *times, gain, f"{latency.tokens_per_second:,.0f}", "unknown"]
