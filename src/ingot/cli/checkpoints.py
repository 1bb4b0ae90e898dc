"""Commands that read and write other tools' checkpoints: export, transcode, import, lint-checkpoint."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import click

from ingot.artifact import MANIFEST, open_artifact
from ingot.cli.console import print_json, print_note, progress_bars, stdout
from ingot.errors import UsageError
from ingot.pipeline.interchange.export import export_artifact, export_checkpoint
from ingot.pipeline.interchange.folder import FLOAT_TYPES
from ingot.pipeline.interchange.formats import CHECKPOINT_FORMATS, FORMATS
from ingot.pipeline.interchange.import_ import RECIPE, Imported, import_foreign
from ingot.pipeline.interchange.lint import Finding, lint_checkpoint
from ingot.pipeline.interchange.transcode import Transcoded, transcode
from ingot.pipeline.recipe.load import load_recipe
from ingot.sizes import format_bytes

_SOURCE = click.argument("source", type=click.Path(path_type=Path))
_OUTPUT = click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="New folder to write.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")


def _format_option(formats: Iterable[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    names = ", ".join(formats)
    return click.option("--to", "format_name", required=True, metavar="FORMAT", help=f"One of {names}.")


@click.command("export")
@click.argument("source", metavar="ARTIFACT|RECIPE")
@_format_option(FORMATS)
@_OUTPUT
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set one value of the recipe.")
@click.option("--round-scales", is_flag=True, help="Round scales to float16, which gptq, awq and gguf store.")
@click.option("--widen", is_flag=True, help="Allow other forms of the same values: more bits, smaller groups, floats.")
@click.option("--no-resume", is_flag=True, help="Calibrate from the start instead of resuming an interrupted run.")
@_JSON
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
    """Write the weights of ARTIFACT, or those that RECIPE makes from its checkpoint, in another tool's format.

    Exporting an artifact needs neither its checkpoint nor its calibration text. The tokenizer is written with the
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
    with progress_bars():
        options = {"round_scales": round_scales, "widen": widen}
        if (Path(source) / MANIFEST).is_file():
            _refuse_overrides(source, overrides)
            artifact = open_artifact(source)
            folder = export_artifact(artifact, output, format_name, **options, note=notes.append)
        else:
            recipe = load_recipe(source, overrides)
            folder = export_checkpoint(recipe, output, format_name, **options, resume=not no_resume, note=notes.append)
    if as_json:
        print_json({"path": str(folder), "format": format_name, "bytes": _size(folder), "notes": notes})
        return
    for text in notes:
        print_note(text)
    stdout().print(f"wrote {folder} ({format_name}, {format_bytes(_size(folder))})", markup=False)


def _refuse_overrides(artifact: str, overrides: tuple[str, ...]) -> None:
    if overrides:
        raise UsageError(
            f"{artifact} is an artifact, whose weights are fixed: --set {overrides[0]} can only change what a recipe "
            "makes; name the recipe instead"
        )


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


