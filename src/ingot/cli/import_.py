"""`ingot import`: another tool's checkpoint looked through, written in one canonical form, and ready to build."""

from pathlib import Path

import click

from ingot.cli.console import print_json, progress_bars, stdout
from ingot.cli.transcode import print_transcoded
from ingot.pipeline.foreign import RECIPE, Imported, import_foreign


@click.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="New folder to write.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def import_command(source: Path, output: Path, as_json: bool) -> None:
    """Take over the checkpoint SOURCE, a folder or a .gguf file, as a start for recipes.

    Everything that is wrong with it is told and refused. The folder holds the same weights, proven: plain safetensors,
    or compressed-tensors with the same codes, and a recipe.yaml that builds it. Recipes also read SOURCE as it is.

    \b
    Example:
      ingot import model-q4_k_m.gguf -o model
      ingot build model/recipe.yaml --set evaluation.text=heldout.txt -o artifacts/model
    """
    with progress_bars() as progress:
        outcome = import_foreign(source, output, progress)
    if as_json:
        print_json(_as_json(source, outcome))
    else:
        _print(outcome)


def _as_json(source: Path, outcome: Imported) -> dict[str, object]:
    return {
        "source": str(source),
        **outcome.transcoded.as_json(),
        "warnings": [vars(finding) for finding in outcome.warnings],
        "kept": outcome.kept,
        "floats": {reason: list(names) for reason, names in outcome.floats.items()},
        "recipe": str(outcome.transcoded.folder / RECIPE),
    }


def _print(outcome: Imported) -> None:
    console = stdout()
    for finding in outcome.warnings:
        console.print(f"{finding.severity}: {finding.where}: {finding.message}", markup=False, soft_wrap=True)
    print_transcoded(outcome.transcoded)
    console.print(f"an artifact keeps the codes of {outcome.kept} weights", markup=False)
    for reason, names in outcome.floats.items():
        console.print(f"32-bit floats for {len(names)}, {names[0]} the first: {reason}", markup=False, soft_wrap=True)
    console.print(f"\n{outcome.transcoded.folder / RECIPE}:\n{outcome.recipe}", markup=False, soft_wrap=True)
