"""`ingot quantize-report`: which quantized weights cost an artifact most, and what more bits would gain."""

from pathlib import Path

import click

from ingot.artifact import open_artifact
from ingot.builder.quantize_report import TextOptions, quantize_report
from ingot.cli.console import print_json, print_note, print_table, progress_bars, stdout
from ingot.passes.progress import progress_to
from ingot.validation.quantization_text import code_bars, shown_columns, summary_sentences, weight_cells


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
