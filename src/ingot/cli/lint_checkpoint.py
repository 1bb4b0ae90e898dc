"""`ingot lint-checkpoint`: everything that is wrong with a checkpoint, quantized or not."""

from pathlib import Path

import click

from ingot.cli.console import print_json, progress_bars, stdout
from ingot.pipeline.lint import Finding, lint_checkpoint


@click.command("lint-checkpoint")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def lint_checkpoint_command(checkpoint: Path, as_json: bool) -> int:
    """Check CHECKPOINT, a folder or a .gguf file: shapes, finite values, zero points, exclude lists, KV scales.

    Exit codes: 0 no error (there may be warnings), 1 an error.

    \b
    Example:
      ingot lint-checkpoint ./model-gptq
    """
    with progress_bars() as progress:
        findings = lint_checkpoint(checkpoint, progress)
    if as_json:
        print_json([vars(finding) for finding in findings])
    else:
        _print(checkpoint, findings)
    return 1 if any(finding.severity == "error" for finding in findings) else 0


def _print(checkpoint: Path, findings: list[Finding]) -> None:
    for finding in findings:
        stdout().print(f"{finding.severity}: {finding.where}: {finding.message}", markup=False, soft_wrap=True)
    errors = sum(finding.severity == "error" for finding in findings)
    stdout().print(f"{checkpoint}: {errors} errors, {len(findings) - errors} warnings", markup=False)
