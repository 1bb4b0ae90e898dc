"""`ingot verify`: proves on this machine that no feature of the runtime changes an answer of an artifact."""

from collections.abc import Mapping
from pathlib import Path

from rich.text import Text

from ingot.artifact import open_artifact
from ingot.cli.failure import error_facts
from ingot.cli.terminal.console import print_json, print_line, print_note, print_text
from ingot.cli.terminal.progress_display import progress_shown
from ingot.cli.terminal.tables import Cell, print_table
from ingot.errors import GateError, UsageError
from ingot.validation.verify import FEATURES, CellResult, Subject, VerifyOptions, VerifyResult, open_subject, verify
from ingot.validation.verify.result import cell_text, matrix_rows, raise_for_cells, verify_sentences
from ingot.validation.windows import read_text

_STYLES = {"OK": "green", "DIFFERS": "bold red", "NOT EXERCISED": "bold yellow", "N/A": "dim"}


def verify_command(
    artifact: str,
    quick: bool,
    only: tuple[str, ...],
    seed: int,
    prompts: Path | None,
    draft: Path | None,
    processes: Mapping[str, int | None],
    output: Path | None,
    show_list: bool,
    no_verify: bool,
    as_json: bool,
) -> None:
    """Serve real prompts with every pair of features, and compare each answer with the plain path's."""
    opened = open_artifact(artifact, verify=not no_verify)
    divided = {name: value for name, value in processes.items() if value}
    subject = open_subject(opened, draft=draft, processes=divided)
    if show_list:
        _print_features(subject, as_json)
        return
    _refuse_inside(output, opened.path)
    text = read_text(prompts)[0] if prompts else None
    given = {"prompts": prompts, "draft": draft, **divided}.items()
    words = [f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}" for name, value in given if value]
    command = " ".join(["ingot verify", artifact, *words])
    with progress_shown():
        result = verify(subject, VerifyOptions(quick, only, seed, text), command)
    if output:
        _write(output, result)
    refused = _refusal(result)
    if as_json:
        facts = {**result.model_dump(mode="json"), "verdict": result.verdict}
        print_json({**facts, **({"error": error_facts(refused)} if refused else {})})
    else:
        print_verification(result)
    if refused:
        raise refused


def print_verification(result: VerifyResult) -> None:
    """Print the matrix, what did not pass, and what was verified."""
    if len(result.cells) > 1:
        header = ("feature", "alone", *(str(number + 1) for number in range(len(result.features))))
        rows = [(name, *map(_styled, cells)) for name, cells in matrix_rows(result)]
        print_table("Pairs of features, against the plain path", header[: len(rows[0])], rows)
    for cell in result.cells if len(result.cells) == 1 else result.failures:
        _print_cell(cell)
    for sentence in verify_sentences(result):
        print_text(sentence)


def _print_cell(cell: CellResult) -> None:
    print_line(Text(f"{cell.name}: ") + Text(cell.verdict, style=_STYLES[cell.verdict]))
    for line in cell_text(cell):
        print_line(f"    {line}")


def _styled(cell: CellResult | str) -> Cell:
    if isinstance(cell, str):
        return cell
    words = {"OK": "ok", "DIFFERS": "DIFFERS", "NOT EXERCISED": "NOT EX.", "N/A": "n/a"}
    return Text(words[cell.verdict], style=_STYLES[cell.verdict])


def _print_features(subject: Subject, as_json: bool) -> None:
    """Print every feature, and why the artifact does not have it."""
    reasons = {name: row.unavailable(subject) for name, row in FEATURES.items()}
    if as_json:
        print_json(
            [
                {"name": name, "summary": row.summary, "unavailable": reasons[name] or None}
                for name, row in FEATURES.items()
            ]
        )
        return
    rows = [(name, row.summary, reasons[name] or "yes") for name, row in FEATURES.items()]
    print_table("Features that must not change an answer", ("feature", "what runs", "available"), rows, left=3)
    print_note("verify one pair with --only, as in --only prefix-hit+preemption")


def _refusal(result: VerifyResult) -> GateError | None:
    try:
        raise_for_cells(result)
    except GateError as error:
        return error
    return None


def _refuse_inside(output: Path | None, artifact: Path) -> None:
    if output == Path("-"):
        raise UsageError("-o -: standard output is not a file; use --json to print the result there, or name a file")
    if output and output.resolve().is_relative_to(artifact.resolve()):
        raise UsageError(f"-o {output}: is in the artifact, which is sealed; name a file elsewhere")


def _write(output: Path, result: VerifyResult) -> None:
    try:
        output.write_text(result.as_json(), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"-o {output}: the file cannot be written: {error.strerror}") from error
