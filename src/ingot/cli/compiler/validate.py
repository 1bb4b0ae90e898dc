"""Commands that check and measure a sealed artifact again: `ingot validate` and `ingot quantize-report`."""

from pathlib import Path

from ingot.artifact import open_artifact
from ingot.cli.ci_reports import CIReports
from ingot.cli.evidence import print_evidence, print_gates, print_warning_of
from ingot.cli.failure import error_facts
from ingot.cli.terminal.console import print_json, print_line, print_note, print_text
from ingot.cli.terminal.progress_display import progress_shown
from ingot.cli.terminal.tables import print_table
from ingot.errors import GateError, UsageError
from ingot.validation.evidence import Evidence, require_passed, write_evidence
from ingot.validation.evidence_json import summary
from ingot.validation.report.quantization_text import code_bars, shown_columns, summary_sentences, weight_cells


def validate_command(
    artifact: Path,
    checkpoint: Path | None,
    baseline: Path | None,
    overrides: tuple[str, ...],
    evidence: Path | None,
    as_json: bool,
    reports: CIReports,
) -> None:
    """Check every digest of ARTIFACT; with a checkpoint or a baseline also measure it again by its own recipe."""
    if checkpoint is None and baseline is None:
        if overrides or evidence:
            raise UsageError(
                f"{'--set' if overrides else '--evidence'} is for measuring again; add --checkpoint FOLDER or "
                "--baseline ARTIFACT"
            )
        _check_digests(artifact, as_json, reports)
        return
    from ingot.builder import remeasure  # needs the compiler's packages; checking digests does not

    with progress_shown():
        found = remeasure(artifact, checkpoint=checkpoint, baseline=baseline, overrides=overrides)
    if evidence:
        write_evidence(found, evidence)
    reports.measured(found)
    sources = (("--checkpoint", checkpoint), ("--baseline", baseline))
    given = [word for option, path in sources if path for word in (option, str(path))]
    settings = [word for override in overrides for word in ("--set", override)]
    refused = _refusal(found, ["ingot", "validate", str(artifact), *given, *settings])
    if as_json:
        print_json({**summary(found), **({"error": error_facts(refused)} if refused else {})})
    else:
        print_evidence(found, evidence / "report.html" if evidence else None)
    if refused:
        raise refused


def _refusal(evidence: Evidence, command: list[str]) -> GateError | None:
    try:
        require_passed(evidence, command)
    except GateError as error:
        return error
    return None


def _check_digests(artifact: Path, as_json: bool, reports: CIReports) -> None:
    manifest = open_artifact(artifact).manifest
    reports.decided(manifest.gates)
    if as_json:
        gates = [gate.model_dump(mode="json") for gate in manifest.gates]
        facts = {"identity": manifest.identity, "verdict": manifest.verdict, "files": len(manifest.files)}
        print_json({**facts, "gates": gates})
        return
    print_line(f"all {len(manifest.files)} files are what the manifest says; identity {manifest.identity}")
    if manifest.gates:
        print_gates(manifest.gates)
    print_warning_of(manifest)
    print_note("nothing was measured; add --checkpoint FOLDER or --baseline ARTIFACT to measure again")


def quantize_report_command(
    artifact: Path,
    checkpoint: Path | None,
    text: Path | None,
    tokens: int | None,
    top: int,
    no_verify: bool,
    as_json: bool,
) -> None:
    """Show ARTIFACT's quantized weights, the most costly first: bits, bytes, scales, errors, KL."""
    from ingot.builder.quantize_report import KLText, quantize_report

    opened = open_artifact(artifact, verify=not no_verify)
    with progress_shown():
        found, remarks = quantize_report(opened, checkpoint, KLText(text, tokens) if text else None)
    if as_json:
        print_json({"artifact": opened.manifest.identity, **found.as_json(), "remarks": remarks})
        return
    for remark in remarks:
        print_note(remark)
    if not found.weights:
        print_line(f"{artifact}: no weight is quantized")
        return
    columns = shown_columns(found)
    rows = [(*weight_cells(weight, columns).values(), code_bars(weight)) for weight in found.worst_first[:top]]
    print_table("Quantized weights, the worst first", (*columns, "Codes"), rows, left=2)
    for sentence in summary_sentences(found):
        print_text(f"{sentence}.")
    if len(found.weights) > top:
        print_note(f"{top} of {len(found.weights)} weights are shown; --top {len(found.weights)} shows all")
