"""`ingot export`: quantized weights of a recipe or an artifact as a checkpoint that other tools load."""

from pathlib import Path

import click

from ingot.artifact import MANIFEST, open_artifact
from ingot.cli.console import human_bytes, print_json, print_note, progress_bars, stdout
from ingot.errors import UsageError
from ingot.pipeline.export import FORMATS, export_artifact, export_checkpoint
from ingot.pipeline.recipe_loader import load_recipe


@click.command("export")
@click.argument("source", metavar="ARTIFACT|RECIPE")
@click.option("--to", "format_name", required=True, metavar="FORMAT", help=f"One of {', '.join(FORMATS)}.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="New folder to write.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set one value of the recipe.")
@click.option("--round-scales", is_flag=True, help="Round scales to float16, which gptq, awq and gguf store.")
@click.option("--widen", is_flag=True, help="Same values in another form: tables in floats, smaller groups, more bits.")
@click.option("--no-resume", is_flag=True, help="Calibrate from the start, even where an earlier run was cut off.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def export_command(
    source: str,
    format_name: str,
    output: Path,
    overrides: tuple[str, ...],
    round_scales: bool,
    widen: bool,
    no_resume: bool,
    as_json: bool,
) -> None:
    """Write ARTIFACT's weights, or those that RECIPE makes of its checkpoint, in another tool's format.

    An artifact needs neither its checkpoint nor its calibration text again. The tokenizer is written beside the
    weights.

    \b
    Examples:
      ingot export artifacts/mine --to compressed-tensors --widen -o mine-w4
      ingot export int4-cpu --to compressed-tensors -o mine-w4 --set checkpoint=./my-model
          --set passes.quantize-weights.embedding=none --set passes.quantize-weights.lm_head=none
      ingot export fp32-cpu --to safetensors -o floats --set checkpoint=model-q4_0.gguf
      ingot export int4-cpu --to onnx -o mine-onnx --set checkpoint=./my-model
    """
    notes: list[str] = []
    with progress_bars() as progress:
        options = {"round_scales": round_scales, "widen": widen}
        if (Path(source) / MANIFEST).is_file():
            _refuse_overrides(source, overrides)
            artifact = open_artifact(source)
            folder = export_artifact(artifact, output, format_name, **options, progress=progress, note=notes.append)
        else:
            recipe = load_recipe(source, overrides)
            folder = export_checkpoint(
                recipe, output, format_name, **options, resume=not no_resume, progress=progress, note=notes.append
            )
    size = sum(file.stat().st_size for file in folder.iterdir())
    if as_json:
        print_json({"path": str(folder), "format": format_name, "bytes": size, "notes": notes})
        return
    for words in notes:
        print_note(words)
    stdout().print(f"wrote {folder} ({format_name}, {human_bytes(size)})", markup=False)


def _refuse_overrides(artifact: str, overrides: tuple[str, ...]) -> None:
    if overrides:
        raise UsageError(
            f"{artifact} is an artifact, whose weights are what they are: --set {overrides[0]} can only change what a "
            "recipe makes; name the recipe instead"
        )
