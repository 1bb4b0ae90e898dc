"""`ingot validate`: is the artifact what it says, and does what it promised still hold here?"""

from pathlib import Path

import click

from ingot.artifact import open_artifact
from ingot.builder import remeasure
from ingot.cli.console import print_json, print_note, progress_bars, stdout
from ingot.cli.evidence import print_evidence
from ingot.cli.gates import print_gates
from ingot.validation.evidence import write_evidence
from ingot.validation.evidence_json import summary
from ingot.validation.gates import raise_for


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
