"""`ingot export`: a recipe's quantized weights as a checkpoint that other tools load."""

from pathlib import Path

import click

from ingot.cli.console import human_bytes, print_json, progress_bars, stdout
from ingot.pipeline.export import FORMATS, export_checkpoint
from ingot.pipeline.recipe_loader import load_recipe


@click.command("export")
@click.argument("recipe")
@click.option("--to", "format_name", required=True, metavar="FORMAT", help=f"One of {', '.join(FORMATS)}.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="New folder to write.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set one value of the recipe.")
@click.option("--round-scales", is_flag=True, help="Round scales to float16, which gptq, awq and gguf store.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def export_command(
    recipe: str, format_name: str, output: Path, overrides: tuple[str, ...], round_scales: bool, as_json: bool
) -> None:
    """Quantize RECIPE's checkpoint and write it in another tool's format, with its tokenizer.

    \b
    Examples:
      ingot export int4-cpu --to compressed-tensors -o mine-w4 --set checkpoint=./my-model
          --set passes.quantize-weights.embedding=none --set passes.quantize-weights.lm_head=none
      ingot export fp32-cpu --to safetensors -o floats --set checkpoint=model-q4_0.gguf
    """
    loaded = load_recipe(recipe, overrides)
    with progress_bars() as progress:
        folder = export_checkpoint(loaded, output, format_name, round_scales=round_scales, progress=progress)
    size = sum(file.stat().st_size for file in folder.iterdir())
    if as_json:
        print_json({"path": str(folder), "format": format_name, "bytes": size})
        return
    stdout().print(f"wrote {folder} ({format_name}, {human_bytes(size)})", markup=False)
