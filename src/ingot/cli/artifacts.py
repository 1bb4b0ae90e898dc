"""`ingot inspect`: what an artifact is, what it holds, and how it was judged.

`ingot validate`: is the artifact what it says, and does what it promised still hold here?

`ingot quantize-report`: which quantized weights cost an artifact most, and what more bits would gain.
"""

import json
from pathlib import Path

import click

from ingot.artifact import CALIBRATION_FILE, Artifact, open_artifact
from ingot.builder import remeasure
from ingot.builder.quantize_report import TextOptions, quantize_report
from ingot.cli.console import print_json, print_note, print_table, progress_bars, stdout
from ingot.cli.tables import print_bucket, print_evidence, print_gates, print_program
from ingot.passes.progress import progress_to
from ingot.sizes import format_bytes
from ingot.validation.evidence import write_evidence
from ingot.validation.evidence_json import summary
from ingot.validation.gates import raise_for
from ingot.validation.report.quantization_text import code_bars, shown_columns, summary_sentences, weight_cells


@click.command("inspect")
@click.argument("artifact", type=click.Path())
@click.option(
    "--program", "show_program", is_flag=True, help="Also list the program's steps, or its buckets and kernels."
)
@click.option("--bucket", metavar="NAME", help="Also list the launches of one bucket, as decode-1.")
@click.option("--files", "show_files", is_flag=True, help="Also list every file with its digest.")
@click.option("--no-verify", is_flag=True, help="Do not check the files' digests first.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def inspect_command(
    artifact: str, show_program: bool, bucket: str | None, show_files: bool, no_verify: bool, as_json: bool
) -> None:
    """Show what ARTIFACT holds and how its gates were decided. Digests are checked first.

    \b
    Example:
      ingot inspect artifacts/demo --files
    """
    opened = open_artifact(artifact, verify=not no_verify)
    if as_json:
        print_json(opened.manifest.model_dump(mode="json"))
        return
    _print_facts(opened, verified=not no_verify)
    if opened.manifest.gates:
        print_gates(opened.manifest.gates)
    if show_program:
        print_program(opened)
    if bucket:
        print_bucket(opened, bucket)
    if show_files:
        rows = [(n, format_bytes(e.bytes), e.sha256) for n, e in sorted(opened.manifest.files.items())]
        print_table("Files", ("file", "size", "SHA-256"), rows)


def _print_facts(artifact: Artifact, verified: bool) -> None:
    manifest = artifact.manifest
    model, kv = manifest.model, manifest.kv
    heads = f"{kv.num_kv_heads} KV heads of {kv.head_dim}"
    rows = {
        "name": manifest.name,
        "identity": manifest.identity + (" (verified)" if verified else " (not verified)"),
        "model": f"{model.family}, {model.num_parameters:,} parameters, {model.num_layers} layers, {heads}",
        "context": f"{model.context_tokens:,} tokens, vocabulary {model.vocab_size:,}",
        "target": f"{manifest.target}, run by {manifest.engine}",
        "KV block": f"{kv.block_tokens} tokens, {kv.dtype}, {format_bytes(kv.block_bytes)}",
        "size": f"{format_bytes(artifact.total_bytes)} in {len(manifest.files)} files",
        "built with": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }
    if artifact.has(CALIBRATION_FILE):
        rows["calibrated"] = _calibration(artifact)
    console = stdout()
    for key, value in rows.items():
        console.print(f"{key:<11}{value}", markup=False)
    if artifact.has("evidence/report.html"):
        console.print(f"{'report':<11}{artifact.path / 'evidence/report.html'}", markup=False)


def _calibration(artifact: Artifact) -> str:
    facts = json.loads((artifact.path / CALIBRATION_FILE).read_text(encoding="utf-8"))
    digest = facts["sha256"][:16]
    return (
        f"on {facts['tokens']:,} of {facts['text_tokens']:,} tokens of {facts['text']} (SHA-256 {digest}): "
        f"{facts['sequences']} sequences of {facts['documents']:,} documents, {facts['packing']}, seed {facts['seed']}"
    )


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
    """Check every digest of ARTIFACT; with a checkpoint or a baseline also measure it again, by its own recipe.

    Exit codes: 0 all gates pass, 1 error, 2 usage, 3 a gate failed, 4 a gate undecided.

    \b
    Examples:
      ingot validate artifacts/demo
      ingot validate artifacts/demo --checkpoint examples/models/stdlib-llama-6m
    """
    if checkpoint is None and baseline is None:
        _check_digests(artifact, as_json)
        return
    with progress_bars() as progress:
        found = remeasure(artifact, checkpoint=checkpoint, baseline=baseline, overrides=overrides, progress=progress)
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
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Measure the weights' errors against this one.")
@click.option("--text", type=click.Path(path_type=Path), help="Measure KL on this text; wants --checkpoint.")
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
    """Show ARTIFACT's quantized weights, the costliest first: bits, bytes, scales, errors, KL.

    Errors and KL are those that the build sealed; with its checkpoint, and a text, they are measured again.

    \b
    Examples:
      ingot quantize-report artifacts/demo
      ingot quantize-report artifacts/demo --checkpoint ./my-model --text held-out.txt
    """
    opened = open_artifact(artifact, verify=not no_verify)
    with progress_bars() as progress, progress_to(progress):
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