@click.command("transcode")
@_SOURCE
@_format_option(CHECKPOINT_FORMATS)
@_OUTPUT
@click.option("--proof", type=click.Path(path_type=Path), help="File to write the proof to, as JSON.")
@click.option("--lossy", is_flag=True, help="Round scales, minima and floats that the format stores in 16 bits.")
@click.option("--floats", is_flag=True, help="compressed-tensors: write layers that it cannot hold as float32.")
@click.option("--dtype", metavar="TYPE", help=f"Type of weights written as floats: {', '.join(FLOAT_TYPES)}.")
@_JSON
def transcode_command(
    source: Path,
    format_name: str,
    output: Path,
    proof: Path | None,
    lossy: bool,
    floats: bool,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Write the checkpoint SOURCE, a folder or a .gguf file, in another format without changing a weight.

    Codes, scales and zero points are copied; nothing is quantized again. The result is read back, and every dequantized
    weight is compared with the source's before the folder appears. If the format cannot hold a scheme, the error names
    the formats that can.

    \b
    Examples:
      ingot transcode ./model-gptq --to compressed-tensors -o model-ct --proof proof.json
      ingot transcode model-q4_0.gguf --to awq -o model-awq
    """
    with progress_bars():
        outcome = transcode(source, output, format_name, lossy=lossy, floats=floats, dtype=dtype)
    if proof is not None:
        proof.write_text(json.dumps({"source": str(source), **outcome.as_json()}, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json({"source": str(source), **outcome.as_json()})
    else:
        _print_transcoded(outcome)


def _print_transcoded(outcome: Transcoded) -> None:
    proof, size = outcome.proof, format_bytes(_size(outcome.folder))
    for note in outcome.notes:
        _print(f"note: {note}")
    for part in outcome.left_out:
        _print(f"left out: {part}")
    where = f" in {proof.largest_in}, {proof.changed_tensors} tensors changed" if proof.changed_tensors else ""
    _print(f"wrote {outcome.folder} ({outcome.target}, {size})")
    _print(
        f"proof: {proof.tensors} tensors, {proof.elements:,} elements, largest difference "
        f"{proof.largest_difference:g}{where}"
    )
    _print(f"weights of the source   sha256:{proof.source_digest}")
    _print(f"weights as written      sha256:{proof.written_digest}")


def _print(text: str) -> None:
    stdout().print(text, markup=False, soft_wrap=True)


@click.command("import")
@_SOURCE
@_OUTPUT
@_JSON
def import_command(source: Path, output: Path, as_json: bool) -> None:
    """Check the checkpoint SOURCE, a folder or a .gguf file, and write it in one form with a recipe that builds it.

    If SOURCE has errors, all of them are listed and nothing is written. The folder holds the same weights, proven, as
    plain safetensors or as compressed-tensors with the same codes, and a recipe.yaml. Recipes can also read SOURCE
    itself.

    \b
    Example:
      ingot import model-q4_k_m.gguf -o model
      ingot build model/recipe.yaml --set evaluation.text=heldout.txt -o artifacts/model
    """
    with progress_bars():
        outcome = import_foreign(source, output)
    if as_json:
        print_json(_as_json(source, outcome))
    else:
        _print_imported(outcome)


def _as_json(source: Path, outcome: Imported) -> dict[str, object]:
    return {
        "source": str(source),
        **outcome.transcoded.as_json(),
        "warnings": [vars(finding) for finding in outcome.warnings],
        "kept": outcome.kept,
        "floats": {reason: list(names) for reason, names in outcome.floats.items()},
        "recipe": str(outcome.transcoded.folder / RECIPE),
    }


def _print_imported(outcome: Imported) -> None:
    _print_findings(outcome.warnings)
    _print_transcoded(outcome.transcoded)
    _print(f"an artifact keeps the codes of {outcome.kept} weights")
    for reason, names in outcome.floats.items():
        _print(f"32-bit floats for {len(names)}, {names[0]} the first: {reason}")
    _print(f"\n{outcome.transcoded.folder / RECIPE}:\n{outcome.recipe}")


@click.command("lint-checkpoint")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@_JSON
def lint_checkpoint_command(checkpoint: Path, as_json: bool) -> int:
    """Check CHECKPOINT, a folder or a .gguf file: shapes, finite values, zero points, exclude lists, KV scales.

    Exit codes: 0 no errors (there may be warnings), 1 an error.

    \b
    Example:
      ingot lint-checkpoint ./model-gptq
    """
    with progress_bars():
        findings = lint_checkpoint(checkpoint)
    errors = sum(finding.severity == "error" for finding in findings)
    if as_json:
        print_json([vars(finding) for finding in findings])
    else:
        _print_findings(findings)
        _print(f"{checkpoint}: {errors} errors, {len(findings) - errors} warnings")
    return 1 if errors else 0


def _print_findings(findings: Iterable[Finding]) -> None:
    for finding in findings:
        _print(f"{finding.severity}: {finding.where}: {finding.message}")
