"""`ingot build`: builds a recipe into a sealed artifact and prints the evidence."""

import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import join
from shutil import which
from typing import Any

import click
import onnx_ir as ir
from rich.text import Text

from ingot.artifact import Artifact
from ingot.builder import BuildResult, Observers, build
from ingot.builder.flow import Unchanged, unchanged
from ingot.cli.ci_reports import CIReports
from ingot.cli.evidence import print_evidence, print_gates, print_warning_of
from ingot.cli.failure import error_facts
from ingot.cli.set_shorthands import with_shorthands
from ingot.cli.terminal.console import print_json, print_line, print_note, show_log, stdout, visible
from ingot.cli.terminal.progress_display import progress_shown
from ingot.cli.terminal.tables import print_table
from ingot.errors import GateError, UsageError, unknown
from ingot.passes.manager import PassRecord, print_after, save_after_each, timing_table
from ingot.passes.quantization.bit_assignment import assignment_table
from ingot.passes.quantization.mixed_precision import MIXED_FACTS, MixedPrecision
from ingot.passes.registry import pass_names
from ingot.pipeline.compile import Observer
from ingot.sizes import format_bytes
from ingot.validation.evidence import Evidence
from ingot.validation.evidence_json import summary
from ingot.validation.gates import raise_for


def build_command(
    recipe: str,
    checkpoint: Path | None,
    evaluation: Path | None,
    calibration: Path | None,
    chat_template: Path | None,
    overrides: tuple[str, ...],
    output: Path | None,
    print_ir_after: tuple[str, ...],
    save_ir: Path | None,
    time_passes: bool,
    verbose: bool,
    no_resume: bool,
    if_changed: bool,
    force: bool,
    require_gates: bool,
    as_json: bool,
    reports: CIReports,
) -> None:
    """Build RECIPE (the name of a shipped recipe, or a YAML file), measure it, and seal it if its gates pass."""
    _check_pass_names(print_ir_after)
    show_log(details=verbose)
    shorthands = {
        "CHECKPOINT": checkpoint,
        "--eval": evaluation,
        "--calibration": calibration,
        "--chat-template": chat_template,
    }
    overrides = with_shorthands(overrides, shorthands)
    last = unchanged(recipe, overrides, output) if if_changed else None
    if last:
        reports.decided(last.gates)
        _print_unchanged(last, as_json)
        return
    seen: list[tuple[Evidence, Path]] = []

    def measured(evidence: Evidence, report: Path) -> None:
        seen.append((evidence, report))
        reports.measured(evidence)
        if not as_json:
            print_evidence(evidence, report)

    watch = _watch(print_ir_after, save_ir, as_json)
    try:
        with progress_shown():
            result = build(recipe, overrides, output, Observers(watch, measured), not no_resume, require_gates, force)
    except GateError as error:
        if as_json:  # the bars are closed, which redirect stdout
            print_json({**_refused_facts(*seen[0]), "error": error_facts(error)})
        raise
    _note_passes_that_did_not_run(print_ir_after, result)
    if as_json:
        print_json(_facts(result))
        return
    if time_passes:
        header, *rows = timing_table(result.compiled.passes)
        print_table("Passes", header, rows)
    _note_prediction(result.compiled.pass_facts, result.evidence)
    _print_artifact(result.artifact)
    _print_sample(result)
    _print_next(result)


def _print_unchanged(last: Unchanged, as_json: bool) -> None:
    """Print what the last build made and its gates. Raises its GateError if they rejected it."""
    if last.gates and not as_json:
        print_gates(last.gates)
    if last.artifact is None:
        print_note("nothing has changed since the gates rejected the last build")
        raise_for(last.gates)
        return
    if as_json:
        gates = [gate.model_dump(mode="json") for gate in last.gates]
        print_json({**_artifact_facts(last.artifact), "unchanged": True, "gates": gates})
        return
    print_line(f"unchanged {last.artifact.path}, identity {last.artifact.manifest.identity[:16]}")
    print_warning_of(last.artifact.manifest)


