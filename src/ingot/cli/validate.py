"""Commands that check and measure a sealed artifact again: `ingot validate` and `ingot quantize-report`."""

from pathlib import Path

import click

from ingot.artifact import open_artifact
from ingot.builder import remeasure
from ingot.builder.quantize_report import TextOptions, quantize_report
from ingot.cli.console import print_json, print_note, print_table, progress_bars, stdout
from ingot.cli.evidence import print_evidence, print_gates
from ingot.errors import UsageError
from ingot.validation.evidence import write_evidence
from ingot.validation.evidence_json import summary
from ingot.validation.gates import raise_for
from ingot.validation.report.quantization_text import code_bars, shown_columns, summary_sentences, weight_cells


@click.command("validate")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Make the baseline from this checkpoint folder.")
@click.option("--baseline", type=click.Path(path_type=Path), help="Compare with this artifact.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set evaluation, latency or gates.")
@click.option("--evidence", type=click.Path(path_type=Path), metavar="DIR", help="Write the new evidence here.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def validate_command(
    artifact: Path,
    checkpoint: Path | None,
    baseline: Path | None,
    overrides: tuple[str, ...],
    evidence: Path | None,
    as_json: bool,
) -> None:
    """Check every digest of ARTIFACT; with a checkpoint or a baseline also measure it again by its own recipe.

    Exit codes: 0 all gates pass, 1 error, 2 usage, 3 a gate failed, 4 a gate is undecided.

    \b
    Examples:
      ingot validate artifacts/demo
      ingot validate artifacts/demo --checkpoint examples/models/stdlib-llama-6m
    """
    if checkpoint is None and baseline is None:
        if overrides or evidence:
            raise UsageError(
                f"{'--set' if overrides else '--evidence'} is for measuring again; add --checkpoint FOLDER or "
                "--baseline ARTIFACT"
            )
        _check_digests(artifact, as_json)
        return
    with progress_bars():
        found = remeasure(artifact, checkpoint=checkpoint, baseline=baseline, overrides=overrides)
    if evidence:
        write_evidence(found, evidence)
    if as_json:
        print_json(summary(found))
    else:
        print_evidence(found, evidence / "report.html" if evidence else None)
    raise_for(found.gates, found.measured)


def _check_digests(artifact: Path, as_json: bool) -> None:
    manifest = open_artifact(artifact).manifest
    if as_json:
        gates = [gate.model_dump(mode="json") for gate in manifest.gates]
        print_json({"identity": manifest.identity, "files": len(manifest.files), "gates": gates})
        return
    stdout().print(f"all {len(manifest.files)} files are what the manifest says; identity {manifest.identity}")
    if manifest.gates:
        print_gates(manifest.gates)
    print_note("nothing was measured; add --checkpoint FOLDER or --baseline ARTIFACT to measure again")


@click.command("quantize-report")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Measure the weights' errors against it.")
@click.option("--text", type=click.Path(path_type=Path), help="Measure KL on this text; requires --checkpoint.")
@click.option("--tokens", type=click.IntRange(min=1), help="Tokens of the text (default: 2048 or fewer).")
@click.option("--top", default=20, show_default=True, type=click.IntRange(min=1), help="Weights to show.")
@click.option("--no-verify", is_flag=True, help="Do not check the files' digests first.")
@click.option("--json", "as_json", is_flag=True, help="Print all weights as JSON.")
def quantize_report_command(
    artifact: Path,
    checkpoint: Path | None,
    text: Path | None,
    tokens: int | None,
    top: int,
    no_verify: bool,
    as_json: bool,
) -> None:
    """Show ARTIFACT's quantized weights, the most costly first: bits, bytes, scales, errors, KL.

    Errors and KL are those that the build measured; with its checkpoint and a text they are measured again.

    \b
    Examples:
      ingot quantize-report artifacts/demo
      ingot quantize-report artifacts/demo --checkpoint ./my-model --text held-out.txt
    """
    opened = open_artifact(artifact, verify=not no_verify)
    with progress_bars():
        found, remarks = quantize_report(opened, checkpoint, TextOptions(text, tokens) if text else None)
    if as_json:
        print_json({"artifact": opened.manifest.identity, **found.as_json(), "remarks": remarks})
        return
    for remark in remarks:
        print_note(remark)
    if not found.weights:
        stdout().print(f"{artifact}: no weight is quantized", markup=False)
        return
    columns = shown_columns(found)
    rows = [(*weight_cells(weight, columns).values(), code_bars(weight)) for weight in found.worst_first[:top]]
    print_table("Quantized weights, the worst first", (*columns, "Codes"), rows, left=2)
    for sentence in summary_sentences(found):
        stdout().print(f"{sentence}.", markup=False)
    if len(found.weights) > top:
        print_note(f"{top} of {len(found.weights)} weights are shown; --top {len(found.weights)} shows all")
