"""`ingot inspect`: what an artifact is, what it holds, and how it was judged."""

import json

import click

from ingot.artifact import CALIBRATION_FILE, Artifact, open_artifact
from ingot.cli.console import human_bytes, print_json, print_table, stdout
from ingot.cli.gates import print_gates
from ingot.cli.program_tables import print_bucket, print_program


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
        rows = [(n, human_bytes(e.bytes), e.sha256) for n, e in sorted(opened.manifest.files.items())]
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
        "KV block": f"{kv.block_tokens} tokens, {kv.dtype}, {human_bytes(kv.block_bytes)}",
        "size": f"{human_bytes(artifact.total_bytes)} in {len(manifest.files)} files",
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