def _watch(names: tuple[str, ...], folder: Path | None, as_json: bool) -> Observer:
    """Print the IR after the named passes and the choices of mixed-precision; save the IR after every pass."""
    watchers: list[Observer] = [print_after(names, lambda text: click.echo(text, nl=False, err=as_json))]
    if not as_json:
        watchers.append(_print_assignment)
    if folder is not None:
        watchers.append(save_after_each(folder))

    def watch(model: ir.Model, record: PassRecord) -> None:
        for watcher in watchers:
            watcher(model, record)

    return watch


def _check_pass_names(names: tuple[str, ...]) -> None:
    known = pass_names()
    for name in names:
        if name not in known and name != "all":
            raise UsageError(f"--print-ir-after: {unknown('pass', name, ['all', *known], 'passes')}")


def _note_passes_that_did_not_run(names: tuple[str, ...], result: BuildResult) -> None:
    ran = [record.name for record in result.compiled.passes]
    for name in names:
        if name not in ran and name != "all":
            print_note(f"--print-ir-after: this build has no pass {name!r}; it ran {', '.join(dict.fromkeys(ran))}")


def _print_artifact(artifact: Artifact) -> None:
    size = format_bytes(artifact.total_bytes)
    print_line(f"sealed {artifact.path} ({size}), identity {artifact.manifest.identity[:16]}")


def _print_sample(result: BuildResult) -> None:
    """Print the sample that the artifact generated before it was sealed, if there is one."""
    sample = result.sample
    if sample is None:
        return
    console = stdout()
    console.rule(style="dim")
    console.print(Text(visible(sample.prompt), style="bold") + Text(visible(sample.candidate)), soft_wrap=True)
    console.rule(style="dim")


def _print_next(result: BuildResult) -> None:
    """Print a command to type next, and what was not measured."""
    artifact, prompt = result.artifact, result.sample.prompt.splitlines()[0] if result.sample else ""
    if result.evidence is None:
        print_warning_of(artifact.manifest)
    print_note(f"next: {join([_program(), 'run', str(artifact.path), *([prompt] if prompt else [])])}")


def _program() -> str:
    """The name by which the shell finds this command: a virtual environment that is not active needs its path."""
    return "ingot" if which("ingot") or Path(sys.argv[0]).name != "ingot" else sys.argv[0]


def _refused_facts(evidence: Evidence, report: Path) -> dict[str, object]:
    """JSON of a build that its gates refused: no artifact, but all measurements."""
    return {"artifact": None, "report": str(report), "evidence": summary(evidence)}


def _facts(result: BuildResult) -> dict[str, object]:
    return {
        **_artifact_facts(result.artifact),
        "passes": [
            {"name": r.name, "seconds": r.seconds, "nodes": r.nodes_after, "weight_bytes": r.weight_bytes_after}
            for r in result.compiled.passes
        ],
        "evidence": summary(result.evidence) if result.evidence else None,
    }


def _artifact_facts(artifact: Artifact) -> dict[str, object]:
    return {
        "artifact": str(artifact.path),
        "identity": artifact.manifest.identity,
        "total_bytes": artifact.total_bytes,
    }


def _print_assignment(model: ir.Model, record: PassRecord) -> None:
    """Print the table of choices after the pass mixed-precision; nothing after any other."""
    if isinstance(record.pass_, MixedPrecision):
        header, *rows = assignment_table(MIXED_FACTS.of(model))
        print_table("Mixed precision: KL in nats per token, of each weight alone", header, rows)


def _note_prediction(facts: Mapping[str, Any], evidence: Evidence | None) -> None:
    """Print the predicted KL next to the measured one, if there are both."""
    measured = None if evidence is None else evidence.measured.get("kl_mean")
    if MixedPrecision.name not in facts or measured is None:
        return
    predicted = facts[MixedPrecision.name]["predicted_kl"]
    print_note(
        f"mixed-precision predicted a KL of {predicted:.4g} of its weights on the calibration text; the whole artifact "
        f"has {measured.estimate.value:.4g} on the evaluation text"
    )
